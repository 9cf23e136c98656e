"""int8 weights: close to the plain ones, smaller, sampled from as ever; where they cannot be had, one line says so."""
import builtins
import copy
import pickle

import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine import weights
from engine.engine import Engine
from engine.params import SamplingParams
from engine.weights import compile_for_decode, quantize_weights, weights_dtype
from generate import generate
from lab.benchmarks.traffic import weight_bytes
from tests.helpers.models import FULL_STACK, full_logits, random_model, tokens

WIDE = dict(FULL_STACK, n_embd=64, head_dim=0, mlp_hidden=128)


def test_auto_changes_nothing():
    model = random_model(GPTConfig(**WIDE), torch.float32)
    before = full_logits(model, tokens(1, 9))
    assert quantize_weights(model, 'auto') is model and torch.equal(full_logits(model, tokens(1, 9)), before)
    assert weights_dtype(model) == 'float32'


def test_int8_weights_are_a_quarter_and_logits_move_little():
    model, idx = random_model(GPTConfig(**WIDE), torch.float32), tokens(2, 30)
    plain, n_bytes = full_logits(model, idx), weight_bytes(model)
    exact = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    model = quantize_weights(model, 'int8')
    assert weights_dtype(model) == 'int8 (computed in float32)'
    for name, weight in exact.items():  # half a step of its row's own scale
        error = (model.get_submodule(name).weight.dequantize() - weight).abs()
        assert error.max() > 0 and (error <= 0.51 * weight.abs().amax(1, keepdim=True) / 127).all()
    assert weight_bytes(model) < 0.35 * n_bytes
    change = (full_logits(model, idx) - plain).abs().max()
    assert 0 < change < 0.1 * plain.abs().max()
    assert model.transformer.wte.weight.dtype == torch.float32  # embeddings stay


@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_int8_weights_in_cache_and_engine_equal_their_own_full_forward(kv_dtype):
    model = quantize_weights(random_model(GPTConfig(**WIDE), torch.float32), 'int8')
    idx = tokens(1, 6)
    greedy = generate(model, idx, 20, temperature=0)[0, 6:].tolist()
    [done] = Engine(model, 2, 40, kv_dtype).generate([idx[0].tolist()], SamplingParams(max_new_tokens=20, temperature=0))
    if kv_dtype == 'auto':
        assert done.tokens == greedy
        for n in range(20):  # also without any cache
            text = torch.cat([idx, torch.tensor([greedy[:n]], dtype=torch.int64)], dim=1)
            assert full_logits(model, text)[0, -1].argmax() == greedy[n]
    else:
        assert len(done.tokens) == 20 and done.finish_reason == 'length'


def test_without_torchao_the_remedy_is_named(monkeypatch):
    plain = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith('torchao'):
            raise ImportError(name)
        return plain(name, *args, **kwargs)
    monkeypatch.setattr(builtins, '__import__', missing)
    with pytest.raises(UserError, match=r"pip install -e '\.\[int8\]'"):
        quantize_weights(random_model(GPTConfig(**WIDE)), 'int8')


def test_compiled_int8_products_of_odd_widths_are_refused():
    """torch 2.13 crashes or gives NaN there."""
    model = quantize_weights(random_model(GPTConfig(**dict(WIDE, mlp_hidden=100)), torch.float32), 'int8')
    with pytest.raises(UserError, match='100.*multiples of 64'):
        compile_for_decode(model)


def test_mlps_alone_are_compiled(monkeypatch):
    model, compiled = random_model(GPTConfig(**WIDE)), []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda self: compiled.append(self))
    compile_for_decode(model)
    assert compiled == [block.mlp for block in model.transformer.h]
    assert weights.COMPILED_INT8_WIDTH == 64


# -- packed -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('n_rows', [4, 9, 16, 33])
def test_packed_weights_give_the_same_logits_for_any_number_of_rows(monkeypatch, n_rows, bias):
    model = random_model(GPTConfig(**WIDE | dict(bias=bias)), torch.float32)
    idx, by_packed = tokens(n_rows + 1, 12), []
    plain = [full_logits(model, idx[:n, :1]) for n in range(1, n_rows + 2)]
    assert weights.pack_weights(model, n_rows)
    run = weights.FewRowsLinear._by_packed
    monkeypatch.setattr(weights.FewRowsLinear, '_by_packed', lambda self, x: by_packed.append(x.size(0)) or run(self, x))
    for n, expected in enumerate(plain, 1):
        assert (full_logits(model, idx[:n, :1]) - expected).abs().max() < 1e-4
    assert set(by_packed) == set(range(n_rows // 2 + 1, n_rows + 1))
    assert weights.pack_weights(model, 1) is False and all(m.packed is None for m in model.modules() if hasattr(m, 'packed'))


@pytest.mark.parametrize('prepare, n_rows', [(lambda m: m.double(), 8), (lambda m: m.bfloat16(), 8), (lambda m: m, 3),
                                             (lambda m: m, 65), (lambda m: quantize_weights(m, 'int8'), 8)])
def test_what_is_not_packed(prepare, n_rows):
    model = prepare(random_model(GPTConfig(**WIDE), torch.float32))
    assert not weights.pack_weights(model, n_rows)
    assert not any(getattr(m, 'packed', None) for m in model.modules())


@pytest.mark.parametrize('fault', [AttributeError, RuntimeError, None])
def test_where_the_operation_is_missing_or_wrong_nothing_is_packed(monkeypatch, fault):
    def by_packed(self, x):
        if fault:
            raise fault
        return torch.zeros(x.size(0), self.out_features)
    monkeypatch.setattr(weights.FewRowsLinear, '_by_packed', by_packed)
    model, idx = random_model(GPTConfig(**WIDE), torch.float32), tokens(8, 1)
    expected = full_logits(model, idx)
    assert not weights.pack_weights(model, 8)
    assert torch.equal(full_logits(model, idx), expected)


def linears(model):
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear)]


def test_packed_weights_are_left_alone_by_training():
    model, idx = random_model(GPTConfig(**WIDE), torch.float32), tokens(8, 1)
    assert weights.pack_weights(model, 8)
    model.train()(idx, idx)[1].backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('change', [lambda m, other: m.load_state_dict(other.state_dict()),
                                    lambda m, other: [setattr(a, 'weight', b.weight) for a, b in zip(
                                        linears(m), linears(other))]], ids=['in place', 'another tensor'])
def test_a_changed_weight_is_not_shadowed_by_its_packed_copy(change):
    model, other = (random_model(GPTConfig(**WIDE), torch.float32, seed) for seed in (0, 1))
    assert weights.pack_weights(model, 8)
    change(model, other)
    idx = tokens(8, 1)
    hidden = torch.randn(8, 64)
    with torch.no_grad():
        for a, b in zip(linears(model), linears(other)):
            x = hidden if a.in_features == 64 else torch.randn(8, a.in_features)
            assert (a(x) - torch.nn.functional.linear(x, b.weight, a.bias)).abs().max() < 1e-4
    assert full_logits(model, idx).isfinite().all()


def test_a_model_with_packed_weights_can_be_copied_and_saved(tmp_path):
    model, idx = random_model(GPTConfig(**WIDE), torch.float32), tokens(8, 1)
    expected = full_logits(model, idx)
    assert weights.pack_weights(model, 8)
    assert torch.equal(full_logits(copy.deepcopy(model), idx), expected)
    torch.save(model.state_dict(), tmp_path / 'x.pt')
    pickle.dumps(model.transformer.h[0].mlp)


def test_packing_draws_no_random_numbers():
    torch.manual_seed(5)
    weights.pack_weights(random_model(GPTConfig(**WIDE), torch.float32), 8)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    random_model(GPTConfig(**WIDE), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_mlps_take_any_number_of_rows():
    """"SymNodeVariable() is not a constant": asked whether it is one of few, a symbolic number of rows breaks the compiler."""
    model = random_model(GPTConfig(**WIDE), torch.float32)
    mlp = model.transformer.h[0].mlp
    compiled = torch.compile(mlp, backend='eager')
    with torch.no_grad():
        for n_rows in (1, 30, 5, 16):
            x = torch.randn(n_rows, 1, 64)
            assert (compiled(x) - mlp(x)).abs().max() < 1e-4
