"""--mode=decode --against=hf|nanogpt: whole generations from a prompt, with equal vanilla weights.

Before anything is timed the logits of both must agree, and after it the tokens.
"""
from pathlib import Path

import torch

from config.errors import UserError
from engine.linear import speed_up_few_rows
from lab.benchmarks import clock
from lab.benchmarks.engines import (
    HF_CACHES,
    HuggingFace,
    NanoGPT,
    Ours,
    check_vanilla,
    hugging_face,
    nanogpt,
)
from lab.benchmarks.setting import (
    check_length,
    check_nanogpt_unused,
    compiles,
    contexts_and_batches,
    facts,
    model_config,
    random_tokens,
)
from model import GPT
from training.device import pick_device, pick_dtype

ENGINES = ('hf', 'nanogpt')
TOLERANCE = 1e-4  # of float32 logits: a larger difference is more than rounding
CHECKED = 64      # tokens of the sequence on which logits are compared


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    check_settings(s)
    check_plain(s)
    shapes, config = contexts_and_batches(s), model_config(s, data_root)
    if s.against == 'hf':
        config.bias = True  # transformers' GPT-2 always has biases
    check_vanilla(config, s.against)
    check_length(config, [max(shapes)[0]], s.steps)
    torch.manual_seed(s.seed)
    ours, theirs, gap = both(config, s)
    document = facts(s, {'ours': ours}) | {'steps': s.steps, 'max_logit_difference': gap}
    if s.against == 'hf':
        from transformers import __version__
        document |= {'transformers': __version__,
                     'activation_function': theirs.config.activation_function}
    cells = []
    for context, batch in shapes:
        prompt = random_tokens(ours, batch, context)
        sides = {'ours': Ours(ours, prompt, s.steps, s.captured)}
        if s.against == 'hf':
            sides |= {name: HuggingFace(theirs, prompt, s.steps, cache)
                      for name, cache in HF_CACHES.items()}
        else:
            sides['nanogpt'] = NanoGPT(theirs, prompt, s.steps)
        tolerances = {name: TOLERANCE for name in sides if name != 'ours'}
        cells.append(measure(ours, sides, prompt, s, tolerances))
    return document | {'cells': cells}


def check_settings(s) -> None:
    """Raises UserError for settings that no other program can be compared under."""
    if s.steps < 2:
        raise UserError(f'steps={s.steps}: against={s.against!r} needs 2 or more, the first token '
                        'is the prompt\'s')
    if s.budget:
        raise UserError(f'budget={s.budget!r}: has no effect with against={s.against!r}')
    check_nanogpt_unused(s)


def check_plain(s) -> None:
    """Raises UserError where our model would store less than theirs, or be compiled."""
    if s.kv_dtype != 'auto':
        raise UserError(f'kv_dtype={s.kv_dtype!r}: against={s.against!r} both store K and V in the '
                        "compute dtype, 'auto'")
    if s.weight_dtype != 'auto' or compiles(s):
        raise UserError(f'weight_dtype={s.weight_dtype!r}, compile={s.compile}: against='
                        f'{s.against!r} both have plain weights, and nothing is compiled')


def both(config, s):
    """Our model, theirs with the same weights, and the largest difference of float32 logits.

    Raises:
        UserError: they differ by more than TOLERANCE.
    """
    ours = with_biases(config)
    speed_up_few_rows(ours)
    theirs = hugging_face(ours) if s.against == 'hf' else nanogpt(ours, s.nanogpt)
    idx = random_tokens(ours, 1, min(CHECKED, config.block_size))
    with torch.inference_mode():
        if s.against == 'hf':
            logits = theirs(idx).logits
        else:
            logits = theirs(idx, idx)[0]  # nanoGPT gives all logits only with targets
        gap = float((logits - ours(idx, all_logits=True)[0]).abs().max())
    check_gap(gap, TOLERANCE, s.against)
    device = pick_device(s.device)
    dtype = pick_dtype(s.dtype, device)
    return ours.to(device, dtype), theirs.to(device, dtype), gap


def with_biases(config) -> GPT:
    """A float32 model with random weights, random biases too: a lost one shows in the logits."""
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.normal_(std=0.02)
    return model


def check_gap(gap: float, tolerance: float, against: str) -> None:
    """Raises UserError where logits differ by more than rounding."""
    if not gap <= tolerance:
        raise UserError(f'against={against!r}: the same weights give logits that differ by '
                        f'{gap:.1e} (up to {tolerance:.0e} would be rounding)')


def measure(ours, sides: dict, prompt, s, tolerances: dict) -> dict:
    """One cell: metrics of each side, ratios of ours to each, and whether the tokens are equal.

    sides: name -> callable that gives a `Generated`; 'ours' is `ours`.
    tolerances: name -> `same_tokens`' tolerance, for the sides with the weights of `ours`.
    """
    batch, context = prompt.shape
    results = clock.alternate(sides, s.repeats, f'prompts of {context}, batch {batch}')
    ttft = {name: [made.ttft for made in runs] for name, runs in results.items()}
    tpot = {name: [made.tpot for made in runs] for name, runs in results.items()}
    found = {name: {'batch': batch, 'ttft_ms': clock.summary(1000 * x for x in ttft[name]),
                    **clock.metrics(tpot[name], 'tpot_ms', batch)} for name in sides}
    for name, side in sides.items():
        if hasattr(side, 'kv_bytes'):
            found[name]['kv_bytes'] = side.kv_bytes
    for name, tolerance in tolerances.items():
        tokens = results['ours'][-1].tokens, results[name][-1].tokens
        found[name] |= same_tokens(ours, prompt, *tokens, name, tolerance)
    fastest = min(tolerances, key=lambda name: found[name]['tpot_ms']['median'])
    return {'context': context, 'sides': found, 'fastest': fastest,
            'ratios': {'tokens_per_second': clock.ratios(tpot), 'ttft': clock.ratios(ttft)}}


@torch.inference_mode()
def same_tokens(model, prompt, ours, theirs, name: str,
                tolerance: float | None = TOLERANCE) -> dict:
    """The number of equal rows of tokens (B, steps). Where two rows first differ, the top two
    logits must be within `tolerance`: then rounding decides between them. With None, and in
    bfloat16, float16 and int8, where rounding is coarser, rows are only counted.

    Raises:
        UserError: rows differ where the logits do not allow it.
    """
    unequal = [row for row in range(len(ours)) if not torch.equal(ours[row], theirs[row])]
    checked = tolerance is not None and model.dtype in (torch.float32, torch.float64)
    for row in unequal if checked else []:
        j = int((ours[row] != theirs[row]).nonzero()[0])
        logits = model(torch.cat([prompt[row], ours[row, :j]])[None])[0][0, -1]
        first, second = logits.topk(2).values.tolist()
        if first - second > tolerance:
            raise UserError(f'ours and {name} differ in token {j} of row {row}, where the '
                            f'likeliest token leads by {first - second:.1e}: more than rounding')
    return {'rows_equal': len(ours) - len(unequal), 'rows': len(ours)}
