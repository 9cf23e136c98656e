"""One training for several KV plans: what a step computes, and which plans there are."""
import itertools
import math

import pytest
import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from interop.choose import at_plan
from model import GPT
from tests.helpers.models import feed, full_logits, max_gap, random_model, tokens
from training.elastic.plans import Plan, made, of_checkpoint, plans_of, table
from training.elastic.step import Elastic, as_teacher, part_sizes
from training.memory.recompute import set_recompute
from training.native.modules import speed_up
from training.step.loss import linear_cross_entropy

BASE = GPTConfig(n_layer=6, n_head=4, n_embd=32, block_size=48, vocab_size=23, bias=True,
                 pos_embedding='rope', qk_norm=True)
PLANS = ('n_kv_head=1; layer_pattern=LLG,window_size=5;n_kv_head=2, layer_pattern=LLG, '
         'window_pattern=5,9,0, window_size=5, share_global_kv=True')
WHOLE = dict(kv_head_pattern='4,2', layer_pattern='LG', window_size=7, attn_gate=True,
             attn_sink=True)


def elastic(base=BASE, text=PLANS, dtype=torch.float64):
    return Elastic(random_model(base, dtype), plans_of(text, base))


def batch(n=8):
    idx = tokens(n, 49)
    return idx[:, :-1], idx[:, 1:]


def test_plans_are_read_and_ordered_by_their_bytes():
    plans = plans_of(PLANS, BASE)
    assert [plan.changes for plan in plans] == [
        {}, dict(layer_pattern='LLG', window_size=5), dict(n_kv_head=1),
        dict(n_kv_head=2, layer_pattern='LLG', window_pattern='5,9,0', window_size=5,
             share_global_kv=True)]
    sizes = [plan.nbytes() for plan in plans]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 6 * 48 * 2 * 32 * 2
    assert plans_of('', BASE) == [Plan({}, BASE)] == plans_of(' ; ', BASE)
    saved = [{'changes': plan.changes, 'loss': 1.5, 'shared': 'mean'} for plan in plans]
    assert of_checkpoint(saved, BASE) == (plans, [1.5] * 4)
    assert of_checkpoint([{'changes': {}, 'loss': math.nan}], BASE)[1] == [math.inf]
    assert of_checkpoint(None, BASE) == ([Plan({}, BASE)], [None])
    for each in saved:  # of when a shared slot had the weights of its first layer
        del each['shared']
    assert of_checkpoint(saved, BASE)[1] == [1.5] * 3 + [None]
    lines = table(plans, [1.5] * 4)
    assert lines[2].split() == ['9.22', 'kB', '4.0x', 'smaller', 'val', 'loss', '1.5000',
                                'n_kv_head=1'] and len(lines) == 4


@pytest.mark.parametrize('text, words', [
    ('n_kv_head', 'field=value'), ('n_kv_head=one', 'takes int'), ('n_kv_head=3', 'n_kv_head.*3'),
    ('n_embd=64', 'n_embd cannot change'), ('colour=red', 'colour cannot change'),
    ('n_kv_head=2; n_kv_head=2', 'the same as'),
    ('n_kv_head=1e999', 'takes int'), ('n_kv_head=1.9', 'takes int'),
    ('n_kv_head=1,n_kv_head=2', 'twice'), ('share_global_kv=2', 'takes bool'),
    ('layer_pattern=LLG', 'window_size'), ('layer_pattern=X', 'layer_pattern')])
def test_wrong_plans_are_refused_by_name(text, words):
    with pytest.raises(UserError, match=words):
        plans_of(text, BASE)


def test_sharing_cannot_be_undone_by_a_plan():
    shared = GPTConfig(**vars(BASE) | dict(layer_pattern='LG', window_size=5, kv_share='AB',
                                           share_global_kv=True))
    with pytest.raises(UserError, match='sharing can be added, not undone'):
        made(dict(share_global_kv=False), shared)
    saved_of_others = [{'changes': {'n_kv_head': 1}}]  # without the base
    for wrong in ([{'loss': 1.0}], [3], 7, [], [{'changes': 5}], torch.ones(2),
                  [{'changes': {}, 'loss': 1}], saved_of_others):
        with pytest.raises(UserError, match='plans of the checkpoint are invalid'):
            of_checkpoint(wrong, BASE)
    for wrong in ({'n_kv_head': 2.0}, {'window_size': None}):
        with pytest.raises(UserError, match='it takes int'):
            of_checkpoint([{'changes': {}}, {'changes': wrong}], BASE)
    with pytest.raises(UserError, match='is the same as'):
        of_checkpoint([{'changes': {}}] * 2, BASE)


@pytest.mark.parametrize('base', [
    BASE, GPTConfig(n_layer=12, n_head=12, n_embd=48, block_size=1024),
    GPTConfig(**vars(BASE) | dict(layer_pattern='LLG', window_size=9, n_kv_head=2))], ids=str)
def test_auto_goes_down_in_bytes(base):
    plans = plans_of('auto', base)
    sizes = [plan.nbytes() for plan in plans]
    assert 3 <= len(plans) <= 7 and sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] <= sizes[0] / 4
    assert all('L' in plan.config.layer_pattern for plan in plans
               if plan.config.share_global_kv), 'or all memory would be of single tokens'


def test_the_smallest_plan_has_twice_the_rows_of_another():
    assert part_sizes(20, 5) == [3, 4, 3, 4, 6] and part_sizes(20, 5, 2) == [6, 7, 7, 7, 13]
    assert part_sizes(4, 4) == [1] * 4 and part_sizes(8, 1) == [8]
    assert part_sizes(7, 3, 3) == [7] * 3
    for n, passes in itertools.product(range(2, 9), range(1, 9)):
        for batch in range(n, 60) if passes <= n else ():
            *others, smallest = part_sizes(batch, n, passes)
            assert sum(others) + smallest == batch * passes
            assert abs(smallest - min(batch, 2 * batch * passes / (n + 1))) < 1
            assert max(others) - min(others) <= 1 <= min(others) and max(others) <= batch


@pytest.mark.parametrize('passes', [1, 2, 4])
@pytest.mark.parametrize('whole', [{}, WHOLE], ids=['base', 'mechanisms'])
def test_a_step_is_the_mean_over_the_plans_of_their_parts(whole, passes):
    base = GPTConfig(**vars(BASE) | whole)
    text = 'n_kv_head=1,kv_head_pattern=; kv_head_pattern=2,1' if whole else PLANS
    model = elastic(base, text)
    x, y = batch(9)
    model.passes = min(passes, len(model.plans))
    model.train()
    loss = model(x, y)[1]
    loss.backward()
    gradients = {name: p.grad for name, p in model.base.named_parameters()}
    assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())

    # each sequence goes to as many plans as there are passes, and to no plan twice
    rows = [i % 9 for i in range(9 * model.passes)]
    expected, first = 0, 0
    for plan, n in zip(model.plans, part_sizes(9, len(model.plans), model.passes)):
        own, first = rows[first:first + n], first + n
        assert len({*own}) == n
        expected += at_plan(model.base, plan).train()(x[own], y[own])[1] * n / len(rows)
    assert first == len(rows) and abs(loss - expected) < 1e-14
    name, step = 'transformer.h.5.attn.c_attn.weight', 1e-6
    weight = model.base.get_parameter(name)
    for i in (0, 40, len(weight) - 1):  # of a query, a key and a value
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                weight[i, 3] += sign * step
                ends.append(model(x, y)[1].item())
                weight[i, 3] -= sign * step
        slope = (ends[0] - ends[1]) / (2 * step)
        assert abs(slope - gradients[name][i, 3].item()) < 1e-6 * max(1, abs(slope))


def test_with_a_teacher_each_plan_learns_its_predictions():
    wide = GPTConfig(**vars(BASE) | dict(n_embd=48, n_layer=2, block_size=64))
    teacher = as_teacher(random_model(wide, torch.float64))
    model = elastic()
    taught = Elastic(model.base, model.plans, teacher=teacher).train()
    x, y = batch(9)
    loss = taught(x, y)[1]
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad.abs().sum() > 0 for p in model.base.parameters())
    sizes, expected, theirs = [2, 2, 2, 3], 0, full_logits(teacher, x).softmax(-1)
    for plan, a, p in zip(model.plans, x.split(sizes), theirs.split(sizes)):
        ours = full_logits(at_plan(model.base, plan), a).softmax(-1)
        expected += (p * (p / ours).log()).sum(-1).mean() * len(a) / 9
    assert abs(loss - expected) < 1e-14
    taught.eval()
    for i in range(4):  # evaluation is of the tokens
        assert taught.under(i, x, y)[1] == model.eval().under(i, x, y)[1]


@pytest.mark.parametrize('recompute, taught', [
    ('none', False), ('block', False), ('selective', True), ('mlp', False), ('offload', False)])
def test_the_extension_recomputation_and_autocast_take_the_same_step(recompute, taught):
    plain, fast = (elastic(dtype=torch.float32) for _ in range(2))
    for each in (plain, fast) if taught else ():
        each.teachers = as_teacher(random_model(BASE, torch.float32)),
        with torch.no_grad():
            each.teachers[0].transformer.ln_f.weight.mul_(-2)  # other predictions than the base's
    if taught:
        speed_up(fast.teachers[0])
    for each in fast.models:
        each.loss_fn = linear_cross_entropy
        set_recompute(each, recompute)
        speed_up(each)
    losses, gradients = [], []
    for model in (plain, fast):
        loss = model.train()(*batch())[1]
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.base.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(*gradients):
        assert max_gap(a, b) < 1e-4 * a.abs().max()
    with torch.autocast('cpu', torch.bfloat16):
        loss = fast(*batch())[1]
    loss.backward()
    assert loss.item() == pytest.approx(losses[0], rel=0.05)


@torch.no_grad()
def test_each_plan_gives_the_logits_of_its_own_model_also_through_a_cache():
    """To the bit, and its cache has the plan's bytes."""
    model, idx = elastic().eval(), tokens(2, 40)
    for i, plan in enumerate(model.plans):
        own = at_plan(model.base, plan).eval()
        logits = model.under(i, idx, idx)[0]
        assert torch.equal(logits, full_logits(own, idx)) and own.config == plan.config
        cache = own.new_cache(2, 40, 'float32')
        assert cache.nbytes == plan.nbytes(2, 40, 'float32')
        assert max_gap(feed(own, cache, idx, [13, 1, 26]), logits) < 1e-5
    assert torch.equal(model(idx, idx)[0], logits) is False  # in evaluation it is the base
    assert torch.equal(model(idx, idx)[0], full_logits(model.base, idx))


def test_building_the_models_of_plans_uses_no_random_numbers_and_no_memory():
    model = GPT(BASE)
    plans, state = plans_of(PLANS, BASE), torch.get_rng_state()
    made_of = Elastic(model, plans)
    at_plan(model, plans[-1])
    assert torch.equal(torch.get_rng_state(), state)
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own for other in made_of.models[1:] for p in other.parameters())
    assert dict(made_of.named_parameters()).keys() == {
        f'base.{name}' for name, _ in model.named_parameters()}


def test_auto_knows_the_windows_of_the_base():
    """Also where its window is the one that would be chosen."""
    base = GPTConfig(**vars(BASE) | dict(block_size=64, window_size=8))
    assert any(plan.config.layer_pattern != 'G' for plan in plans_of('auto', base))
