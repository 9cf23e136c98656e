"""QK-norm, RoPE, int8 and the write in one kernel, against the same in plain torch."""
import pytest
import torch

from attention.kernels.qkv import write_qkv
from attention.rope import RotaryTable, norm_and_rotate
from kv.quantize import quantize_int8
from kv.slots import KVStore
from lab.benchmarks.kernels import fill_random

B, t, H, HKV, D, CAPACITY = 3, 2, 4, 2, 12, 9
# the second token of row 2 goes nowhere
ROWS, PLACES = [[0, 0], [2, 2], [3, 1]], [[4, 5], [-1, -1], [0, -1]]


def written(device, dtype, kv_dtype, norm, rope, seed=0):
    """Return (queries, store) from the kernel and (queries, K, V) from torch, K and V encoded."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, t, H + 2 * HKV, D, generator=generator).to(device, dtype)
    norms = [torch.nn.RMSNorm(D, eps=1e-6).to(device, dtype) if norm else None for _ in 'qk']
    for n in filter(None, norms):
        n.weight.data = torch.randn(D, generator=generator).to(device, dtype)
    positions = torch.tensor([[7, 8], [0, 1], [30, 31]], device=device)
    table = RotaryTable(D, 50.0).at(positions, 32, dtype) if rope else None
    store = KVStore(4, HKV, CAPACITY, D, kv_dtype, dtype, device)
    fill_random(store)
    before = [x.clone() for x in store.tensors]
    target = store.tensors, torch.tensor(ROWS, device=device), torch.tensor(PLACES, device=device)
    with torch.no_grad():
        q = write_qkv(qkv, H, *norms, table, *target)
        q_rows, k, v = qkv.transpose(1, 2).split([H, HKV, HKV], dim=1)
        k = norm_and_rotate(k, norms[1], table)
        expected = norm_and_rotate(q_rows, norms[0], table), store.encode(k, v)
    return q, store, before, expected


@pytest.mark.parametrize('norm', [False, True])
@pytest.mark.parametrize('rope', [False, True])
@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8, torch.float16])
def test_is_what_torch_does(device, norm, rope, kv_dtype):
    q, store, before, (expected, new) = written(device, torch.float32, kv_dtype, norm, rope)
    assert (q - expected).abs().max() < 2e-6 * expected.abs().max()
    for stored, was, x in zip(store.tensors, before, new):
        for b, j in [(0, 0), (0, 1), (2, 0)]:
            was[ROWS[b][j], :, PLACES[b][j]] = x[b, :, j]
        off = (stored.double() - was.double()).abs()
        # exact, unless a different summation order moved a value across a rounding boundary
        few = 2e-6 * was.double().abs().max().item()
        ulp = was.double().abs() * 2 ** -10
        step = {torch.int8: 1, torch.float16: ulp, torch.float32: few}[stored.dtype]
        assert (off <= step).all() and (off > few).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Only on a GPU: the interpreter has no bfloat16."""
    q, store, before, (expected, new) = written(torch.device('cuda'), dtype, torch.int8, True, True)
    assert (q - expected).abs().max() <= expected.abs().max() * 2 ** -6
    for b, j in [(0, 0), (0, 1), (2, 0)]:
        values, _, scale, _ = (x[ROWS[b][j], :, PLACES[b][j]].float() for x in store.tensors)
        assert (values * scale - (new[0] * new[2])[b, :, j]).abs().max() <= 2 * scale.max()


def test_a_layer_without_k_and_v(device):
    qkv = torch.randn(2, 1, H, D, device=device)
    rope = RotaryTable(D, 50.0)(5, 6, device, torch.float32)
    norm = torch.nn.RMSNorm(D, eps=1e-6).to(device)
    with torch.no_grad():
        expected = norm_and_rotate(qkv.transpose(1, 2), norm, rope)
    error = (write_qkv(qkv, H, norm, None, rope) - expected).abs().max()
    assert error < 2e-6 * expected.abs().max()
    assert torch.equal(write_qkv(qkv, H), qkv.transpose(1, 2))


@pytest.mark.parametrize('size', [0.0, 1e-9, 1e9, float('inf'), float('nan')])
def test_extreme_values_are_stored_as_quantize_int8_would(device, size):
    qkv = torch.randn(1, 1, 3, D, device=device)
    qkv[..., 2, :] = qkv[..., 2, :].sign() if size else 0.0
    qkv[..., 2, 1] = size
    store = KVStore(1, 1, 1, D, torch.int8, torch.float32, device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    write_qkv(qkv, 1, stored=store.tensors, rows=zero, places=zero)
    _, v, _, v_scale = store.tensors
    values, scale = quantize_int8(qkv[0, 0, 2].cpu())
    both_nan = scale.isnan().all() and v_scale.isnan().all()
    assert both_nan or torch.equal(v_scale.flatten().cpu(), scale)
    if scale.isfinite().all():
        assert torch.equal(v.flatten().cpu(), values)
