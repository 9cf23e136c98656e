"""FLOPs by arithmetic match the model's. (Parameters: `tests/test_equivalence.py`.)"""
import pytest
import torch

from config.gpt_config import GPTConfig
from kv import counts
from kv.plan import plan_kv
from model import GPT
from tests.helpers.mechanisms import CHANGES, STACK


@pytest.mark.parametrize('tokens, before', [(20, 0), (20, 7), (1, 30)])
@pytest.mark.parametrize('name', ['nothing', 'nothing shared', *CHANGES])
def test_prefill_flops_with_every_mechanism(name, tokens, before):
    """Matmuls with weights, counted as they run; attention from the shapes that it gets."""
    unshared = dict(kv_share='', share_global_kv=False)
    changes = {'nothing': {}, 'nothing shared': unshared} | CHANGES
    config = GPTConfig(**STACK | changes[name])
    model, plan = GPT(config).eval(), plan_kv(config)
    cache = model.new_cache(1, before + tokens).fill_(before)
    plain, linear, absorbed, attended = cache.attend, 0, 0, 0

    def attend(layer, q, *args):
        nonlocal absorbed, attended
        width, (_, H, n, _) = q.size(3), q.shape
        if plan.slots[layer.slot].latent:  # q @ k_up and y @ v_up
            absorbed += 2 * 2 * H * n * plan.head_dim * width
        ends = range(before + tokens - n + 1, before + tokens + 1)
        attended += 4 * H * width * sum(min(end, layer.window or end)
                                        for end in ends)
        return plain(layer, q, *args)
    cache.attend = attend

    def count(module, args, y):
        nonlocal linear
        linear += 2 * args[0].numel() * module.out_features
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.int64), cache=cache)
    flops = counts.prefill_flops(config, plan, tokens, before)
    assert flops == linear + absorbed + attended
    assert (absorbed > 0) == bool(config.kv_latent)
