"""What engines allocate, by hand: groups, pages and cells."""
import pytest

from kv.models import engines
from kv.models.build import memory_of
from kv.models.memory import CHUNK, FULL, WINDOW, Memory, Part, Store
from tests.kv.models.test_account import STATES

POSITION = 2 * 2 * 8 * 2


def mixed(full: int, windows: int, window_heads: int = 2, kind: str = WINDOW):
    parts = {heads: (Part('K', heads, 8), Part('V', heads, 8)) for heads in (2, window_heads)}
    stores = [Store(FULL, (i,), parts[2]) for i in range(full)]
    stores += [Store(kind, (full + i,), parts[window_heads], 32) for i in range(windows)]
    return Memory(tuple(stores), len(stores), 8, 8, 'mixed')


@pytest.mark.parametrize('full, windows, group_size, groups', [
    (2, 6, 2, (1, 3)), (2, 5, 2, (1, 3)), (10, 14, 14, (1, 1)), (10, 15, 10, (1, 2)),
    (4, 1, 1, (4, 1))])
def test_groups_of_layers_in_vllm(full, windows, group_size, groups):
    pages = groups[0] * -(-1000 // 16) + groups[1] * (-(-(31 + 64) // 16) + 1)
    assert engines.vllm(mixed(full, windows), 3, 1000, 'bfloat16', step_tokens=64) == (
        3 * pages * group_size * 16 * POSITION)


def test_pages_of_different_sizes():
    """Twice the heads in the windows: pages of the others have twice the positions. Widths that do
    not divide each other are refused by vLLM."""
    full, window = -(-1000 // 32), -(-32 // 16) + 1
    twice = mixed(2, 2, window_heads=4)
    assert engines.vllm(twice, 3, 1000, 'bfloat16', step_tokens=1) == (
        3 * (full + window) * 2 * 16 * 2 * POSITION)
    assert engines.vllm(mixed(2, 2, window_heads=3), 1, 1000, 'bfloat16') is None


def test_pages_of_chunks():
    """They begin where the chunk does."""
    chunked = mixed(0, 2, kind=CHUNK)
    assert engines.vllm(chunked, 3, 1000, 'bfloat16', step_tokens=64) == 3 * 2 * 6 * 16 * POSITION


def test_cells_of_llama_cpp():
    """One pool for all sequences, in multiples of 256; windows count beside other layers only."""
    held = 2 * 9216 + 6 * -(-(9 * 32 + 512) // 256) * 256
    assert engines.llama_cpp(mixed(2, 6), 9, 1000) == held * POSITION
    assert engines.llama_cpp(mixed(2, 6), 3, 100) == (2 * 512 + 6 * 512) * POSITION
    assert engines.llama_cpp(mixed(0, 6), 3, 1000) == 6 * 3072 * POSITION
    states = memory_of(STATES)
    assert engines.llama_cpp(states, 3, 256) == (
        2 * 768 * 2 * 4 * 8 * 2 + 2 * 3 * 4 * (3 * 2 * 8 * 3 + 2 * 8 * 8))
