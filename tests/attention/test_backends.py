"""Attention backends: which one is chosen, what is refused, and that all give equal results."""

import pytest
import torch

from attention.causal import causal_attention
from attention.kernels import choose as choosing
from attention.kernels import flash as flash_attn
from attention.kernels.choose import choose
from common.errors import UserError
from common.gpt_config import GPTConfig
from model import GPT
from tests.helpers.models import FULL_STACK
from tests.helpers.reference import dense_attention
from training.step.kernels import describe_attention, prepare

CPU, CUDA = torch.device('cpu'), torch.device('cuda')
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def flash(monkeypatch):
    """Install a fake flash-attn package of a given version that records its calls."""
    def install(version):
        calls = []

        def flash_attn_func(q, k, v, **how):
            calls.append((q.shape, k.shape, how))
            return (q, None) if version == 4 else q
        monkeypatch.setattr(choosing, 'FLASH_ATTN_VERSION', version)
        monkeypatch.setattr(flash_attn, '_flash_attn',
                            flash_attn._adapted(flash_attn_func, version))
        return calls
    monkeypatch.setattr(choosing, 'FLASH_ATTN_VERSION', 0)
    return install


@pytest.mark.parametrize('kind, device, dtype, head_dim, dropout_p, plain, version_2', [
    ('global', CPU, F32, 64, 0, 'sdpa', 'sdpa'), ('local', CPU, BF16, 64, 0, 'sdpa', 'sdpa'),
    ('global', CUDA, BF16, 256, 0, 'sdpa', 'flash_attn'),
    ('global', CUDA, BF16, 257, 0, 'sdpa', 'sdpa'), ('global', CUDA, F32, 64, 0, 'sdpa', 'sdpa'),
    ('local', CUDA, BF16, 16, 0, 'flex', 'flex'), ('local', CUDA, F32, 15, 0, 'sdpa', 'sdpa'),
    ('local', CUDA, BF16, 64, 0.1, 'sdpa', 'flash_attn'),
    ('local', CUDA, F64, 64, 0, 'sdpa', 'sdpa')])
def test_what_auto_takes(flash, kind, device, dtype, head_dim, dropout_p, plain, version_2):
    """The choice without flash-attn, and with its version 2."""
    assert choose(kind, 'auto', device, dtype, head_dim, dropout_p) == plain
    flash(2)
    assert choose(kind, 'auto', device, dtype, head_dim, dropout_p) == version_2
    flash(4)
    assert choose('global', 'auto', CUDA, BF16, 64, dropout_p=0.1) == 'sdpa'


@pytest.mark.parametrize('wish, device, dtype, head_dim, dropout_p, version, why', [
    ('flex', CPU, BF16, 64, 0, 0, "runs on CUDA, not on device='cpu'"),
    ('flash_attn', CPU, BF16, 64, 0, 2, 'runs on CUDA'),
    ('varlen', CPU, BF16, 64, 0, 0, 'runs on CUDA'), ('flex', CUDA, BF16, 64, 0.1, 0, 'no dropout'),
    ('flex', CUDA, F64, 64, 0, 0, 'float64'),
    ('flash_attn', CUDA, BF16, 64, 0, 0, 'pip install flash-attn'),
    ('flash_attn', CUDA, F32, 64, 0, 2, 'dtype float32'),
    ('flash_attn', CUDA, BF16, 64, 0.1, 4, 'no dropout in version 4'),
    ('varlen', CUDA, BF16, 64, 0.1, 0, 'no dropout'),
    ('varlen', CUDA, F32, 64, 0, 0, 'dtype float32'),
    ('varlen', CUDA, BF16, 20, 0, 0, 'multiple of 8 .*head_dim 20'),
    ('fastest', CPU, BF16, 64, 0, 0, "'auto', 'sdpa'")])
def test_a_wish_that_cannot_be_met_is_an_error(flash, wish, device, dtype, head_dim, dropout_p,
                                               version, why):
    if version:
        flash(version)
    with pytest.raises(UserError, match=f'attention_backend={wish!r}.*{why}'):
        choose('local', wish, device, dtype, head_dim, dropout_p)
    assert choose('local', 'varlen', CUDA, BF16, 24) == 'varlen'


@pytest.mark.parametrize('window', [0, 1, 7, 40, 100])
@pytest.mark.parametrize('backend', ['auto', 'sdpa', 'math'])
def test_each_computes_the_same(backend, window):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, 8, generator=g, dtype=torch.float64) for h in (6, 2, 2))
    for sink in (None, torch.randn(6, generator=g, dtype=torch.float64)):
        y = causal_attention(q, k, v, window, backend=backend, sink=sink)
        assert (y - dense_attention(q, k, v, window, sink)).abs().max() < 1e-12


@pytest.mark.parametrize('version, whole', [(2, (-1, -1)), (4, (None, None))])
def test_how_the_flash_attn_package_is_called(flash, monkeypatch, version, whole):
    calls = flash(version)
    monkeypatch.setattr('attention.kernels.dispatch.choose', lambda *_: 'flash_attn')
    q, k = torch.randn(2, 6, 40, 16, dtype=BF16), torch.randn(2, 2, 40, 16, dtype=BF16)
    for window in (0, 8, 64):
        assert torch.equal(causal_attention(q, k, k, window, backend='flash_attn'), q)
    assert [shapes for *shapes, _ in calls] == [[(2, 40, 6, 16), (2, 40, 2, 16)]] * 3
    assert [how['window_size'] for *_, how in calls] == [whole, (7, 0), whole]
    assert all(how['causal'] for *_, how in calls)


@pytest.mark.parametrize('window', [0, 1, 8, 64])
def test_torchs_flash_attention_gets_sequences_one_after_the_other(flash, monkeypatch, window):
    def varlen_attn(q, k, v, starts, starts_k, longest, longest_k, *, window_size, **gqa):
        """What torch documents: (tokens, heads, D), and the queries' windows as (left, right)."""
        assert torch.equal(starts, starts_k) and starts.dtype == torch.int32
        assert longest == longest_k == starts.diff().max() and window_size[1] == 0
        parts = zip(*(x.tensor_split(starts[1:-1].long()) for x in (q, k, v)))
        found = [dense_attention(*(x.transpose(0, 1)[None] for x in part), window_size[0] + 1)
                 for part in parts]
        return torch.cat([y[0].transpose(0, 1) for y in found])
    monkeypatch.setattr(flash_attn, 'varlen_attn', varlen_attn)
    monkeypatch.setattr('attention.kernels.dispatch.choose', lambda *_: 'varlen')
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, h, 40, 8, generator=g, dtype=torch.float64) for h in (6, 2, 2))
    y = causal_attention(q, k, v, window, backend='varlen')
    assert (y - dense_attention(q, k, v, window)).abs().max() < 1e-12


def test_one_that_cannot_be_imported(flash, monkeypatch):
    flash(2)
    monkeypatch.setattr(flash_attn, '_flash_attn', None)
    with pytest.raises(UserError, match='flash-attn package cannot be imported'):
        flash_attn.load_flash_attn()


def test_of_a_model():
    model = GPT(GPTConfig(**FULL_STACK))
    idx = torch.arange(20)[None]
    expected = model(idx)[0]
    model.attention_backend = 'math'
    described = describe_attention(model, torch.float32, 0.0)
    assert described == 'attention: global layers math, local layers math'
    assert (model(idx)[0] - expected).abs().max() < 1e-5
    model.attention_backend = 'magic'
    with pytest.raises(UserError, match='allowed are'):
        model(idx)
    model.attention_backend = 'flash_attn'
    prepare(model, 20)  # there is no autocast dtype to go by here, and nothing to build


@pytest.mark.gpu
@pytest.mark.parametrize('T, window, heads', [
    (256, 64, (6, 2, 2)), (300, 100, (6, 2, 2)), (129, 0, (6, 2, 2)), (1000, 37, (6, 2, 2)),
    (1024, 256, (12, 1, 1)),
    # Inductor's decoding kernel takes T * 4 rows, four query heads for one of K and V, no longer
    (40, 17, (8, 2, 2)), (127, 17, (8, 2, 2))])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('backend', ['auto', 'sdpa', 'flex', 'flash_attn', 'varlen', 'math'])
def test_values_and_gradients_on_a_gpu(backend, dtype, T, window, heads):
    if choosing.why_unavailable(backend, CUDA, dtype, 64, 0.0) and backend != 'auto':
        pytest.skip(choosing.why_unavailable(backend, CUDA, dtype, 64, 0.0))
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, h, T, 64, generator=g) for h in heads]
    leaves = [a.to('cuda', dtype).requires_grad_() for a in x]
    exact = [a.detach().cpu().double().requires_grad_() for a in leaves]
    upstream = torch.randn(2, heads[0], T, 64, generator=g)
    if backend == 'flash_attn':
        flash_attn.load_flash_attn()
    y = causal_attention(*leaves, window, backend=backend)
    expected = dense_attention(*exact, window)
    y.backward(upstream.to('cuda', dtype))
    expected.backward(upstream.double())
    # float32: FlexAttention may use TF32
    bound = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    assert (y.cpu().double() - expected).abs().max() < bound
    for leaf, want in zip(leaves, exact):
        assert (leaf.grad.cpu().double() - want.grad).abs().max() < bound * want.grad.abs().max()
