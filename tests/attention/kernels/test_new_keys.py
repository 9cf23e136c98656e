"""Attention that also computes its queries and the new key, with QK-norm, RoPE, int8 and the write,
against the same in plain torch."""
import copy

import pytest
import torch

from attention.cached import dequantized
from attention.kernels.decode import New, Tuning, stored_attention
from attention.rope import RotaryTable, norm_and_rotate
from engine.steps.static import put
from kv.quantize import quantize_int8
from kv.slots import KVStore
from lab.benchmarks.kernels import fill_random

B, D, CAPACITY = 4, 12, 21
LAYOUTS = {  # of each row: number of keys, row or page of the new one, its offset
    'ring': ([21, 21, 5, 0], [0, 1, 2, 3], [7, 20, 4, -1]),
    'contiguous': ([21, 1, 13, 0], [0, 1, 2, 3], [20, 0, 12, -1]),
    'pages of 4': ([21, 1, 8, 0], [11, 2, 6, 0], [0, 0, 3, -1]),
    'pages of 16': ([33, 1, 32, 0], [5, 2, 6, 0], [0, 0, 15, -1]),
}
TABLES = {4: [[0, 3, 5, 8, 9, 11], [2] + [-1] * 5, [1, 6] + [-1] * 4, [-1] * 6],
          16: [[0, 3, 5], [2, -1, -1], [1, 6, -1], [-1] * 3]}


def made(device, layout, kv_dtype, dtype=torch.float32, heads=(4, 2), norm=True, rope=True,
         owns=True, seed=0):
    """The arguments of the kernel, and its store."""
    generator = torch.Generator().manual_seed(seed)
    H, n_kv_head = heads

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)
    qkv = random(B, 1, H + 2 * n_kv_head * owns, D)
    norms = [torch.nn.RMSNorm(D, eps=1e-6).to(device, dtype) if norm else None for _ in 'qk']
    for n in filter(None, norms):
        n.weight.data = random(D)
    lens, rows, places = (torch.tensor(x, device=device) for x in LAYOUTS[layout])
    positions = torch.tensor([[70], [0], [12], [3]], device=device)
    table = RotaryTable(D, 50.0).at(positions, 128, dtype) if rope else None
    page = int(layout.rpartition(' ')[2]) if 'pages' in layout else 0
    n, capacity = (12, page) if page else (B, CAPACITY)
    store = KVStore(n, n_kv_head, capacity, D, kv_dtype, dtype, device)
    fill_random(store)
    pages = torch.tensor(TABLES[page], dtype=torch.int32, device=device) if page else None
    new = New(H, *norms, table, *((rows, places, layout == 'ring') if owns else ()))
    return qkv, store, dict(kv_lens=lens, table=pages, new=new)


def expected(qkv, store, kv_lens, table, new):
    """The same in plain torch, which writes to `store`; attention in float64."""
    H, n_kv_head = new.n_head, store.tensors[0].size(1)
    q, *kv = qkv.transpose(1, 2).split([H, n_kv_head, n_kv_head][:1 + 2 * (new.rows is not None)],
                                       dim=1)
    if kv:
        kept = new.places >= 0
        put(store, new.rows[kept], new.places[kept],
            [x[kept] for x in store.encode(norm_and_rotate(kv[0], new.k_norm, new.rope), kv[1])])
    q = norm_and_rotate(q, new.q_norm, new.rope)
    k, v = dequantized(torch.float64, *store.tensors)
    if table is not None:
        k, v = (x[table.clamp(min=0).long()].transpose(1, 2).flatten(2, 3) for x in (k, v))
    k, v = (x.repeat_interleave(H // n_kv_head, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) / D ** 0.5
    seen = torch.arange(k.size(2), device=k.device) < kv_lens[:, None]
    return scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('kv_dtype, heads, n_splits, norm, rope', [
    (torch.int8, (4, 2), 3, True, True), (torch.float32, (4, 1), 1, True, False),
    (torch.float16, (3, 3), 2, False, True), (torch.int8, (17, 1), 3, False, False),
    (torch.float32, (4, 2), 3, True, True)])
@torch.no_grad()
def test_is_what_torch_does(device, layout, kv_dtype, heads, n_splits, norm, rope):
    qkv, store, how = made(device, layout, kv_dtype, heads=heads, norm=norm, rope=rope)
    other = copy.deepcopy(store)
    y = stored_attention(qkv, *store.tensors, **how, tuning=Tuning(block_n=16, n_splits=n_splits))
    exact = expected(qkv, other, **how)
    for stored, x in zip(store.tensors, other.tensors):
        off = (stored.double() - x.double()).abs()
        # exact, unless a different summation order moved a value across a rounding boundary
        few = 2e-6 * x.double().abs().max().item()
        step = {torch.int8: 1, torch.float16: x.double().abs() * 2 ** -10,
                torch.float32: few}[stored.dtype]
        assert (off <= step).all() and (off > few).float().mean() < 0.02
    # a number that was rounded to its neighbour
    bound = {torch.int8: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}[kv_dtype]
    assert (y - exact)[:3].abs().max() < bound and (y - exact)[:3].abs().median() < 1e-5
    assert y[3].abs().max() == 0  # without keys


@pytest.mark.parametrize('kv_dtype', [torch.float32, torch.int8])
@pytest.mark.parametrize('layout', LAYOUTS)
@torch.no_grad()
def test_what_the_new_key_replaces_does_not_count(device, layout, kv_dtype):
    """Not even NaN, in K, V or their scales."""
    qkv, store, how = made(device, layout, kv_dtype, heads=(2, 1))
    clean = [x.clone() for x in store.tensors]
    for x in store.tensors:
        for row, place in zip(how['new'].rows[:3], how['new'].places[:3]):
            x[row, :, place] = torch.nan if x.is_floating_point() else 127
    found, expected = (stored_attention(qkv, *stored, **how) for stored in (store.tensors, clean))
    assert torch.equal(found, expected) and found.isfinite().all()


@pytest.mark.parametrize('layout', LAYOUTS)
@torch.no_grad()
def test_a_layer_that_reads_writes_nothing(device, layout):
    qkv, store, how = made(device, layout, torch.int8, owns=False)
    before = [x.clone() for x in store.tensors]
    y = stored_attention(qkv, *store.tensors, **how)
    assert (y - expected(qkv, store, **how)).abs().max() < 1e-5
    assert all(torch.equal(x, was) for x, was in zip(store.tensors, before))


@torch.no_grad()
def test_a_row_that_is_not_written_stays_as_it_was(device):
    qkv, store, how = made(device, 'contiguous', torch.float32)
    how['kv_lens'][3] = 5  # it attends to what it has
    before, other = [x.clone() for x in store.tensors], copy.deepcopy(store)
    y = stored_attention(qkv, *store.tensors, **how)
    assert (y - expected(qkv, other, **how)).abs().max() < 1e-5
    for x, was in zip(store.tensors, before):
        changed = (x != was).any(-1).any(1).nonzero().tolist()
        assert changed == [[0, 20], [1, 0], [2, 12]]


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('layout', LAYOUTS)
@torch.no_grad()
def test_half_precision(dtype, layout):
    """Only on a GPU: the interpreter has no bfloat16."""
    device = torch.device('cuda')
    for kv_dtype in (torch.int8, dtype):
        qkv, store, how = made(device, layout, kv_dtype, dtype)
        other = copy.deepcopy(store)
        y = stored_attention(qkv, *store.tensors, **how).double()
        exact = expected(qkv, other, **how)
        assert (y - exact)[:3].abs().max() < 2 ** -5 * exact.abs().max()
        for stored, x in zip(*(dequantized(torch.float64, *s.tensors) for s in (store, other))):
            assert (stored - x).abs().max() < 2 ** -5 * x.abs().max()


@pytest.mark.parametrize('size', [0.0, 1e-9, 1e9, float('inf'), float('nan')])
def test_extreme_values_are_stored_as_quantize_int8_would(device, size):
    qkv = torch.randn(1, 1, 3, D, device=device)
    qkv[..., 2, :] = qkv[..., 2, :].sign() if size else 0.0
    qkv[..., 2, 1] = size
    store = KVStore(1, 1, 1, D, torch.int8, torch.float32, device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    stored_attention(qkv, *store.tensors, kv_lens=zero + 1, new=New(1, rows=zero, places=zero))
    _, v, _, v_scale = store.tensors
    values, scale = quantize_int8(qkv[0, 0, 2].cpu())
    both_nan = scale.isnan().all() and v_scale.isnan().all()
    assert both_nan or torch.equal(v_scale.flatten().cpu(), scale)
    if scale.isfinite().all():
        assert torch.equal(v.flatten().cpu(), values)
