"""--mode=kernels: decode attention, by itself and with the new key and its write, on CUDA.

They are timed with Triton's benchmark and a cold L2 cache; calls of microseconds are timed in CUDA
graphs. The speeds are compared with a device-to-device copy in the same run. Decode attention is
first compared with float64. batch_sizes, contexts: rows and keys of decode attention.
"""
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from attention.backends import triton_usable
from attention.cached import dequantized
from attention.rope import RotaryTable, norm_and_rotate
from common.errors import UserError
from engine.steps.static import put
from kv.slots import KVStore
from lab.benchmarks import clock, setting
from lab.benchmarks.bandwidth import Bandwidth
from training.device import pick_device, pick_dtype

WRITTEN = 64           # keys of a row whose new key is computed in the same kernel
CHECKED_ROWS = 2       # of a batch, compared with float64
CALLS = 20             # minimum per graph: the events around it take 2 to 4 microseconds
ROTATED_BYTES = 2 ** 27  # all copies together: over twice the L2 cache of an H100 (50 MB)
REPLAYED_MS = 300      # long enough for several measurements even if 20 calls take 50 ms


def milliseconds_a_call(calls, device) -> dict:
    """Median, min and max for short calls. `calls` do the same work, each on its own buffers; they
    are captured in turn in one CUDA graph, and its time is divided by their number. This excludes
    the launch time and nearly all of the time of the events around the graph."""
    if device.type != 'cuda':  # interpreted kernels, only to try out the mode
        return clock.summary([1000 * clock.seconds(device, calls[0])])
    from triton.testing import do_bench
    turns = [calls[i % len(calls)] for i in range(max(CALLS, len(calls)))]
    for call in turns:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in turns:
            call()
    found = clock.summary(do_bench(graph.replay, rep=REPLAYED_MS, return_mode='all'))
    return {name: found[name] / len(turns) for name in ('median', 'min', 'max')}


def n_copies(nbytes: int) -> int:
    """Return how many buffers of `nbytes` the calls use in turn so that none is in the L2 cache:
    others fill the cache before a buffer is reused, or each buffer is used only once in a graph."""
    return min(CALLS, max(2, -(-ROTATED_BYTES // nbytes)))


def run(s, data_root: Path) -> dict:
    """Print all tables. Returns the document that --json prints."""
    device = pick_device(s.device)
    if not triton_usable(device):
        raise UserError("mode='kernels' times the Triton kernels: it needs CUDA and the triton "
                        f'package (device={s.device!r})')
    contexts = setting.numbers('contexts', s.contexts)
    batches = setting.numbers('batch_sizes', s.batch_sizes)
    dtype = pick_dtype(s.dtype, device)
    head_dim, n_kv_head = s.head_dim or s.n_embd // s.n_head, s.n_kv_head or s.n_head
    torch.manual_seed(s.seed)
    import triton
    copy_rate = Bandwidth(device)()
    document = setting.run_facts(s, device) | {
        'triton': triton.__version__, 'dtype': str(dtype).removeprefix('torch.'), 'models': {},
        'heads': [s.n_head, n_kv_head, head_dim],
        'rates': {'copy_bytes_per_second': copy_rate}}
    shape = s.n_head, n_kv_head, head_dim, dtype, device
    document['decode'] = [decode_cell(shape, batch, context, copy_rate)
                          for context in contexts for batch in batches]
    document['new key'] = [new_key_cell(shape, batch) for batch in batches]
    return document


# -- decode: one token per row over stored keys ----------------------------------------------------

def decode_cell(shape, batch: int, context: int, copy_rate: float) -> dict:
    """Each way to attend over `context` keys of `batch` rows: time, bytes per second, error."""
    from attention.kernels.decode import stored_attention
    H, n_kv_head, D, dtype, device = shape
    q = torch.randn(batch, 1, H, D, device=device, dtype=dtype).transpose(1, 2)
    stores = {name: random_stores(batch, n_kv_head, context, D, kind, dtype, device)
              for name, kind in (('int8', torch.int8), ('plain', dtype))}

    def kernel(store):
        return stored_attention(q, *store.tensors)

    def whole_heads(attend, q=q):
        return lambda store: attend(q, *store.tensors[:2], enable_gqa=q.size(1) != n_kv_head)

    folded = q.reshape(batch, n_kv_head, -1, D)
    sides = {'kernel, int8': kernel, 'kernel': kernel,
             'SDPA': whole_heads(F.scaled_dot_product_attention),
             'SDPA, heads folded': whole_heads(F.scaled_dot_product_attention, folded)}
    if device.type == 'cuda':
        from torch.nn.attention.flex_attention import flex_attention
        sides['FlexAttention'] = whole_heads(torch.compile(flex_attention, dynamic=False))
    return {'context': context, 'batch': batch, 'sides': {
        name: attempt(attend, q, stores['int8' if 'int8' in name else 'plain'], copy_rate)
        for name, attend in sides.items()}}


def fill_random(store: KVStore) -> None:
    """Fill a store with normal random K and V, row by row so that no second copy is needed."""
    rows, *shape = store.tensors[0].shape
    for row in range(rows):
        k, v = torch.randn(2, 1, *shape, dtype=store.compute_dtype, device=store.device)
        store.write(slice(row, row + 1), 0, store.encode(k, v))


def random_stores(rows, n_kv_head, context, head_dim, kind, dtype, device) -> list[KVStore]:
    """Return stores of random numbers, as many as the calls use in turn."""
    stores = []
    while not stores or len(stores) < n_copies(stores[0].nbytes):
        stores.append(KVStore(rows, n_kv_head, context, head_dim, kind, dtype, device))
        fill_random(stores[-1])
    return stores


def attempt(attend, q, stores, copy_rate: float) -> dict:
    """Time and error of one way to attend over a store, or the reason why it failed."""
    store = stores[0]
    try:
        with torch.inference_mode():
            error = decode_error(attend(store), q, store)
            ms = milliseconds_a_call([partial(attend, each) for each in stores], q.device)
    except Exception as e:  # one way that fails must not end the run
        return {'failed': f'{type(e).__name__}: {str(e)[:200]}'.partition('\n')[0]}
    rate = store.nbytes / ms['median'] * 1000
    return {'ms': ms, 'bytes': store.nbytes, 'bytes_per_second': rate,
            'share': rate / copy_rate, 'error': error}


def decode_error(y, q, store) -> float:
    """Largest difference from float64 attention to the same values, relative to the largest."""
    n = CHECKED_ROWS
    k, v = dequantized(torch.float64, *(x[:n] for x in store.tensors))
    rows = q[:n].double().reshape(k.size(0), k.size(1), -1, q.size(-1))
    exact = (rows @ k.transpose(2, 3) * q.size(-1) ** -0.5).softmax(-1) @ v
    exact = exact.reshape(q[:n].shape)
    return ((y[:n].reshape_as(exact).double() - exact).abs().max() / exact.abs().max()).item()


# -- the new key: QK-norm, RoPE, int8, the write, and attention to WRITTEN keys --------------------

def new_key_cell(shape, batch: int) -> dict:
    """One layer of a decode step from its projected q, k, v on: the kernel that does all of it, and
    plain torch before the kernel of attention."""
    from attention.kernels.decode import New, stored_attention
    H, n_kv_head, D, dtype, device = shape
    q_norm = torch.nn.RMSNorm(D, eps=1e-6, device=device, dtype=dtype)
    norms = q_norm, torch.nn.RMSNorm(D, eps=1e-6, device=device, dtype=dtype)
    rows = torch.arange(batch, device=device)
    places, lens = rows % WRITTEN, torch.full_like(rows, WRITTEN)
    rope = RotaryTable(D, 10000.0).at(rows[:, None], max(256, batch), dtype)

    def kernel(qkv, store):
        return stored_attention(qkv, *store.tensors, kv_lens=lens,
                                new=New(H, *norms, rope, rows, places, ring=True))

    def plain(qkv, store):
        q, k, v = qkv.transpose(1, 2).split([H, n_kv_head, n_kv_head], dim=1)
        put(store, rows, places, store.encode(norm_and_rotate(k, norms[1], rope), v))
        return stored_attention(norm_and_rotate(q, norms[0], rope), *store.tensors, kv_lens=lens)
    # from the bytes of qkv: only one position per row of a store is written
    n = n_copies(batch * (H + 2 * n_kv_head) * D * dtype.itemsize)
    copies = [(torch.randn(batch, 1, H + 2 * n_kv_head, D, device=device, dtype=dtype),
               KVStore(batch, n_kv_head, WRITTEN, D, torch.int8, dtype, device)) for _ in range(n)]
    with torch.inference_mode():
        return {'batch': batch, 'sides': {
            name: {'ms': milliseconds_a_call([partial(write, *each) for each in copies], device)}
            for name, write in (('kernel', kernel), ('plain torch', plain))}}
