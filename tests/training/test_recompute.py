"""Recomputation policies do not change training, and recompute only what they should."""
import functools
from collections import Counter

import pytest
import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

import training.step.loss
import training.memory.recompute
from common.errors import UserError
from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import FULL_STACK, VOCAB, tokens
from training.step.loss import linear_cross_entropy
from training.memory.recompute import ATTENTION, MATMULS, Recompute, set_recompute
from training.step.kernels import prepare

aten = torch.ops.aten
POLICIES = ('block', 'every:2', 'sqrt', 'mlp', 'selective', 'offload')
SMALL = dict(block_size=64, vocab_size=VOCAB, n_layer=4, n_head=4, n_embd=24)
SHAPES = {'vanilla': SMALL, 'full stack': FULL_STACK,
          'GQA': dict(SMALL, n_kv_head=2, pos_embedding='rope', bias=False)}
ALL_SHAPES = SHAPES | {name: STACK | changes for name, changes in CHANGES.items()}


@pytest.fixture(autouse=True)
def _small_enough_to_chunk_and_to_move(monkeypatch):
    monkeypatch.setattr(training.step.loss, 'CHUNK_BYTES', {'cpu': 4 * VOCAB * 13})
    monkeypatch.setattr(training.memory.recompute, 'SMALLEST', 0)


@pytest.fixture
def moved(recorded):
    """List of what is unpacked: what was copied to host memory is no tensor."""
    return recorded(training.memory.recompute, '_unpack', lambda packed: packed)


def copied(moved):
    return [packed[0] for packed in moved if not torch.is_tensor(packed)]


def new_model(shape, policy='none', **settings):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(ALL_SHAPES[shape], **settings))).train()
    set_recompute(model, policy)
    return model


def two_steps(policy, shape, half, accumulation, dropout, chunked, call=lambda model: model):
    """Return the losses of all micro-batches and the gradients of the second update."""
    model, losses = new_model(shape, policy, dropout=dropout), []
    model.loss_fn = linear_cross_entropy if chunked else None
    prepare(model, 40)
    run = call(model)
    for k in range(2 * accumulation):
        with torch.autocast('cpu', torch.bfloat16, enabled=half):
            loss = run(tokens(1, 40, seed=k), tokens(1, 40, seed=k + 1))[1]
        (loss / accumulation).backward()
        losses.append(loss.item())
        if k + 1 == accumulation:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.parametrize('policies, shape, half, accumulation, dropout, chunked', [
    (POLICIES, 'vanilla', False, 1, 0.0, False), (POLICIES, 'GQA', True, 4, 0.1, True),
    (POLICIES, 'full stack', False, 4, 0.1, True),
    *((('selective', 'mlp', 'every:2'), name, False, 2, 0.1, True) for name in CHANGES)])
def test_two_steps_are_those_without(policies, shape, half, accumulation, dropout, chunked, moved):
    settings = shape, half, accumulation, dropout, chunked
    losses, gradients = two_steps('none', *settings)
    for policy in policies:
        moved.clear()
        again = two_steps(policy, *settings)
        assert again[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(again[1], gradients))
        assert bool(copied(moved)) == (policy == 'offload')


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('policy, chunked, half', [
    ('selective', True, True), ('block', True, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ('mlp', False, False), ('none', True, True), ('none', False, False), ('sqrt', True, False),
        ('every:3', False, False)))])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_compiled_they_are_one_graph_that_is_compiled_once(policy, chunked, half):
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, fullgraph=True,
                                 backend='aot_eager_decomp_partition')
    settings = policy, 'full stack', half, 2, 0.0, chunked
    losses, gradients = two_steps(*settings, compiled)
    expected_losses, expected = two_steps(*settings)
    assert losses == pytest.approx(expected_losses, abs=2e-3 if half else 1e-5)
    bound = max(g.abs().max() for g in expected) * (0.05 if half else 1e-4)
    assert all((g - e).abs().max() < bound for g, e in zip(gradients, expected))


# -- what is recomputed

class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n[func] += 1
        return func(*args, **kwargs or {})

    def of(self, ops):
        return sum(self.n[op] for op in ops)


def work(policy, shape='vanilla', train=True, **settings):
    """Count operations in the forward and backward pass, and calls of each kind of module."""
    model, calls = new_model(shape, policy, **settings).train(train), Counter()
    for block in model.transformer.h:
        for name, module in (('block', block), ('c_attn', block.attn.c_attn),
                             ('c_fc', block.mlp.c_fc)):
            module.register_forward_pre_hook(lambda m, given, name=name: calls.update([name]))
    with Counted() as forward:
        loss = model(tokens(2, 40), tokens(2, 40))[1]
    with Counted() as backward:
        loss.backward()
    return forward, backward, calls


def matmuls_of_segments(n, n_segments, dropout):
    """Of four in each block. The backward pass needs only the input of a segment's last operation:
    the MLP's c_proj is not recomputed unless a dropout follows it."""
    return 4 * n - n_segments * (not dropout)


@pytest.mark.parametrize('dropout', [0.0, 0.1])
def test_what_is_recomputed(dropout):
    n = SMALL['n_layer']
    plain = work('none', dropout=dropout)[1]
    modules = {'none': set(), 'offload': set(), 'mlp': {'c_fc'}}
    for policy, (attention, matmuls, norms) in {
            'none': (0, 0, 0), 'offload': (0, 0, 0), 'selective': (0, 0, 2 * n),
            'mlp': (0, n * (1 + (dropout > 0)), n),
            'block': (n, matmuls_of_segments(n, n, dropout), 2 * n),
            'every:2': (n, matmuls_of_segments(n, n // 2, dropout), 2 * n),
            'sqrt': (n, matmuls_of_segments(n, n // 2, dropout), 2 * n)}.items():
        _, backward, calls = work(policy, dropout=dropout)
        if not dropout:  # with dropout, attention on a CPU is other operations
            assert backward.of(ATTENTION) == attention
        assert backward.of(MATMULS) == plain.of(MATMULS) + matmuls
        assert backward.n[aten.native_layer_norm.default] == norms
        twice = modules.get(policy, {'block', 'c_attn', 'c_fc'})
        assert calls == {name: n * (1 + (name in twice)) for name in ('block', 'c_attn', 'c_fc')}
        assert work(policy, train=False)[2] == dict.fromkeys(calls, n)


# -- names

@pytest.mark.parametrize('name, n_layer, segments', [
    ('none', 3, ()), ('mlp', 3, ()), ('offload', 3, ()),
    ('selective', 2, ((0, 1), (1, 2))), ('every:2', 5, ((0, 2), (2, 4), (4, 5))),
    ('every:5', 5, ((0, 5),)), ('sqrt', 1, ((0, 1),)), ('sqrt', 9, ((0, 3), (3, 6), (6, 9))),
    ('sqrt', 7, ((0, 3), (3, 6), (6, 7)))])
def test_segments(name, n_layer, segments):
    assert Recompute.parse(name, n_layer).segments == segments


K = 'K must be a whole number from 1 to n_layer=4'


@pytest.mark.parametrize('name, words', [
    ('every:0', K), ('every:5', K), ('every:', K), ('every:1.5', K),
    ('blocks', "allowed are 'none', "), ('none:2', "allowed are 'none', ")])
def test_other_names_are_refused_with_those_that_are_allowed(name, words):
    with pytest.raises(UserError, match=f"recompute='{name}': {words}"):
        new_model('vanilla', name)
