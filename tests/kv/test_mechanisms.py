"""What sinks, offset keys, tied K and V, latents and int4 take. That they are exact in the
cache is tested with everything else: `tests.helpers.models`."""
import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.report import account
from tests.helpers.models import FULL_STACK, feed, full_logits, max_gap, random_model, tokens

# 2 K/V heads of 8 in local slots, 16 positions of 5 in rings
BASE = dict(block_size=40, vocab_size=23, n_layer=4, n_head=4, n_embd=32, n_kv_head=2,
            layer_pattern='LG', window_size=5, pos_embedding='rope', qk_norm=True)
# bytes of a number, and of a vector's scale
ELEMENTS = {'float64': (8, 0), 'float32': (4, 0), 'bfloat16': (2, 0), 'float16': (2, 0),
            'int8': (1, 2), 'int4': (0.5, 2)}


@pytest.mark.parametrize('changes, local, of_global, state', [
    (dict(), 2 * 2 * 8, 2 * 2 * 8, 0),
    (dict(attn_sink=True, gelu='relu2', rope_fraction_global=0.5), 32, 32, 0),
    (dict(kv_tied='global'), 32, 16, 0),
    (dict(kv_tied='all'), 16, 16, 0),
    (dict(kv_latent=24, rope_fraction_global=0.0), 32, 24, 0),
    (dict(key_offset=True), 32, 32, 2 * 4),
])
def test_bytes_of_a_sequence(changes, local, of_global, state):
    """local, of_global: numbers stored per position and slot. state: numbers per global slot."""
    model = random_model(GPTConfig(**BASE | changes), torch.float32)
    for kv_dtype, (element, scale) in ELEMENTS.items():
        heads = {'local': local // 8, 'global': 1 if 'kv_latent' in changes else of_global // 8}
        expected = 2 * 5 * (local * element + heads['local'] * scale)
        expected += 2 * 40 * (of_global * element + heads['global'] * scale)
        expected += 2 * state * (4 if scale else element)
        assert model.plan.nbytes(1, 40, kv_dtype) == expected
        assert model.new_cache(3, 40, kv_dtype).nbytes == 3 * expected
        numbers = account(model.plan, 1, 40, kv_dtype)
        assert sum(slot['bytes'] for slot in numbers['slots']) == expected


def test_int4_takes_pairs():
    model = random_model(GPTConfig(**BASE | dict(head_dim=7, pos_embedding='learned')))
    with pytest.raises(UserError, match='int4.*head_dim=7 is odd'):
        model.new_cache(1, 8, 'int4')


@pytest.mark.parametrize('kv_dtype, bound', [('int8', 1e-5), ('int4', 1e-5), ('bfloat16', 1e-9)])
def test_an_offset_key_does_not_depend_on_the_chunks(kv_dtype, bound):
    """The state is not quantized (float32 here, in a float64 model)."""
    model = random_model(GPTConfig(**FULL_STACK | dict(head_dim=8, key_offset=True)))
    idx, once, other = tokens(2, 40), *(model.new_cache(2, 40, kv_dtype) for _ in 'ab')
    a, b = feed(model, once, idx, [40]), feed(model, other, idx, [1, 12] + [1] * 9 + [18])
    # the first chunk of `once` did not read the state at all
    assert 0 < max_gap(a, full_logits(model, idx)) and max_gap(a, b) < bound
