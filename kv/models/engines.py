"""What engines allocate for a model's memory, in bytes, by the rules of their sources. No torch
here.

    needed                 what the next token can attend to, and no more
    transformers, dynamic  DynamicCache(config): grows; windows keep W - 1 positions between steps
    transformers, static   StaticCache(config, max_cache_len=T): T positions, or W
    vLLM                   pages, equal in bytes for all layers, by groups of layers
    llama.cpp              cells for the whole context, or for a window and a micro-batch

Sources: transformers 5.23 `cache_utils.py`; vLLM `v1/kv_cache_interface.py` and
`v1/core/kv_cache_utils.py` (its report "maximum concurrency" divides by the same number); llama.cpp
`src/llama-kv-cache-iswa.cpp`, `llama-hparams.cpp`. docs/accounting.md says what was compared with
runs.
"""
from collections import Counter

from kv.models.memory import CHUNK, WINDOW, Memory, Store
from kv.plan import KV_DTYPES, checked_dtype

FLOAT32_BYTES = 4
PAGE_SIZE = 16            # vLLM's block_size on GPUs
STEP_TOKENS = 8192        # vLLM's max_num_batched_tokens for serving on large GPUs; 2,048 on others
CELLS, UBATCH = 256, 512  # llama.cpp


def position_nbytes(store: Store, kv_dtype: str) -> int:
    """Bytes of one position: elements, and a scale for each head's vector if quantized."""
    element, scale = KV_DTYPES[checked_dtype(kv_dtype)]
    return sum(part.heads * int(part.width * element + scale) for part in store.parts)


def states_nbytes(store: Store, dtype: str, spare: bool = False) -> int:
    """Bytes of a layer's states for one sequence, in `dtype` where they are not always float32.
    spare: with the inputs of convolutions that only transformers keeps."""
    size = KV_DTYPES[checked_dtype(dtype)][0]
    return int(sum((state.size + spare * state.spare * state.shape[0])
                   * (FLOAT32_BYTES if state.dtype else size) for state in store.states))


def needed(memory: Memory, batch: int, length: int, kv_dtype: str, dtype: str) -> int:
    """Bytes that `batch` sequences need after `length` tokens: exact for an engine that stores
    nothing twice and rounds nothing up. A window counts W positions, the next token's among them.

    kv_dtype: of K and V. dtype: of states that are not always float32.
    """
    return batch * sum(store.positions(length) * position_nbytes(store, kv_dtype)
                       + states_nbytes(store, dtype) for store in memory.stores)


def transformers_dynamic(memory: Memory, batch: int, length: int, dtype: str) -> int:
    """Bytes of the tensors in a DynamicCache after `length` tokens. Windows hold W - 1 positions,
    convolutions all columns of their kernel."""
    total = 0
    for store in memory.stores:
        held = min(length, store.window - 1) if store.window else length
        total += held * position_nbytes(store, dtype) + states_nbytes(store, dtype, spare=True)
    return batch * total


def transformers_static(memory: Memory, batch: int, length: int, dtype: str) -> int:
    """Bytes of the tensors in a StaticCache with max_cache_len=length."""
    return batch * sum(store.positions(length) * position_nbytes(store, dtype)
                       + states_nbytes(store, dtype, spare=True) for store in memory.stores)


def vllm(memory: Memory, batch: int, length: int, kv_dtype: str, page_size: int = PAGE_SIZE,
         step_tokens: int = STEP_TOKENS) -> int | None:
    """Bytes of the pages that vLLM sets aside for `batch` requests of `length` tokens, in a step of
    `step_tokens`.

    A window takes its W - 1 positions and those of a step, and one page more, since it need not
    begin at a page's first position. Layers of one kind are divided into groups as large as the
    rarest kind (or the most frequent, if it has less than 1.5 times as many layers), the last of
    them filled up. None where pages cannot be made equal in bytes (vLLM refuses the model), and for
    states and indexers, whose pages are not accounted for.
    """
    if any(store.states or any(part.name == 'indexer key' for part in store.parts)
           for store in memory.stores):
        return None
    kinds = Counter((store.kind, store.window, position_nbytes(store, kv_dtype))
                    for store in memory.stores)
    if len({(kind, window) for kind, window, _ in kinds}) <= 1:  # one group, whatever the widths
        return batch * sum(n * _pages(kind, window, length, page_size, step_tokens) * page_size
                           * nbytes for (kind, window, nbytes), n in kinds.items())
    largest = max(nbytes for *_, nbytes in kinds)
    if any(largest % nbytes for *_, nbytes in kinds):
        return None
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size, total = most if most < 1.5 * fewest else fewest, 0
    for (kind, window, nbytes), n in kinds.items():
        positions = page_size * (largest // nbytes)  # pages are equal in bytes
        groups = -(-n // group_size)
        total += groups * _pages(kind, window, length, positions, step_tokens)
    return batch * total * group_size * page_size * largest


def _pages(kind: str, window: int, length: int, page_size: int, step_tokens: int) -> int:
    if kind == CHUNK:
        return -(-min(window + step_tokens, length) // page_size)
    if kind == WINDOW:
        return -(-min(window - 1 + step_tokens, length) // page_size) + 1
    return -(-length // page_size)


def llama_cpp(memory: Memory, batch: int, length: int, swa_full: bool = False) -> int:
    """Bytes that llama.cpp allocates for `batch` sequences with a context of `length` tokens each,
    K and V in f16 and one cache for all sequences (`--kv-unified`).

    Windows count only beside layers without: llama.cpp ignores those of Mistral, Phi-3 and others
    that have them in every layer.
    """
    cells = -(-batch * length // CELLS) * CELLS
    mixed = not swa_full and any(store.parts and not store.window for store in memory.stores)
    total = 0
    for store in memory.stores:
        held = cells
        if store.window and mixed:
            held = -(-min(cells, store.window * batch + UBATCH) // CELLS) * CELLS
        states = batch * FLOAT32_BYTES * sum(state.size for state in store.states)
        total += held * position_nbytes(store, 'float16') + states
    return total
