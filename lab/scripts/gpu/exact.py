"""GPU checks against float64 or plain torch: the kernels, and attention in training.

Each function returns the 'error' and the 'allowed' error, both relative to a row's largest value.
"""
import copy
import math
from functools import partial

import torch
import torch.nn.functional as F

import configurator
from attention.cached import dequantized
from attention.causal import causal_attention
from attention.kernels.flex import flex_local_attention
from attention.local import blockwise_local_attention
from attention.rope import RotaryTable, norm_and_rotate
from engine import native
from engine.weights.quantized import Int8Linear, quantize_rows
from engine.steps.static import put
from kv.slots import KVStore
from lab.benchmarks.kernels import fill_random
from lab.scripts.gpu.cells import FULL
from model import LayerNorm

TINY = ['--n_layer=7', '--n_embd=96', '--head_dim=16', '--n_head=6', '--mlp_hidden=0',
        '--window_size=16', '--block_size=64']
# dtype of the queries -> largest error, relative to a row's largest value
ALLOWED = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
in_float64 = partial(dequantized, torch.float64)


class Machine:
    """The device, and sizes that suit it."""

    def __init__(self, device: str):
        self.device, self.real = torch.device(device), device != 'cpu'
        # the interpreter multiplies bfloat16 wrongly
        self.dtype = torch.bfloat16 if self.real else torch.float32

    def settings(self, *args: str):
        """Settings of bench.py for the full stack."""
        given = [FULL, *args, *([] if self.real else TINY), f'--device={self.device}',
                 f"--dtype={'bfloat16' if self.real else 'float32'}", '--real_data=False']
        return configurator.parse('bench', given, echo=False)


def judged(found, exact, allowed: float) -> dict:
    """The largest error of any row (first dimension), relative to the row's largest exact value.
    Each row has its own scale because means over many keys are small: next to means over few keys,
    their errors would be invisible. If an exact row is zero, the result must be zero."""
    off, size = (x.double().flatten(1).abs().amax(1) for x in (found.double() - exact, exact))
    error = (off / size.clamp(min=1e-30)).max().item()
    return {'error': error if math.isfinite(error) else 1e30, 'allowed': allowed}


def worst(checks: list[dict]) -> dict:
    return max(checks, key=lambda check: check['error'] / check['allowed'])


def random_store(machine, rows, capacity, kv_dtype) -> KVStore:
    kind = getattr(torch, kv_dtype)
    store = KVStore(rows, 1, capacity, 64, kind, machine.dtype, machine.device)
    fill_random(store)
    return store


def attention(machine, layout: str, kv_dtype: str) -> dict:
    """Rows of many lengths, one of them empty; the kernel chooses the number of splits."""
    from attention.kernels.decode import stored_attention
    B, H, D, page = 8, 12, 64, 64
    S, W = (8192, 256) if machine.real else (128, 16)
    t = 5 if 'chunk' in layout else 1
    generator = torch.Generator().manual_seed(0)
    lengths = [S, 0, t, S - 1, *torch.randint(t, S, (B - 4,), generator=generator)]
    kv_lens = torch.tensor(lengths).to(machine.device)
    dtype = torch.float16 if kv_dtype == 'float16' else machine.dtype
    q = torch.randn(B, t, H, D, device=machine.device, dtype=dtype).transpose(1, 2)
    how, window = {}, 0
    if 'paged' in layout:
        n_pages = B * S // page
        store = random_store(machine, n_pages + 3, page, kv_dtype)
        table = torch.randperm(n_pages + 3, generator=generator)[:n_pages]
        table = table.view(B, -1).to(machine.device)
        k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in in_float64(*store.tensors))
        how['table'] = table.int()
    else:
        store = random_store(machine, B, W if layout == 'ring' else S, kv_dtype)
        k, v = in_float64(*store.tensors)
    if layout == 'ring':
        kv_lens, window = kv_lens.clamp(max=W), W
    y = stored_attention(q, *store.tensors, kv_lens=kv_lens, window=window, **how)
    last = kv_lens[:, None] - t + torch.arange(t, device=machine.device)   # (B, t)
    seen = torch.arange(k.size(2), device=machine.device) <= last[..., None]
    scores = q.double() @ k.transpose(2, 3) * D ** -0.5
    exact = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0) @ v
    return judged(y, exact, ALLOWED[dtype])


def write(machine, kv_dtype: str) -> dict:
    """QK-norm, RoPE, int8 rounding and the write of a step's K and V, against plain torch. 'none':
    a layer without its own K and V."""
    from attention.kernels.qkv import write_qkv
    B, H, D, S = 64 if machine.real else 3, 12, 64, 256
    owns = kv_dtype != 'none'
    qkv = torch.randn(B, 1, H + 2 * owns, D, device=machine.device, dtype=machine.dtype)
    norms = [torch.nn.RMSNorm(D, 1e-6, device=machine.device, dtype=machine.dtype) for _ in 'qk']
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    rows = torch.arange(B, device=machine.device)
    rope = RotaryTable(D, 10000.0).at(rows[:, None] * 37, 37 * B, machine.dtype)
    with torch.inference_mode():
        q_rows = norm_and_rotate(qkv.transpose(1, 2)[:, :H], norms[0], rope)
        if not owns:
            return judged(write_qkv(qkv, H, norms[0], None, rope), q_rows, 1e-2)
        store, plain = (random_store(machine, B, S, kv_dtype) for _ in 'ab')
        for a, b in zip(store.tensors, plain.tensors):
            b.copy_(a)
        places = rows * 5 % S
        q = write_qkv(qkv, H, *norms, rope, store.tensors, rows, places)
        k, v = qkv.transpose(1, 2)[:, H:].chunk(2, dim=1)
        put(plain, rows, places, plain.encode(norm_and_rotate(k, norms[1], rope), v))
    pairs = zip(in_float64(*store.tensors), in_float64(*plain.tensors))
    stored = [judged(a, b, 2e-2) for a, b in pairs]
    return worst([judged(q, q_rows, 1e-2), *stored])


def linear_cases(machine, rows: int, int8: bool = False) -> dict[str, tuple]:
    """The arguments of `fused_linear` in a layer that owns its K and V, with random weights."""
    C, heads, hidden = (768, 768, 3840) if machine.real else (48, 48, 80)
    how = dict(device=machine.device, dtype=machine.dtype)

    def case(n_in, n_out, norm, activation, adds):
        weights = torch.nn.Linear(n_in, n_out, bias=False, **how)
        if int8:
            native.use(False)  # on a CPU, weights would be packed for the extension
            weights = Int8Linear(weights)
            native.use(True)
        return (torch.randn(rows, n_in, **how), weights, LayerNorm(n_in, False).to(**how) if norm
                else None, activation, torch.randn(rows, n_out, **how) if adds else None)
    return {'qkv': case(C, heads + heads // 6, True, '', False),
            'out': case(heads, C, False, '', True), 'up': case(C, hidden, True, 'tanh', False),
            'down': case(hidden, C, False, '', True)}


def plain_linear(x, linear, norm=None, activation='', residual=None) -> torch.Tensor:
    """`fused_linear` in torch."""
    y = linear(x if norm is None else norm(x))
    y = F.gelu(y, approximate='tanh') if activation else y
    return y if residual is None else residual + y


@torch.inference_mode()
def linear(machine, rows: int, int8: bool = False) -> dict:
    """The Linear layers of a decode step, with LayerNorm, GELU and residuals, against float64, or
    with int8 weights against torch."""
    from engine.steps.fused_linear import fused_linear
    checks = []
    for case in linear_cases(machine, rows, int8).values():
        exact = case if int8 else (copy.deepcopy(x).double() if hasattr(x, 'double') else x
                                   for x in case)
        checks.append(judged(fused_linear(*case), plain_linear(*exact), ALLOWED[machine.dtype]))
    return worst(checks)


@torch.inference_mode()
def vocabulary(machine, size: int) -> dict:
    """An int8 output layer whose number of tokens is no multiple of 8, against exact sums."""
    C = 768 if machine.real else 48
    head = torch.nn.Linear(C, size, bias=False, device=machine.device, dtype=machine.dtype)
    x = torch.randn(3, C, device=machine.device, dtype=machine.dtype)
    native.use(False)  # on a CPU, weights would be packed for the extension
    found = Int8Linear(head)(x)
    native.use(True)
    (values, scale), (weights, weight_scale) = quantize_rows(x), quantize_rows(head.weight)
    sums = values.double() @ weights.double().T
    return judged(found, sums * scale * weight_scale.T, ALLOWED[machine.dtype])


def sequence(machine, backend: str, T: int, ratio: int) -> dict:
    """Local attention in training, forward and backward, against the definition in float64."""
    W = 256 if T > 256 else 17
    T, D = (T, 64) if machine.real else (40, 16)
    exact = [torch.randn(2, heads, T, D, device=machine.device, dtype=torch.float64,
                         requires_grad=True) for heads in (ratio, 1, 1)]
    leaves = [x.detach().to(machine.dtype).requires_grad_() for x in exact]
    grad = torch.randn(2, ratio, T, D, device=machine.device, dtype=torch.float64)
    attend = partial(blockwise_local_attention, window=W) if backend == 'sdpa' else (
        partial(flex_local_attention, window=W, compiled=machine.real))
    expected = causal_attention(*exact, W, backend='math')
    expected.backward(grad)
    if not machine.real and backend == 'flex':  # FlexAttention has no backward on a CPU
        return judged(attend(*(x.detach() for x in leaves)), expected, ALLOWED[torch.float32])
    y = attend(*leaves)
    y.backward(grad.to(machine.dtype))
    grads = [judged(x.grad, e.grad, 3e-2) for x, e in zip(leaves, exact)]
    return worst([judged(y, expected, 2e-2), *grads])
