"""The gradient of the attention z-loss is that of its definition, whatever else training does."""
import copy
import functools

import pytest
import torch

from attention.masks import dense_mask
from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import random_model, tokens
from training.recompute import set_recompute
from training.z_loss import add_z_loss

GQA = dict(block_size=64, vocab_size=23, n_layer=3, n_head=4, n_embd=24, n_kv_head=2,
           layer_pattern='LLG', window_size=5, attn_sink=True)
SHAPES = {'vanilla': dict(GQA, n_kv_head=0, layer_pattern='G', attn_sink=False), 'GQA': GQA,
          **{name: STACK | changes for name, changes in CHANGES.items()}}
COEFFICIENT = 0.3


def micro_batches(n):
    return [(tokens(2, 20, seed=k), tokens(2, 20, seed=k + 50)) for k in range(n)]


def grads(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def penalty(calls):
    """From the definition: the mean over layers, heads and queries, of recorded calls."""
    total, n = 0, 0
    for q, k, window, sink in calls:
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        scores = torch.einsum('bhid,bhjd->bhij', q, k) / q.size(-1) ** 0.5
        weights = scores.exp() * dense_mask(q.size(2), q.size(2), window)
        sums = weights.sum(-1) + (0 if sink is None else sink.exp()[:, None])
        total, n = total + sums.log().square().sum(), n + sums.numel()
    return total / n


@functools.cache
def reference(shape, n):
    """(losses, penalties, gradients) of the mean loss + COEFFICIENT * penalty."""
    model, calls = random_model(GPTConfig(**SHAPES[shape])).train(), []
    for block in model.transformer.h:
        def attend(q, k, v, window, dropout_p, backend, sink, plain=block.attn.attend):
            calls.append((q, k, window, sink))
            return plain(q, k, v, window, dropout_p, backend, sink)
        block.attn.attend = attend
    losses, penalties = [], []
    for x, y in micro_batches(n):
        calls.clear()
        loss = model(x, y)[1]
        penalties.append(penalty(calls))
        ((loss + COEFFICIENT * penalties[-1]) / n).backward()
        losses.append(loss.item())
    return losses, penalties, grads(model)


def check(shape, policy='none', n=1, wrap=lambda model: model):
    model = random_model(GPTConfig(**SHAPES[shape])).train()
    set_recompute(model, policy)
    add_z_loss(model, COEFFICIENT).fill_(1 / n)
    run = wrap(model)
    expected, _, wanted = reference(shape, n)
    for (x, y), loss in zip(micro_batches(n), expected):
        found = run(x, y)[1]
        assert found.item() == pytest.approx(loss, rel=1e-12)  # the cross-entropy alone
        (found / n).backward()
    found = grads(model)
    gaps = {name: (found[name] - grad).abs().max().item() for name, grad in wanted.items()}
    assert max(gaps.values()) <= 1e-10, gaps


@pytest.mark.parametrize('shape, policy, n', [
    *((shape, 'none', 1) for shape in SHAPES),
    *(('many', policy, 4) for policy in ('none', 'selective', 'mlp', 'block', 'offload'))])
def test_gradients_are_those_of_the_definition(shape, policy, n):
    check(shape, policy, n)


@pytest.mark.parametrize('shape', ['GQA', pytest.param('latents', marks=pytest.mark.slow)])
def test_compiled(shape):
    torch._dynamo.reset()
    check(shape, 'none', 2, functools.partial(torch.compile, backend='aot_eager', fullgraph=True))


def test_the_penalty_matters_in_training_also_in_a_copy_and_evaluation_is_unaffected():
    model = random_model(GPTConfig(**GQA)).train()
    (x, y), = micro_batches(1)
    model(x, y)[1].backward()
    plain, logits = grads(model), model.eval()(x, all_logits=True)[0]
    scale = add_z_loss(model, COEFFICIENT)
    for each in (model, copy.deepcopy(model)):
        each.train()(x, y)[1].backward()
        found = grads(each)
        for layer in range(3):
            for name in ('attn.c_attn.weight', 'attn.sink'):
                key = f'transformer.h.{layer}.{name}'
                assert (plain[key] - found[key]).abs().max() > 1e-4
                assert torch.allclose(found[key], reference('GQA', 1)[2][key], atol=1e-10)
        each.eval()(x, y)[1].backward()
        assert all(torch.equal(grad, plain[name]) for name, grad in grads(each).items())
        with torch.no_grad():
            cached = each(x, cache=each.new_cache(2, 20), all_logits=True)[0]
        assert torch.allclose(cached, logits, atol=1e-12)
    assert scale == 1 and model.state_dict().keys() == GPT(model.config).state_dict().keys()
