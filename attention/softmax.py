"""Softmax in parts: attention over a tile of keys, and how such parts are joined (online softmax, Milakov & Gimelshein 2018;
FlashAttention, Dao et al. 2022)."""
from dataclasses import dataclass

import torch

from kv.view import Tile


def scores_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores and weights are at least float32: a half-precision GEMM would round them."""
    return torch.promote_types(dtype, torch.float32)


def tile_scores(rows: torch.Tensor, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """rows (b, Hkv, R, D), scaled, against the keys of a tile: (b, Hkv, R, s). The scales of int8 keys multiply the scores,
    which are fewer than the keys' elements."""
    scores = rows @ tile.k.to(dtype).transpose(2, 3)
    return scores if tile.k_scale is None else scores.mul_(tile.k_scale.to(dtype).transpose(2, 3))


@dataclass
class PartialSoftmax:
    """Attention over some of the keys, of R queries: the values' sum weighted by exp(score - top), and what joins it to
    others. top, total: (b, Hkv, R, 1); values: (b, Hkv, R, D)."""
    top: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, tile: Tile) -> 'PartialSoftmax':
        """scores (b, Hkv, R, s), which are overwritten; the scales of int8 values multiply the weights."""
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if tile.v_scale is not None:
            weights.mul_(tile.v_scale.to(weights.dtype).transpose(2, 3))
        return cls(top, total, weights @ tile.v.to(weights.dtype))

    def join(self, other: 'PartialSoftmax') -> 'PartialSoftmax':
        top = torch.maximum(self.top, other.top)
        a, b = (self.top - top).exp_(), (other.top - top).exp_()
        return PartialSoftmax(top, self.total * a + other.total * b, self.values * a + other.values * b)

    def result(self) -> torch.Tensor:
        return self.values / self.total
