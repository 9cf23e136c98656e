"""The most likely token of each row of logits in two kernels: of each part of the vocabulary, then
of the parts. torch's argmax has one program a row, which reads alone, and the checks around it are
four kernels more.
"""
import torch
import triton
import triton.language as tl

MOST_PARTS, PROGRAMS = 64, 512  # parts of a row; programs wanted for all rows
SHORTEST = 256                  # logits of a part, or a program takes longer to begin than to read


@triton.jit
def _of_parts(LOGITS, VALUES, PLACES, V, n_parts, of_part, BLOCK: tl.constexpr):
    """The largest logit of a part of a row and where it is, the first of equal ones."""
    row, part = (tl.program_id(0) // n_parts).to(tl.int64), tl.program_id(0) % n_parts
    i = tl.arange(0, BLOCK)
    at = part * of_part + i
    x = tl.load(LOGITS + row * V + at, mask=(i < of_part) & (at < V), other=float('-inf'))
    x = x.to(tl.float32)
    lost = tl.sum((x != x).to(tl.int32), 0) > 0  # a maximum may ignore NaN
    value, place = tl.max(tl.where(x != x, float('-inf'), x), 0, return_indices=True)
    tl.store(VALUES + row * n_parts + part, tl.where(lost, float('nan'), value))
    tl.store(PLACES + row * n_parts + part, part * of_part + place)


@triton.jit
def _of_rows(VALUES, PLACES, TOKENS, n_parts, BLOCK: tl.constexpr):
    """The largest of a row's parts; -1 if that is infinite or a part has a NaN."""
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(VALUES + row * n_parts + part, mask=part < n_parts, other=float('-inf'))
    lost = tl.sum((x != x).to(tl.int32), 0) > 0
    value, best = tl.max(tl.where(x != x, float('-inf'), x), 0, return_indices=True)
    token = tl.load(PLACES + row * n_parts + best)
    finite = (value > float('-inf')) & (value < float('inf'))
    tl.store(TOKENS + row, tl.where(finite & (lost == 0), token, -1).to(tl.int64))


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """What `engine.requests.sampler.draw_plain` gives for greedy requests. logits: (B, V),
    contiguous. Returns (B,) int64."""
    B, V = logits.shape
    n_parts = max(MOST_PARTS // 4, min(MOST_PARTS, PROGRAMS // B))
    n_parts = min(n_parts, triton.cdiv(V, SHORTEST))
    of_part = triton.cdiv(V, n_parts)
    values = logits.new_empty(B, n_parts, dtype=torch.float32)
    places = logits.new_empty(B, n_parts, dtype=torch.int32)
    tokens = logits.new_empty(B, dtype=torch.int64)
    _of_parts[(B * n_parts,)](logits, values, places, V, n_parts, of_part,
                              BLOCK=triton.next_power_of_2(of_part), num_warps=4)
    _of_rows[(B,)](values, places, tokens, n_parts, BLOCK=triton.next_power_of_2(n_parts),
                   num_warps=1)
    return tokens
