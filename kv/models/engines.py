"""What engines allocate for a model's memory in bytes, by their sources. No torch here.

    needed                 what the next token can attend to, and no more
    transformers, dynamic  DynamicCache(config): grows; windows keep W - 1 positions between steps
    transformers, static   StaticCache(config, max_cache_len=T): T positions, or W
    vLLM                   pages, equal in bytes for all layers, by groups of layers

Sources: transformers 5.23 `cache_utils.py`; vLLM `v1/kv_cache_interface.py` and
`v1/core/kv_cache_utils.py` (its report "maximum concurrency" divides by the same number).
docs/accounting.md says what was compared with runs.
"""
from collections import Counter
from math import ceil

from kv.models.memory import CHUNK, NANOKV, WINDOW, Memory

PAGE_SIZE = 16            # vLLM's block_size on GPUs
STEP_TOKENS = 8192        # vLLM's max_num_batched_tokens for serving on large GPUs; 2,048 on others


def allocated(memory: Memory, batch: int, length: int, dtype: str, page_size: int = PAGE_SIZE,
              step_tokens: int = STEP_TOKENS) -> dict[str, int | None]:
    """{engine: bytes for K and V in `dtype`}; None where it is not known, or the engine cannot run
    the model."""
    found = {'transformers, dynamic': transformers(memory, batch, length, dtype, 'dynamic'),
             'transformers, static': transformers(memory, batch, length, dtype, 'static'),
             'vLLM, prefill': vllm(memory, batch, length, dtype, page_size, step_tokens),
             'vLLM, decode': vllm(memory, batch, length, dtype, page_size, 1)}
    if any(store.stride > 1 for store in memory.stores):
        return {name: n if name == 'transformers, dynamic' else None for name, n in found.items()}
    if memory.model_type == NANOKV and any(len(store.parts) == 1 for store in memory.stores):
        found |= {name: None for name in found if name.startswith('vLLM')}  # stores K = V twice
    return found


def needed(memory: Memory, batch: int, length: int, kv_dtype: str, dtype: str) -> int:
    """Bytes that `batch` sequences need after `length` tokens: exact for an engine that stores
    nothing twice and rounds nothing up. A window counts W positions, the next token's among them.

    kv_dtype: of K and V. dtype: of states that are not always float32.
    """
    return batch * sum(store.positions(length) * store.position_nbytes(kv_dtype)
                       + store.states_nbytes(dtype, kv_dtype, length) for store in memory.stores)


def transformers(memory: Memory, batch: int, length: int, dtype: str, kind: str) -> int:
    """Bytes of the tensors in a DynamicCache after `length` tokens ('dynamic'; its windows hold
    W - 1 positions), or in a StaticCache ('static'). Convolutions hold all of their kernel."""
    total = 0
    for store in memory.stores:
        held = store.positions(length) if store.trimmed else length
        if store.window and store.trimmed and kind == 'dynamic':
            held = min(length, store.window - 1)
        total += (held * store.position_nbytes(dtype)
                  + store.states_nbytes(dtype, dtype, length, spare=True))
    return batch * total


def vllm(memory: Memory, batch: int, length: int, kv_dtype: str, page_size: int = PAGE_SIZE,
         step_tokens: int = STEP_TOKENS) -> int | None:
    """Bytes of pages that vLLM sets aside for `batch` requests of `length` tokens in one step.

    A window takes its W - 1 positions and those of a step, and one page more, since it need not
    begin at a page's first position. Layers of one kind are divided into groups as large as the
    rarest kind (or the most frequent, if it has less than 1.5 times as many layers), the last of
    them filled up. None where pages cannot be made equal in bytes (vLLM refuses the model), and for
    states and indexers, whose pages are not accounted for.
    """
    if any(store.states or any(part.name == 'indexer key' for part in store.parts)
           for store in memory.stores):
        return None

    def pages(kind, window, positions):
        if kind == CHUNK:
            return ceil(min(window + step_tokens, length) / positions)
        if kind == WINDOW:
            return ceil(min(window - 1 + step_tokens, length) / positions) + 1
        return ceil(length / positions)

    kinds = Counter((store.kind, store.window, store.position_nbytes(kv_dtype))
                    for store in memory.stores)
    if len({(kind, window) for kind, window, _ in kinds}) <= 1:  # one group, whatever the widths
        return batch * page_size * sum(n * nbytes * pages(kind, window, page_size)
                                       for (kind, window, nbytes), n in kinds.items())
    largest = max(nbytes for *_, nbytes in kinds)
    if any(largest % nbytes for *_, nbytes in kinds):
        return None
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if most < 1.5 * fewest else fewest
    total = sum(ceil(n / group_size) * pages(kind, window, page_size * largest // nbytes)
                for (kind, window, nbytes), n in kinds.items())  # pages are equal in bytes
    return batch * total * group_size * page_size * largest
