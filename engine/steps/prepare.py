"""Compiles kernels and captures decode steps before the first request."""
import torch

from common.errors import UserError
from engine.steps.captured import CapturedDecode

# Longer rows use the same kernels, see `split_blocks` in attention/kernels/decode.py (on GPUs with
# few multiprocessors, not beyond 8,192 keys).
MANY_KEYS = 2304


@torch.inference_mode()
def prepare(engine) -> None:
    """Compile the kernels and capture the decode steps for requests of any length, so that no
    request has to wait. Does nothing unless decode steps are captured. Raises UserError if there
    are unfinished requests."""
    if not isinstance(engine.fast_decode, CapturedDecode):
        return
    if engine.n_unfinished:
        raise UserError(f'prepare: {engine.n_unfinished} requests have not ended')
    engine.fast_decode.prepare()
    model, cache = engine.model, engine.cache
    for row in range(min(2, cache.batch_size)):  # row 1 may be aligned differently
        for chunks in _chunks_of_every_kind(cache, engine.scheduler.prefill_chunk,
                                             engine.scheduler.alone):
            try:
                for n in chunks:
                    idx = torch.zeros(1, n, dtype=torch.int64, device=model.device)
                    model(idx, cache=cache, lens=[n], rows=[row])
            finally:
                cache.reset()


def _chunks_of_every_kind(cache, beside: int, most: int) -> list[list[int]]:
    """Chunk sizes up to `most`, or `beside` decoding rows, that use every prefill kernel: each size
    after few tokens, after many, and as the first chunk of a row."""
    room = min(cache.max_seq_len, cache.table.n_pages * cache.table.page_size)
    chunks, sizes = [], [1 << k for k in range(most.bit_length())]
    longer = max(0, -(-(MANY_KEYS - sum(sizes)) // most))
    for n in [1, *sizes, *[most] * longer, *sizes]:
        if sum(chunks) + n <= room:
            chunks.append(n)
    return [chunks, *([n] for n in {2, 15, 16, beside - 1, beside, most - 1, most}
                      if 1 < n <= min(most, room))]
