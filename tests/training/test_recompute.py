"""Recomputation policies do not change training, and recompute only what they should."""
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import training.loss
import training.offload
from config.errors import UserError
from model import GPT, GPTConfig
from tests.helpers.mechanisms import CHANGES, STACK
from tests.helpers.models import FULL_STACK, VOCAB, tokens
from training.loss import linear_cross_entropy
from training.recompute import ATTENTION, MATMULS, Recompute, set_recompute

aten = torch.ops.aten
POLICIES = ('block', 'every:2', 'sqrt', 'mlp', 'selective', 'offload')
SMALL = dict(block_size=64, vocab_size=VOCAB, n_layer=4, n_head=4, n_embd=24)
SHAPES = {'vanilla': SMALL, 'full stack': FULL_STACK,
          'GQA': dict(SMALL, n_kv_head=2, pos_embedding='rope', bias=False)}
ALL_SHAPES = SHAPES | {name: STACK | changes for name, changes in CHANGES.items()}


@pytest.fixture(autouse=True)
def _small_enough_to_chunk_and_to_move(monkeypatch):
    monkeypatch.setattr(training.loss, 'CHUNK_BYTES', {'cpu': 4 * VOCAB * 13})
    monkeypatch.setattr(training.offload, 'SMALLEST', 0)


@pytest.fixture
def moved(monkeypatch):
    """List of the tensors copied back from host memory."""
    plain, seen = training.offload._unpack, []

    def unpack(packed):
        if not torch.is_tensor(packed):
            seen.append(packed[0])
        return plain(packed)
    monkeypatch.setattr(training.offload, '_unpack', unpack)
    return seen


def new_model(shape, policy='none', **settings):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**dict(ALL_SHAPES[shape], **settings))).train()
    set_recompute(model, policy)
    return model


def two_steps(policy, shape, half, accumulation, dropout, chunked):
    """Return the losses of all micro-batches and the parameters after two updates."""
    model, losses = new_model(shape, policy, dropout=dropout), []
    model.loss_fn = linear_cross_entropy if chunked else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for k in range(2 * accumulation):
        with torch.autocast('cpu', torch.bfloat16, enabled=half):
            loss = model(tokens(1, 40, seed=k), tokens(1, 40, seed=k + 1))[1]
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (k + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize('policies, shape, half, accumulation, dropout, chunked', [
    (POLICIES, 'vanilla', False, 1, 0.0, False), (POLICIES, 'GQA', True, 4, 0.1, True),
    (POLICIES, 'full stack', False, 4, 0.1, True),
    *((('selective', 'mlp', 'every:2'), name, False, 2, 0.1, True) for name in CHANGES)])
def test_two_steps_are_those_without(policies, shape, half, accumulation, dropout, chunked, moved):
    settings = shape, half, accumulation, dropout, chunked
    losses, parameters = two_steps('none', *settings)
    for policy in policies:
        moved.clear()
        again = two_steps(policy, *settings)
        assert again[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(again[1], parameters))
        assert bool(moved) == (policy == 'offload')


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


@pytest.mark.parametrize('shape', ['vanilla', 'full stack'])
@pytest.mark.parametrize('policy', ('none', *POLICIES))
def test_what_runs_twice(policy, shape):
    n = SHAPES[shape]['n_layer']
    forward, backward, calls = work(policy, shape)
    twice = {'mlp': {'c_fc'}, 'none': set(), 'offload': set()}.get(policy,
                                                                   {'block', 'c_attn', 'c_fc'})
    assert calls == {name: n * (1 + (name in twice)) for name in ('block', 'c_attn', 'c_fc')}
    assert work(policy, shape, train=False)[2] == dict.fromkeys(calls, n)
    # selective calls the modules again, but reuses stored matmul and attention results
    assert backward.of(ATTENTION) == (forward.of(ATTENTION) if policy in ('block', 'every:2',
                                                                          'sqrt') else 0)
    assert forward.of(ATTENTION) >= n
    assert (backward.n[aten.gelu.default] > 0) == (policy not in ('none', 'offload'))


@pytest.mark.parametrize('dropout', [0.0, 0.1])
def test_selective_computes_no_product_again(dropout):
    backward = {policy: work(policy, dropout=dropout)[1]
                for policy in ('none', 'selective', 'mlp', 'block')}
    products = {policy: counted.of(MATMULS) for policy, counted in backward.items()}
    n = SMALL['n_layer']
    assert products['selective'] == products['none']
    # the backward pass needs only the input of the last operation of a segment: the MLP's c_proj
    # is not recomputed unless a dropout follows it
    assert products['mlp'] == products['none'] + n * (1 + (dropout > 0))
    assert products['block'] == products['none'] + n * (3 + (dropout > 0))
    norms = {policy: counted.n[aten.native_layer_norm.default]
             for policy, counted in backward.items()}
    assert norms == {'none': 0, 'selective': 2 * n, 'mlp': n, 'block': 2 * n}


def test_offload_leaves_parameters_and_what_is_small_where_they_are(moved, monkeypatch):
    model = new_model('vanilla', 'offload')
    model(tokens(2, 40), tokens(2, 40))[1].backward()
    own = {p.data_ptr() for p in model.parameters()}
    everything = len(moved)
    assert everything >= 10 * SMALL['n_layer'] and not own & {x.data_ptr() for x in moved}
    moved.clear()
    smallest = 4 * 2 * 40 * 4 * 24  # the hidden layer of an MLP
    monkeypatch.setattr(training.offload, 'SMALLEST', smallest)
    model(tokens(2, 40), tokens(2, 40))[1].backward()
    assert 0 < len(moved) < everything and min(x.nbytes for x in moved) >= smallest


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


@pytest.mark.parametrize('shape', SHAPES)
def test_segments_hand_on_only_the_k_and_v_that_later_blocks_read(shape, monkeypatch):
    model, handed = new_model(shape, 'block'), []
    plain, layers = model._blocks, model.plan.layers

    def spy(first, last, x, kvs, **rest):
        handed.append((first, set(kvs)))
        return plain(first, last, x, kvs, **rest)
    monkeypatch.setattr(model, '_blocks', spy)
    model(tokens(2, 40), tokens(2, 40))
    read = [{later.slot for later in layers[i:] if not later.owns}
            & {layer.slot for layer in layers[:i]} for i in range(len(layers))]
    assert handed == list(enumerate(read))
