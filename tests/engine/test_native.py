"""The extension's decode step: equal to the model's own forward through the same cache."""
import ctypes
import os
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.files import user_cache
from common.gpt_config import GPTConfig
import extension
from engine import native
from engine.steps.decode import fast_decode
from engine.steps.agreement import note_once
from engine.steps.native import native_decode
from engine.pages.cache import PagedKVCache
from engine.weights.quantize import quantize_weights
from generate import Generation, Sampler
from tests.helpers.models import FULL_STACK, random_model, tokens
from training.native import loading

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(native.library() is None, reason='no compiler here')
WIDE = dict(FULL_STACK, n_embd=32, head_dim=16, mlp_hidden=48)
KINDS = {
    'vanilla': dict(block_size=64, vocab_size=23, n_layer=3, n_head=2, n_embd=32),
    'full stack': WIDE,
    'odd groups': dict(WIDE, n_head=15, head_dim=32, bias=False, gelu='tanh'),
    'widths of 8': dict(WIDE, n_embd=40, n_head=3, head_dim=24, mlp_hidden=88),
    'a window past the end': dict(WIDE, n_head=7, window_size=80, mlp_hidden=56, gelu='relu2'),
    'tied without rope, rounded': dict(WIDE, kv_tied='global', rope_fraction_global=0.0,
                                       n_kv_head=2, kv_quant_train='int8'),
    'offset keys, rounded': dict(WIDE, key_offset=True, qk_norm=False, kv_quant_train='int8'),
    'latents with sinks, rounded': dict(WIDE, kv_latent=48, pos_embedding='learned', qk_norm=False,
                                        n_kv_head=2, attn_sink=True, kv_quant_train='int8'),
    'gates of latents': dict(WIDE, kv_latent=32, rope_fraction_global=0.0, attn_gate=True),
    'layers that differ': dict(WIDE, n_head=4, layer_pattern='LLG', kv_share='',
                               window_pattern='5,9,0', kv_head_pattern='1,2,4'),
    'wide heads': dict(WIDE, n_head=3, head_dim=112, layer_pattern='G', kv_share='', window_size=0),
}


@pytest.fixture
def wide():
    return random_model(GPTConfig(**WIDE), torch.float32)


def caches(model, kv_dtype, batch, paged):
    """Two equal caches."""
    kind = (PagedKVCache,) if paged else ()
    kws = dict(n_pages=batch * 10, page_size=7) if paged else {}
    return [model.new_cache(batch, 64, kv_dtype, *kind, **kws) for _ in range(2)]


@torch.inference_mode()
def largest_gap(model, plain, other, prompts, steps, seed=0):
    """Largest difference between the logits in `steps` steps, each over random rows."""
    decode, generator = native_decode(model, other), torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    idx = torch.tensor([p + [0] * (width - len(p)) for p in prompts])
    for cache in (plain, other):
        model(idx, cache=cache, lens=[len(p) for p in prompts])
    gap = 0.0
    for _ in range(steps):
        new = torch.randint(23, (len(prompts), 1), generator=generator)
        lens = torch.randint(2, (len(prompts),), generator=generator).tolist()
        a, b = model(new, cache=plain, lens=lens)[0][:, -1], decode(new, lens)
        rows = [row for row, n in enumerate(lens) if n]
        if rows:
            gap = max(gap, (a[rows].float() - b[rows]).abs().max().item())
    assert plain.lengths.tolist() == other.lengths.tolist()
    return gap


def prompts(*lengths):
    return [tokens(1, n, seed=n)[0].tolist() for n in lengths]


@torch.inference_mode()
def largest_gap_of_chunks(model, plain, other, rounds, seed=0):
    """Largest difference between the logits if each round, [(row, number of tokens)], is one call
    of the extension or one forward of the model for each row."""
    decode, generator = native_decode(model, other), torch.Generator().manual_seed(seed)
    gap = 0.0
    for parts in rounds:
        texts = [torch.randint(23, (1, n), generator=generator) for _, n in parts]
        rows = [row for row, _ in parts]
        found = decode.extend([text[0].tolist() for text in texts], rows, [True] * len(rows))
        for row, text, b in zip(rows, texts, found, strict=True):
            a = model(text, cache=plain, rows=[row])[0][0, -1]
            gap = max(gap, (a.float() - b).abs().max().item())
    assert plain.lengths.tolist() == other.lengths.tolist()
    return gap


def bound_of(kind, kv_dtype) -> float:
    """Of the gap. K and V that differ by a float32 rounding may get neighbouring values of 8 bits,
    or of 4, which lie 18 times as far apart."""
    if kv_dtype == 'float32' and 'rounded' not in kind:
        return 1e-4
    return 0.1 if kv_dtype == 'int4' else 0.05 if 'rounded' in kind else 0.02


CHUNKS = [[(0, 3)], [(1, 5), (0, 1)], [(0, 4), (1, 1), (2, 2)], [(2, 5), (1, 5), (0, 5)],
          [(2, 1), (1, 2), (0, 5)], [(2, 5)], [(2, 9), (0, 1)], [(0, 17), (1, 3), (2, 5)]]


CACHES = [('float32', False), ('int4', True), ('int8', False), ('bfloat16', True),
          ('int4', False), ('float32', True), ('int8', True)]


@pytest.mark.parametrize('kind, kv_dtype, paged', [
    (kind, *CACHES[(2 * k + which) % len(CACHES)]) for k, kind in enumerate(KINDS)
    for which in (0, 1)])
def test_logits_equal_those_of_the_models_forward(kind, kv_dtype, paged):
    """In steps of a token, and in chunks of several rows."""
    model = random_model(GPTConfig(**KINDS[kind]), torch.float32)
    bound = bound_of(kind, kv_dtype)
    assert largest_gap(model, *caches(model, kv_dtype, 3, paged), prompts(13, 1, 4), 45) < bound
    assert largest_gap_of_chunks(model, *caches(model, kv_dtype, 3, paged), CHUNKS) < bound


@pytest.mark.parametrize('n_kv_head, far', [(1, 1), (2, 1), (1, 64)])
def test_keys_that_score_far_below_weigh_exactly_0(n_kv_head, far):
    """The first values are so large that a weight above 0 shows."""
    fields = dict(KINDS['vanilla'], block_size=128, n_layer=1, n_kv_head=n_kv_head)
    model, found = random_model(GPTConfig(**fields), torch.float32), []
    c_attn = model.transformer.h[0].attn.c_attn
    c_attn.weight.data[:32], c_attn.bias.data[:32] = 0, 1  # queries
    for value in (0, 3e38 / far):
        cache = model.new_cache(1, 128, 'float32').fill_(100)
        k, v = cache.stores[0].tensors
        k.zero_()[:, :, :far], v.fill_(0.1)[:, :, :far] = -90 / 4, value
        found.append(native_decode(model, cache)(torch.tensor([[1]])).clone())
    assert torch.equal(*found)


def test_logits_are_of_the_chunks_that_are_wanted(wide):
    texts, all_, some = [[1, 2, 3], [4], [5, 6]], *(wide.new_cache(3, 64) for _ in 'ab')
    expected = native_decode(wide, all_).extend(texts, [0, 2, 1], [True] * 3)
    decode = native_decode(wide, some)
    assert torch.equal(decode.extend(texts, [0, 2, 1], [True, False, True]), expected[[0, 2]])
    assert decode.extend([[7], [8]], [0, 1], [False, False]).shape == (0, 23)
    assert some.lengths.tolist() == [4, 3, 1]


def test_what_is_refused_writes_nothing(wide):
    cache, full = wide.new_cache(2, 64, 'float32'), wide.new_cache(2, 4).fill_(4)
    decode, of_full = native_decode(wide, cache), native_decode(wide, full)
    for refused, error, message in (
            (lambda: decode.extend([[1, 23]], [1], [True]), IndexError, '23.*0 to 22'),
            (lambda: decode.extend([[-1]], [1], [True]), IndexError, '-1.*0 to 22'),
            (lambda: decode(torch.tensor([[1], [23]])), IndexError, '23.*0 to 22'),
            (lambda: decode(torch.tensor([[-1], [1]])), IndexError, '-1.*0 to 22'),
            (lambda: of_full(torch.tensor([[1], [1]])), UserError, 'max_seq_len=4')):
        with pytest.raises(error, match=message):
            refused()
        assert cache.lengths.tolist() == [0, 0] and cache._step is None
    assert decode.extend([[1] * 50], [1], [True]).shape == (1, 23)
    full.reset([0])
    of_full(torch.tensor([[1], [1]]), [1, 0])
    assert full.lengths.tolist() == [1, 4]


@pytest.mark.parametrize('kv_dtype, bound', [('float32', 1e-4), ('int8', 1e-4), ('bfloat16', 0.02)])
def test_more_keys_than_are_read_at_a_time(kv_dtype, bound):
    fields = dict(KINDS['vanilla'], head_dim=8, block_size=1200)
    model = random_model(GPTConfig(**fields), torch.float32)
    plain, other = (model.new_cache(3, 1150, kv_dtype) for _ in 'ab')
    assert largest_gap(model, plain, other, prompts(1015, 70, 1100), steps=30) < bound


@pytest.mark.parametrize('weights, bound', [('bfloat16', 0.03), ('int8', 0.05)])
def test_other_weights_stay_close(weights, bound):
    """Activations are rounded differently in bfloat16, or differ by one step in int8."""
    model = random_model(GPTConfig(**WIDE), torch.float32)
    model = model.bfloat16() if weights == 'bfloat16' else model
    quantize_weights(model, weights if weights == 'int8' else 'auto')
    plain, other = caches(model, 'float32', 3, paged=False)
    with torch.inference_mode():
        spread = model(tokens(3, 20), all_logits=True)[0].std().item()
    assert largest_gap(model, plain, other, prompts(13, 1, 4), steps=45) < bound * spread


@pytest.fixture
def three_threads(monkeypatch):
    """In the extension only: torch's operations would wait for cores."""
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 3)


def decoded(model):
    decode = native_decode(model, model.new_cache(2, 64).fill_(0))
    return torch.stack([decode(tokens(2, 1, seed=k)).clone() for k in range(20)])


def test_threads_do_not_change_the_result(wide, monkeypatch):
    expected = decoded(wide)
    for n in (2, 5):
        monkeypatch.setattr(torch, 'get_num_threads', lambda: n)
        assert (decoded(wide) - expected).abs().max() < 1e-4


def test_a_forked_process_works_alone(wide, three_threads):
    """OpenMP would wait for threads that it does not have."""
    expected = decoded(wide)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits
        os._exit(not torch.allclose(decoded(wide), expected, atol=1e-4))
    assert os.waitpid(child, 0)[1] == 0


def test_several_callers_at_once(wide, three_threads):
    """One has the threads, the others work alone."""
    expected = decoded(wide)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: decoded(wide), range(12)))
    assert all((x - expected).abs().max() < 1e-4 for x in found)


def test_logits_that_are_not_finite_show_it(wide):
    with torch.no_grad():
        wide.transformer.h[2].mlp.c_fc.bias[3] = torch.nan
    assert not native_decode(wide, wide.new_cache(1, 64))(torch.tensor([[1]])).isfinite().any()


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize('fields, dtype, kv_dtype, named', [
    *((width, torch.float32, 'auto', f'{name}={n} (widths must be multiples of 8)')
      for width in (dict(n_embd=36), dict(head_dim=6), dict(mlp_hidden=50))
      for name, n in width.items()),
    ({}, torch.float64, 'auto', ''),
    ({}, torch.float32, 'float16', "kv_dtype='float16'")])
def test_where_it_cannot_serve_the_model_does(fields, dtype, kv_dtype, named, capsys):
    """A note says why, once, if the reason is one of the settings."""
    model = random_model(GPTConfig(**WIDE | fields), dtype)
    note_once.cache_clear()
    for _ in 'ab':
        assert native_decode(model, model.new_cache(1, 64, kv_dtype)) is None
    note = f'Note: the C++ decode step does not support {named}: plain torch decodes, slower\n'
    assert capsys.readouterr() == ('', note if named else '')


# -- building it -----------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def built():
    """The file of the extension that this process uses."""
    return extension._compiled(native.SOURCE, user_cache() / 'native')


@pytest.fixture
def quickly(built, monkeypatch):
    """Copy the extension in place of compiling it again."""
    def copied(compiler, source, path):
        shutil.copy(built, path.with_suffix('.tmp'))
        path.with_suffix('.tmp').replace(path)
    monkeypatch.setattr(extension, '_compile', copied)


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """The state of a process that has not looked for the extension yet; an empty cache folder.
    It is compiled without optimization, which takes a quarter of the time."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(extension, 'FLAGS', ('-O0', *extension.FLAGS[1:]))
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


@pytest.mark.parametrize('compiler, message', [
    ('no-such-compiler', 'no-such-compiler is needed'), ('', 'this cannot be')])
def test_without_a_compiler_torch_serves(wide, unbuilt, monkeypatch, capsys, compiler, message):
    """Or if it reports an error, which is shown."""
    if compiler:
        monkeypatch.setenv('CXX', compiler)
    else:
        monkeypatch.setattr(extension, 'FLAGS', (*extension.FLAGS, '-DINLINE='))
        monkeypatch.setattr(native, 'SOURCE', unbuilt / 'decode.cpp')
        native.SOURCE.write_text('#error "this cannot be"\n')
    cache = wide.new_cache(1, 50)
    assert fast_decode(wide, cache) is None and fast_decode(wide, cache) is None
    notes = capsys.readouterr().err
    assert notes.count('Note: no C++ extension') == 1 and message in notes
    assert not list(unbuilt.rglob('*.so'))
    quantize_weights(wide, 'int8')
    assert not wide.lm_head.packed
    assert len(list(Generation(wide, prompts(5), 8, Sampler(0), cache))) == 8


def test_a_library_with_other_structs_is_not_used(unbuilt, quickly, monkeypatch, capsys):
    class Wider(ctypes.Structure):
        _fields_ = [*native.Step._fields_, ('more', ctypes.c_int64)]
    monkeypatch.setattr(native, 'Step', Wider)
    assert native.library() is None and 'a different size' in capsys.readouterr().err


def test_without_openmp_it_has_threads_of_its_own(unbuilt, monkeypatch):
    wrapper = unbuilt / 'c++'
    wrapper.write_text('#!/bin/sh\n'
                       'case "$*" in *-fopenmp\\ *) echo no -fopenmp >&2; exit 1;; esac\n'
                       'echo "$*" >> "$0.log"; exec c++ "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv('CXX', str(wrapper))
    found = extension.opened(loading.SOURCE, loading._checked)
    assert '-fopenmp-simd' in Path(f'{wrapper}.log').read_text()

    def gelu(_):
        x = torch.randn(100_000)
        y = torch.empty_like(x)
        found.nanokv_gelu(ctypes.c_int64(3), *(ctypes.c_void_p(p) for p in (
            x.data_ptr(), 0, y.data_ptr())), ctypes.c_int64(len(x)), False, False)
        return (y - torch.nn.functional.gelu(x.double())).abs().max() < 1e-6
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(gelu, range(50)))


def test_it_is_compiled_once_and_only_in_a_folder_of_this_user(unbuilt, quickly, monkeypatch,
                                                               capsys):
    compiled, compiling = [], extension._compile
    monkeypatch.setattr(extension, '_compile', lambda *args: compiled.append(compiling(*args)))
    folder = unbuilt / 'nanokv' / 'native'
    for _ in range(2):
        assert native.library() is not None and len(compiled) == 1
        native._library.cache_clear()
    [made] = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, made)] == [0o700, 0o700]
    folder.chmod(0o777)
    assert native.library() is None and f'users can change {folder}' in capsys.readouterr().err


def test_a_relative_cache_folder_is_ignored(unbuilt, monkeypatch):
    """It could come with a download."""
    monkeypatch.chdir(unbuilt)
    monkeypatch.setenv('XDG_CACHE_HOME', '.')
    monkeypatch.setenv('HOME', str(unbuilt / 'home'))
    assert native.library() is not None
    assert (unbuilt / 'home' / '.cache' / 'nanokv' / 'native').is_dir()
