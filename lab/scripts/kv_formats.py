"""What rounding K and V costs: storage formats that the cache has or might have, and how a model's loss changes with them.

Formats other than the cache's are tried in the forward pass of a model with kv_quant_train='int8', which rounds K and V
where a cache would store them: `rounded` puts another rounding in the place of that one.

    symmetric    x ~ q * scale          q in -7..7 (int4), -127..127 (int8)
    asymmetric   x ~ q * scale + zero   q in 0..15,         zero = the smallest element
"""
import contextlib
import math
from dataclasses import dataclass

import torch

import model as model_module

TENSOR = -1  # a group size: one scale for the whole tensor
SCALES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16}


@dataclass(frozen=True)
class Format:
    """How a head vector of K or V is stored. The default is `kv.int8.quantize_int8`."""
    bits: int = 8
    group: int = 0       # elements that share a scale: 0 = all of a head vector, TENSOR = all there are
    scale: str = 'fp16'  # dtype of the scale, and of the zero point
    asymmetric: bool = False
    late: bool = False   # the scale is rounded to its dtype only after the values were divided by it

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., D) as it would be read back, in its own dtype."""
        if self.group == TENSOR:
            return self._round(x.reshape(1, -1)).view_as(x)
        group = self.group or x.size(-1)
        if x.size(-1) % group:
            raise ValueError(f'groups of {group} do not divide head vectors of {x.size(-1)}')
        return self._round(x.unflatten(-1, (-1, group))).flatten(-2)

    def _round(self, x):
        """x (..., G), a scale for each last dimension."""
        wide, dtype = x.float(), SCALES[self.scale]
        if self.asymmetric:
            low, levels = wide.amin(-1, keepdim=True), 2 ** self.bits - 1
            zero, first, span = low.to(dtype).float(), 0, wide.amax(-1, keepdim=True) - low
        else:
            levels = 2 ** (self.bits - 1) - 1
            zero, first, span = 0.0, -levels, wide.abs().amax(-1, keepdim=True)
        exact = (span / levels).clamp(2 ** -24, 65504)
        stored = exact.to(dtype).float()
        q = ((wide - zero) / (exact if self.late else stored)).round().clamp(first, levels)
        return (q * stored + zero).to(x.dtype)

    def nbytes(self, head_dim: int) -> float:
        """Bytes of one head vector, scales included (one for a whole tensor counts as nothing)."""
        groups = 0 if self.group == TENSOR else head_dim // (self.group or head_dim)
        return head_dim * self.bits / 8 + groups * SCALES[self.scale].itemsize * (1 + self.asymmetric)


def bytes_per_position(k: Format, v: Format, n_kv_head: int, head_dim: int) -> float:
    """Of one KV slot; for int8 with fp16 scales this is 2 * n_kv_head * (head_dim + 2)."""
    return n_kv_head * (k.nbytes(head_dim) + v.nbytes(head_dim))


def scale_formats() -> dict[str, tuple[Format, Format]]:
    """name -> the formats of K and V: int8 with other scales. 'int8' is the cache's."""
    rows = {'int8': Format(), 'int8, fp32 scales': Format(scale='fp32'), 'int8, bf16 scales': Format(scale='bf16'),
            'int8, fp16 scales rounded late': Format(late=True),
            'int8, bf16 scales rounded late': Format(scale='bf16', late=True),
            'int8, one fp32 scale a tensor': Format(scale='fp32', group=TENSOR)}
    return {name: (f, f) for name, f in rows.items()}


def int4_formats(head_dim: int, halves: bool = True) -> dict[str, tuple[Format, Format]]:
    """name -> the formats of K and V: int4 in groups; with `halves`, groups of 16 also for only one of the two, the other one
    in int8."""
    rows = {}
    for group in (g for g in (8, 16, 32, 64) if head_dim / 4 <= g <= head_dim):
        for asymmetric in (False, True):
            f = Format(bits=4, group=group, asymmetric=asymmetric)
            name = f"int4 {'asymmetric' if asymmetric else 'symmetric'}, groups of {group}"
            rows[name] = (f, f)
            if halves and group == 16:
                rows |= {f'{name}, K only': (f, Format()), f'{name}, V only': (Format(), f)}
    return rows


class Errors:
    """Root mean square of what rounding changed, and of what it changed it in."""

    def __init__(self):
        self.squares = {'k': [0.0, 0.0], 'v': [0.0, 0.0]}

    def add(self, name, x, y):
        self.squares[name][0] += (y - x).double().square().sum().item()
        self.squares[name][1] += x.double().square().sum().item()

    def relative(self, name: str) -> float:
        error, size = self.squares[name]
        return math.sqrt(error / size)


@contextlib.contextmanager
def rounded(k: Format, v: Format):
    """Within, models with kv_quant_train='int8' round K as `k` says and V as `v` says. Yields the Errors so far."""
    errors, original = Errors(), model_module.fake_quantize_int8
    calls = 0

    def round_next(x):  # owners of a cache round their K, then their V
        nonlocal calls
        name, form = (('k', k), ('v', v))[calls % 2]
        calls += 1
        y = form.round(x)
        errors.add(name, x, y)
        return y
    model_module.fake_quantize_int8 = round_next
    try:
        yield errors
    finally:
        model_module.fake_quantize_int8 = original
    if calls == 0 or calls % 2:
        raise RuntimeError(f'the model rounded {calls} tensors, where it was to round K and V in turn')


# -- what a model says of windows of text ---------------------------------------------------------------------------------

def paired(losses: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Mean of the differences by window, and its standard error: windows differ far more than formats do."""
    difference = losses - reference
    return difference.mean().item(), (difference.std() / math.sqrt(len(difference))).item()


@torch.inference_mode()
def greedy(model, prompts: torch.Tensor, n: int, kv_dtype: str, chunk: int = 0) -> torch.Tensor:
    """(B, n): the likeliest tokens after each prompt, itself given in chunks of `chunk` (0: at once)."""
    cache, texts = model.new_cache(len(prompts), prompts.size(1) + n, kv_dtype), []
    for part in prompts.split(chunk or prompts.size(1), dim=1):
        logits, _ = model(part, cache=cache)
    for _ in range(n - 1):
        texts.append(logits.argmax(-1))
        logits, _ = model(texts[-1], cache=cache)
    return torch.cat([*texts, logits.argmax(-1)], dim=1)


def agreement(texts: torch.Tensor, reference: torch.Tensor) -> dict:
    """How alike two sets of texts (B, n) are: tokens equal at each position, texts equal up to it, mean length of the equal
    start."""
    same = texts == reference
    start = same.long().cumprod(1)
    return {'equal': same.double().mean().item(), 'equal_at': same.double().mean(0).tolist(),
            'equal_up_to': start.double().mean(0).tolist(), 'common_prefix': start.sum(1).double().mean().item()}
