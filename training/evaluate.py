"""A model's loss on fixed windows of text, using the training forward pass or a KV cache."""
import copy
import dataclasses
import math

import torch
from torch.nn import functional as F


def window_starts(n_tokens: int, T: int, n: int = 0) -> list[int]:
    """Where n windows of T + 1 tokens start (0 or too many = as many as fit), spread evenly, so
    that their targets do not overlap."""
    most = (n_tokens - 1) // T
    n = min(n, most) if n else most
    return [i * (n_tokens - 1 - T) // max(n - 1, 1) for i in range(n)]


def spread_windows(tokens, T: int, n: int = 0) -> torch.Tensor:
    """(n, T + 1) int64: the windows of `window_starts` of a `data.tokenfiles.TokenSplit`."""
    return torch.stack([torch.from_numpy(tokens.window(i, T + 1).astype('int64'))
                        for i in window_starts(len(tokens), T, n)])


def forward(model):
    """Return a function idx -> logits that uses the plain forward pass."""
    return lambda idx: model(idx, all_logits=True)[0]


def through_cache(model, kv_dtype: str, first: int = 64, chunk: int = 16):
    """Return a function idx -> logits through a cache: `first` tokens, then the rest in chunks."""
    def logits(idx):
        B, T = idx.shape
        cache = model.new_cache(B, T, kv_dtype)
        ends = [0, *range(min(first, T), T, chunk), T]
        return torch.cat([model(idx[:, a:b], cache=cache, all_logits=True)[0]
                          for a, b in zip(ends, ends[1:])], dim=1)
    return logits


@torch.inference_mode()
def judge(logits_of, windows: torch.Tensor, batch_size: int = 16) -> torch.Tensor:
    """Return (n, T) float64, the losses in nats of the targets in windows (n, T + 1), which are on
    the model's device."""
    # allocated first: small results between large temporary tensors would fragment the heap
    nats = torch.empty(windows[:, 1:].shape, dtype=torch.float64)
    for i in range(0, len(windows), batch_size):
        rows = windows[i:i + batch_size]
        logits = logits_of(rows[:, :-1])
        for j, (one, y) in enumerate(zip(logits, rows[:, 1:]), start=i):
            nats[j] = F.cross_entropy(one.double(), y, reduction='none')
    return nats


def with_rounding(model, on: bool):
    """A copy of the model with int8 rounding of K and V in its forward pass on or off."""
    twin = copy.deepcopy(model).eval()
    twin.config = dataclasses.replace(model.config, kv_quant_train='int8' if on else '')
    for block in twin.transformer.h:
        block.attn.kv_quant_train = twin.config.kv_quant_train
    return twin


def n_bytes(tokenizer, windows: torch.Tensor) -> int:
    """UTF-8 bytes of the windows' targets."""
    return sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in windows)


def bits_per_byte(nats_per_token: float, n_tokens: int, n_bytes: int) -> float:
    return nats_per_token * n_tokens / n_bytes / math.log(2)
