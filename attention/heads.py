"""Query heads that share a K/V head become rows of one matrix: K and V are never expanded."""
import torch


def fold_heads(q: torch.Tensor, n_kv_head: int) -> torch.Tensor:
    """(B, H, t, D) -> (B, Hkv, H/Hkv * t, D): the query heads of a K/V head, one after another."""
    B, H, t, D = q.shape
    return q.reshape(B, n_kv_head, H // n_kv_head * t, D)


def unfold_heads(y: torch.Tensor, n_head: int) -> torch.Tensor:
    """(B, Hkv, H/Hkv * t, D) -> (B, H, t, D), the inverse of `fold_heads`."""
    B, n_kv_head, rows, D = y.shape
    return y.reshape(B, n_head, rows * n_kv_head // n_head, D)


def expand_heads(x: torch.Tensor, n_head: int) -> torch.Tensor:
    """K or V (B, Hkv, S, D) -> (B, H, S, D), repeated for its query heads; a view if Hkv is 1."""
    B, n_kv_head, S, D = x.shape
    return x[:, :, None].expand(B, n_kv_head, n_head // n_kv_head, S, D).flatten(1, 2)
