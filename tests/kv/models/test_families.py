"""The account equals what transformers allocates, to the byte, for every way to remember."""
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kv.models import engines
from kv.models.build import memory_of
from tests.helpers.hf_families import FAMILIES

QUICK = ['gemma3n_text', 'deepseek_v32', 'deepseek_v4', 'qwen3_next', 'falcon_h1']
# below the windows of 7, at them and past them; a cache lacks the last of the new tokens
PROMPTS, N_NEW = (3, 5, 11), 3
ONLY_DYNAMIC = {'deepseek_v4'}


def nbytes(cache) -> int:
    """Bytes of a cache's tensors, and of MiniMax's states."""
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [x for value in values
               for x in (value.values() if isinstance(value, dict) else [value])]
    kept = sum({id(x): x.nbytes for x in tensors if torch.is_tensor(x) and x.dim() > 1}.values())
    return kept + sum(x.nbytes for x in getattr(cache, 'linear_cache', []) if torch.is_tensor(x))


def check(family, prompts, batches):
    config = AutoConfig.for_model(family.partition(',')[0], **FAMILIES[family])
    memory = memory_of(config.to_dict())
    assert memory.assumed == ()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for n in prompts:
        for batch in batches:
            prompt = torch.randint(3, 99, (batch, n))
            for kind in (None, *['static'] * (family not in ONLY_DYNAMIC)):
                out = model.generate(input_ids=prompt, max_new_tokens=N_NEW, min_new_tokens=N_NEW,
                                     do_sample=False, return_dict_in_generate=True,
                                     cache_implementation=kind)
                cache = out.get('past_key_values')
                cache = out['cache_params'] if cache is None else cache
                expected = engines.transformers(memory, batch, n + N_NEW - 1, 'bfloat16',
                                                kind or 'dynamic')
                assert nbytes(cache) == expected, (kind, n, batch)


@pytest.mark.parametrize('family', QUICK)
def test_what_is_allocated(family):
    check(family, prompts=(11,), batches=(2,))


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_what_is_allocated_at_all_lengths(family):
    check(family, PROMPTS, batches=(1, 3))
