"""--mode=decode against another program: complete generations from a prompt, same vanilla weights.

The float32 logits must agree before anything is timed, and the tokens of float32 formats after it
if our model computes in float32 too; for other formats, equal rows are only counted.
"""
import contextlib
import tempfile
from pathlib import Path

import torch

from config.errors import UserError
from engine.weights.quantized import QuantizedLinear
from lab.benchmarks import clock, engines, setting
from lab.benchmarks.llama import LlamaCpp
from model import GPT
from training.device import pick_device

PEERS = {'hf': engines.HuggingFace, 'nanogpt': engines.NanoGPT, 'llama.cpp': LlamaCpp}
TOLERANCE = 1e-4  # for float32 logits: a larger difference is not due to rounding
CHECKED = 64      # length of the sequence whose logits are compared


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    check_settings(s)
    shapes, config = setting.begin(s, data_root)
    if s.against != 'nanogpt':
        config.bias = True  # OpenAI's GPT-2 always has biases
    if s.against == 'llama.cpp':
        config.gelu = 'tanh'  # OpenAI's GPT-2's
    engines.check_vanilla(config, s.against)
    with contextlib.ExitStack() as stack:
        folder = (s.nanogpt if s.against == 'nanogpt' else
                  stack.enter_context(tempfile.TemporaryDirectory()))
        ours = with_biases(config)
        try:
            peer = PEERS[s.against](ours, folder, stack)
        except ImportError as e:
            raise UserError(f'against={s.against!r} needs the package {e.name}: '
                            f'{PEERS[s.against].install}') from e
        gap = logit_gap(ours, peer)
        if not gap <= peer.tolerance:
            raise UserError(f'against={s.against!r}: the same weights give logits that differ by '
                            f'{gap:.1e} (up to {peer.tolerance:.0e} would be rounding)')
        ours = setting.prepared(ours, s)
        cells = [measure(ours, peer, setting.random_tokens(ours, batch, context), s)
                 for context, batch in shapes]
        return setting.facts(s, {'ours': ours}) | peer.facts() | {
            'steps': s.steps, 'max_logit_difference': gap, 'tolerance': peer.tolerance,
            'cells': cells}


def check_settings(s) -> None:
    """Raise UserError if the two cannot be compared with these settings."""
    cpu = s.against == 'llama.cpp'
    wrong = {'steps': s.steps < 2, 'budget': s.budget, 'compile': setting.compiles(s),
             'kv_dtype': not cpu and s.kv_dtype != 'auto',
             'weight_dtype': not cpu and s.weight_dtype != 'auto',
             'device': cpu and pick_device(s.device).type != 'cpu'}
    for name in filter(wrong.get, wrong):
        raise UserError(f'{name}={getattr(s, name)!r} cannot be compared with against='
                        f'{s.against!r}')


def with_biases(config) -> GPT:
    """A float32 model with random weights and biases, so that a lost bias changes the logits."""
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.normal_(std=0.02)
    return model


@torch.inference_mode()
def logit_gap(ours: GPT, peer) -> float:
    """The largest difference in float32 logits on a random text."""
    idx = setting.random_tokens(ours, 1, min(CHECKED, ours.config.block_size))
    return float((peer.logits(idx) - ours(idx, all_logits=True)[0]).abs().max())


def measure(ours, peer, prompt, s) -> dict:
    """One cell, for a prompt (B, T): metrics of each side, ratios of ours to each, and whether the
    tokens are equal."""
    batch, context = prompt.shape
    with contextlib.ExitStack() as stack:
        theirs = peer.sides(prompt, s.steps, stack)
        sides = {'ours': engines.Ours(ours, prompt, s.steps, s.captured, s.kv_dtype)} | theirs
        results = clock.alternate(sides, s.repeats, f'prompts of {context}, batch {batch}')
    ttft = {name: [made.ttft for made in runs] for name, runs in results.items()}
    tpot = {name: [made.tpot for made in runs] for name, runs in results.items()}
    own_float32 = s.weight_dtype == 'auto' and s.kv_dtype in ('auto', 'float32')
    found = {}
    for name, side in sides.items():
        found[name] = {'batch': batch, 'ttft_ms': clock.summary(1000 * x for x in ttft[name]),
                       **clock.metrics(tpot[name], 'tpot_ms', batch)}
        if hasattr(side, 'kv_bytes'):
            found[name]['kv_bytes'] = side.kv_bytes
        if name in theirs:
            tokens = results['ours'][-1].tokens, results[name][-1].tokens
            tolerance = peer.tolerance if own_float32 and name in peer.exact else None
            found[name] |= same_tokens(ours, prompt, *tokens, name, tolerance)
    return {'context': context, 'sides': found,
            'ratios': {'tokens_per_second': clock.ratios(tpot), 'ttft': clock.ratios(ttft)}}


def noise(model, idx) -> float:
    """With quantized weights: three times the largest difference between logits after idx (1, T) in
    one piece and in chunks; otherwise 0. Activations are rounded to int8, and a difference in the
    last bit of one can move others to the next value."""
    if not any(isinstance(m, QuantizedLinear) for m in model.modules()):
        return 0.0
    whole, found = model(idx)[0][0, -1], []
    for size in (16, 64):
        cache = model.new_cache(1, idx.size(1))
        for piece in idx.split(size, dim=1):
            logits = model(piece, cache=cache)[0][0, -1]
        found.append((logits - whole).abs().max().item())
    return 3 * max(found)


@torch.inference_mode()
def same_tokens(model, prompt, ours, theirs, name: str,
                tolerance: float | None = TOLERANCE) -> dict:
    """Count the equal rows of tokens (B, steps). Where two rows first differ, the top two logits
    must be within `tolerance`, so that rounding may decide between them, or within `noise` of
    quantized weights. With None, and in bfloat16 and float16, where rounding is coarser, rows are
    only counted.

    Raises:
        UserError: if rows differ by more than rounding.
    """
    unequal = [row for row in range(len(ours)) if not torch.equal(ours[row], theirs[row])]
    checked = tolerance is not None and model.dtype in (torch.float32, torch.float64)
    for row in unequal if checked else []:
        j = int((ours[row] != theirs[row]).nonzero()[0])
        text = torch.cat([prompt[row], ours[row, :j]])[None]
        first, second = model(text)[0][0, -1].topk(2).values.tolist()
        if first - second > max(tolerance, noise(model, text)):
            raise UserError(f'ours and {name} differ in token {j} of row {row}, where the '
                            f'likeliest token leads by {first - second:.1e}: more than rounding')
    return {'rows_equal': len(ours) - len(unequal), 'rows': len(ours)}
