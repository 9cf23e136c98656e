"""Whether a fast decode step computes what model.py computes, which people change."""
import copy
import functools
import sys

import torch

from attention.backends import triton_enabled
from engine.weights.quantized import QuantizedLinear
from kv.plan import LOCAL

N_STEPS = 3             # that are compared
NBYTES = 2 ** 27        # of K and V in a comparison; then rows are compared apart, or a nearer one


@functools.cache  # an engine or a sample may be made many times
def note_once(text: str) -> None:
    print(f'Note: {text}, slower', file=sys.stderr)


@torch.inference_mode()
def difference(model, cache, make_decode) -> str:
    """What is wrong with steps of a fast decode, compared with `model`'s forward in plain torch:
    '' if they give its logits, otherwise that they give others, or the error that ended them.

    Compared are rows of different lengths: empty, before and after every ring wraps, and one at the
    end of the context (nearer where that takes more than `NBYTES`). The K and V that they hold are
    random; some rows sit out a step. The difference (root mean square; the largest may be 5 times
    that) may be 1e-3 of the standard deviation of the logits, or 0.1 where weights or K and V are
    rounded.

    Args:
        cache: the one that will be used. It is not touched.
        make_decode: cache -> a step (n, 1) ids, lens -> (n, V) logits.
    """
    exact = (model.dtype == torch.float32 and cache.kv_dtype == 'float32'
             and not isinstance(model.lm_head, QuantizedLinear))
    share = 1e-3 if exact else 0.1
    windows = {slot.window for slot in model.plan.slots if slot.kind == LOCAL}
    # a ring wraps after a token, and again
    lengths = {0, 9, *(times * (window - 1) for window in windows for times in (1, 2))}

    def nbytes(n_rows, length):
        return model.plan.nbytes(n_rows, length + N_STEPS, cache.kv_dtype)

    longest = max(0, cache.max_seq_len - N_STEPS)
    near, far = sorted({min(length, longest) for length in lengths}), longest
    while nbytes(1, far) > NBYTES and far > near[-1]:
        far //= 2
    groups = [near, [far]]
    if nbytes(len(near), near[-1]) > NBYTES:
        groups = [near[:2], *([length] for length in near[2:]), [far]]
    try:
        equal = all(_agree(model, cache, rows, make_decode, share) for rows in groups)
        return '' if equal else 'give other logits than model.py'
    except (AttributeError, KeyError, RuntimeError, TypeError) as e:  # model.py has other parts
        return f'fail with {type(e).__name__}: {e}'.partition('\n')[0]


def _agree(model, cache, lengths, make_decode, share) -> bool:
    n_steps = min(N_STEPS, cache.max_seq_len)
    plain = model.new_cache(len(lengths), max(lengths) + n_steps, cache.kv_dtype)
    devices, generator = [], torch.default_generator
    if model.device.type == 'cuda':
        devices, generator = [model.device], torch.cuda.default_generators[model.device.index]
    with torch.random.fork_rng(devices):  # sampling must not depend on this
        generator.manual_seed(0)
        for row, length in enumerate(lengths):
            plain.fill_(length, [row])
    decode = make_decode(copy.deepcopy(plain))
    # logits are rounded to the model's dtype: in bfloat16, 100 to a multiple of 0.5
    rounding = max(1e-4, torch.finfo(model.dtype).eps)
    for step in range(n_steps):
        lens = [int(step == 0 or (row + step) % 3 > 0) for row in range(len(lengths))]
        rows = [row for row, n in enumerate(lens) if n]
        ids = torch.arange(len(lengths), device=model.device)[:, None] * 7 + step
        ids = ids % model.config.vocab_size
        with triton_enabled(False):
            expected = model(ids, cache=plain, lens=lens)[0][rows, -1].double()
        gap = (decode(ids, lens)[rows].double() - expected).abs()
        allowed = share * expected.std(-1, correction=0) + rounding * expected.abs().amax(-1)
        close = (gap.square().mean(-1).sqrt() <= allowed) & (gap.amax(-1) <= 5 * allowed)
        finite = expected.isfinite().all(-1)  # what else a step gives there does not matter
        if not close[finite].all():
            return False
    return True
