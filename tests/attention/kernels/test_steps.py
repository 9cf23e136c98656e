"""Steps of a cache with the kernels: prompts, chunks, ragged rows, wrapped rings, pages."""
import pytest
import torch

from attention.backends import triton_enabled
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from tests.helpers.models import FULL_STACK, random_model, tokens


def steps(model, cache, idx):
    """Feed chunks of different lengths; return the logits of each row's last token."""
    out = []
    for lens in ([5, 3], [4, 4], [1, 1], [0, 3], [1, 1]):
        starts = cache.lengths.tolist()
        piece = torch.stack([idx[b, starts[b]:starts[b] + max(lens)] for b in range(2)])
        logits = model(piece, cache=cache, lens=lens)[0]
        out += [logits[b] for b in range(2) if lens[b]]
    return torch.stack(out)


@pytest.mark.parametrize('paged', [False, True], ids=['contiguous', 'paged'])
@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
@torch.inference_mode()
def test_give_what_plain_torch_gives(device, kv_dtype, paged):
    model = random_model(GPTConfig(**FULL_STACK), torch.float32).to(device)
    idx = tokens(2, 40).to(device)
    how = dict(cache_class=PagedKVCache, n_pages=12, page_size=4) if paged else {}
    found = steps(model, model.new_cache(2, 20, kv_dtype, **how), idx)
    with triton_enabled(False):
        expected = steps(model, model.new_cache(2, 20, kv_dtype, **how), idx)
    # a different summation order may change a value's int8 rounding, which later layers amplify
    gaps = (found - expected).abs().amax((1, 2))
    assert gaps.max() < (1e-4 if kv_dtype == 'float32' else 5e-2) and gaps.median() < 1e-3
