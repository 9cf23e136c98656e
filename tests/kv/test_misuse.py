"""Caches under autocast, in inference mode, and after a step that failed before writing."""
import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from tests.helpers.models import FULL_STACK, VOCAB, feed, full_logits, max_gap, random_model, tokens

VANILLA = dict(n_layer=2, n_head=4, n_embd=24, block_size=64, vocab_size=VOCAB)
KINDS = pytest.mark.parametrize('kind', [FULL_STACK, VANILLA], ids=['full stack', 'vanilla'])
PAGED = pytest.mark.parametrize('pages',
                                [{}, dict(cache_class=PagedKVCache, n_pages=40, page_size=4)],
                                ids=['contiguous', 'paged'])


@KINDS
@PAGED
@pytest.mark.parametrize('kv_dtype', ['auto', 'bfloat16', 'int8'])
def test_ragged_prompts_chunks_and_decode_under_autocast(kind, pages, kv_dtype):
    """Autocast once made the scores bfloat16, which overflowed ("value cannot be converted")."""
    model, idx = random_model(GPTConfig(**kind), torch.float32), tokens(2, 14)
    plain, cast = (model.new_cache(2, 30, kv_dtype, **pages) for _ in range(2))
    with torch.no_grad():
        for a, b, lens in ((0, 5, [5, 3]), (5, 9, [4, 2]), (9, 10, [1, 1]), (10, 11, [0, 1]),
                           (11, 14, [3, 3])):
            expected = model(idx[:, a:b], cache=plain, lens=lens, all_logits=True)[0]
            with torch.autocast('cpu', torch.bfloat16):
                logits = model(idx[:, a:b], cache=cast, lens=lens, all_logits=True)[0]
            for row, n in enumerate(lens):
                if n:
                    error = (logits[row, :n].float() - expected[row, :n]).abs().mean()
                    assert error < 0.1 * expected.std()
    assert cast.lengths.tolist() == plain.lengths.tolist() == [13, 10]


@PAGED
def test_a_wrong_id_leaves_the_cache_as_it_was(pages):
    """It used to be marked "half-written", which ended the conversation, with nothing written."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(1, 12)
    cache = model.new_cache(1, 20, **pages)
    feed(model, cache, idx[:, :7], [7])
    with pytest.raises(IndexError):
        model(torch.tensor([[VOCAB]]), cache=cache)
    assert cache.lengths.tolist() == [7]
    assert max_gap(feed(model, cache, idx[:, 7:], [1, 4]), full_logits(model, idx)[:, 7:]) < 1e-9


@PAGED
def test_a_cache_made_under_inference_mode_is_good_outside_of_it(pages):
    """"Inplace update to inference tensor outside InferenceMode": resetting a row writes zeros."""
    model, idx = random_model(GPTConfig(**FULL_STACK)), tokens(2, 12)
    with torch.inference_mode():
        cache = model.new_cache(2, 20, **pages)
        model(idx, cache=cache)
    cache.reset([1])
    cache.reset()
    assert max_gap(feed(model, cache, idx, [5, 7]), full_logits(model, idx)) < 1e-9


def test_a_number_in_place_of_a_list_of_rows_is_refused():
    cache = random_model(GPTConfig(**FULL_STACK)).new_cache(2, 8)
    with pytest.raises(UserError, match=r'reset\(1\).*reset\(\[1\]\)'):
        cache.reset(1)
