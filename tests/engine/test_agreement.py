"""Fast decode steps are used only if they compute what model.py does, which people change."""
import dataclasses
from importlib.util import find_spec

import pytest
import torch

from attention.backends import INTERPRETING, triton_enabled
from common.gpt_config import GPTConfig, unknown_field
from engine.steps import agreement
from engine import native
from engine.steps.agreement import note_once
from engine.steps.captured import captured_decode
from engine.steps.fused import FusedBlock
from engine.steps.native import NativeDecode, native_decode
from model import Block, CausalSelfAttention
from tests.helpers.models import FULL_STACK, random_model

# few layers, since interpreted kernels are slow
SMALL = dict(FULL_STACK, n_layer=3, layer_pattern='LGL', kv_share='', n_head=2, n_embd=16,
             head_dim=8, mlp_hidden=24)
MORE = dataclasses.make_dataclass('MoreConfig', [('query_scale', float, dataclasses.field(
    default=1.0, metadata={'choices': ()}))], bases=(GPTConfig,))


@pytest.fixture
def native_step():
    """A function of a model and a cache: the C++ step, or None if it is not used."""
    if native.library() is None:
        pytest.skip('no compiler here')
    note_once.cache_clear()
    return native_decode


@pytest.fixture
def fused_step(everywhere):
    """The same with the blocks of captured steps."""
    if not INTERPRETING or find_spec('triton') is None:
        pytest.skip('interpreted where there is no GPU')
    note_once.cache_clear()

    def step(model, cache):
        with triton_enabled(True):
            decode = captured_decode(model, cache)
        unknown = unknown_field(model.config, 'fast')
        assert (decode is None) == bool(unknown)  # blocks that are not fused are captured, too
        return decode if type(model.transformer.h[0]) is FusedBlock else None
    return step


@pytest.fixture(params=['native_step', 'fused_step'])
def fast_step(request):
    return request.getfixturevalue(request.param)


def sharpened(monkeypatch, wrong) -> None:
    """Make queries of the rows for which wrong(start of the row, numbers of tokens of all rows) is
    true half as long again, as a change of model.py may."""
    attend = CausalSelfAttention.attend_to_cache

    def changed(self, q, kv, cache):
        if hasattr(cache, '_step'):
            starts, lens = cache._step.starts, cache._step.lens
        else:
            starts, lens = cache.positions[:, 0].tolist(), [1]
        scale = torch.tensor([1.5 if wrong(start, lens) else 1.0 for start in starts])
        return attend(self, q * scale[:, None, None, None], kv, cache)
    monkeypatch.setattr(CausalSelfAttention, 'attend_to_cache', changed)


def refused(step, capsys, what, config=GPTConfig(**SMALL)) -> bool:
    """Whether the step is not used, and one line says why."""
    model = random_model(config, torch.float32)
    capsys.readouterr()
    assert step(model, model.new_cache(2, 64)) is None
    [note] = capsys.readouterr().err.splitlines()
    return note.startswith('Note: the') and what in note


@pytest.mark.parametrize('kv_dtype', [pytest.param('float32', marks=pytest.mark.slow), 'int8'])
def test_a_step_that_computes_the_same_is_used(fast_step, kv_dtype):
    model = random_model(GPTConfig(**SMALL), torch.float32)
    state = torch.get_rng_state()
    assert fast_step(model, model.new_cache(2, 64, kv_dtype)) is not None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('dtype, vocab_size', [(torch.bfloat16, 64), (torch.float32, 1)])
def test_rounding_of_large_or_few_logits_is_no_difference(native_step, dtype, vocab_size):
    """GPT-2's logits are about -100, a multiple of 0.5 in bfloat16, and differ by about 3."""
    model = random_model(GPTConfig(**SMALL | dict(vocab_size=vocab_size), bias=True), torch.float32)
    with torch.no_grad():
        model.transformer.wte.weight[:, 0] = 1
        model.transformer.ln_f.bias[0] -= 150
    model.to(dtype)
    assert native_step(model, model.new_cache(2, 64)) is not None


def test_large_windows_are_compared_row_by_row(native_step, monkeypatch, recorded):
    """A comparison takes the memory of one long row, also past the window; K and V are equal."""
    monkeypatch.setattr(agreement, 'NBYTES', 2 ** 12)
    made = recorded(agreement, '_agree', lambda *args: args[2])
    config = GPTConfig(**SMALL | dict(window_size=16))
    model = random_model(config, torch.float32)
    assert native_step(model, model.new_cache(2, 64)) is not None
    assert made == [[0, 9], [15], [30], [30]]


@pytest.mark.parametrize('step, wrong', [
    ('native_step', lambda start, lens: start == 1),
    ('native_step', lambda start, lens: start >= 8),
    ('native_step', lambda start, lens: start >= 60),
    ('native_step', lambda start, lens: start % 5 == 4),
    ('native_step', lambda start, lens: not all(lens)),
    ('fused_step', lambda start, lens: start >= 8)],
    ids=['second token', 'from 8 on', 'at the end', 'at a wrap', 'a row sits out', 'fused'])
def test_a_change_that_acts_anywhere_is_seen(request, monkeypatch, capsys, step, wrong):
    """Queries are scaled in some positions or steps only."""
    step = request.getfixturevalue(step)
    sharpened(monkeypatch, wrong)
    assert refused(step, capsys, 'other logits than model.py')


def test_a_field_that_the_step_does_not_know_is_refused_by_name(fast_step, capsys):
    assert refused(fast_step, capsys, 'query_scale=1.5', MORE(**SMALL, query_scale=1.5))
    assert unknown_field(MORE(**SMALL), 'fast') == ''  # at its default it changes nothing


def test_a_step_that_does_not_run_says_how_it_fails(fast_step, monkeypatch, capsys):
    def fails(*args):
        raise TypeError('forward() takes 6 arguments')
    monkeypatch.setattr(NativeDecode, '_layer', fails)
    monkeypatch.setattr(FusedBlock, 'forward', fails)
    assert refused(fast_step, capsys, 'fail with TypeError: forward() takes 6 arguments')


def test_one_argument_more_of_blocks_does_not_break_fused_ones(fused_step, monkeypatch):
    forward = Block.forward
    monkeypatch.setattr(Block, 'forward', lambda self, *args, ids: forward(self, *args))
    monkeypatch.setattr(Block, '__call__', lambda self, *args: torch.nn.Module.__call__(
        self, *args, ids=None))
    model = random_model(GPTConfig(**SMALL), torch.float32)
    assert fused_step(model, model.new_cache(2, 64)) is not None
