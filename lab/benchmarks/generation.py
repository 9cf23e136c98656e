"""--mode=decode --against=hf|nanogpt: whole generations from a prompt, ours and theirs from the same vanilla weights.

Before anything is timed the logits of the two must agree, and after it the tokens.
"""
from pathlib import Path

import torch

from config.errors import UserError
from engine.linear import speed_up_few_rows
from lab.benchmarks import clock
from lab.benchmarks.engines import HF_CACHES, HuggingFace, NanoGPT, Ours, check_vanilla, hugging_face, nanogpt
from lab.benchmarks.report import show
from lab.benchmarks.setting import check_length, facts, model_config, numbers, random_tokens
from model import GPT
from training.device import pick_device, pick_dtype

ENGINES = ('hf', 'nanogpt')
TOLERANCE = 1e-4  # of logits, in float32: how far rounding alone may take the two apart
CHECKED = 64      # tokens of the sequence on which logits are compared


def run(s, data_root: Path) -> dict:
    """All cells, printed as tables; returns what --json prints."""
    check_settings(s)
    check_plain(s)
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    config = model_config(s, data_root)
    if s.against == 'hf':
        config.bias = True  # GPT-2 has them, and transformers' cannot be made without
    check_vanilla(config, s.against)
    check_length(config, contexts, s.steps)
    torch.manual_seed(s.seed)
    ours, theirs, gap = both(config, s)
    document = facts(s, {'ours': ours}) | {'steps': s.steps, 'max_logit_difference': gap}
    if s.against == 'hf':
        from transformers import __version__
        document |= {'transformers': __version__, 'activation_function': theirs.config.activation_function}
    document['cells'] = [measure(ours, sides_of(ours, theirs, prompt, s), prompt, s)
                         for prompt in prompts(ours, contexts, batches)]
    show(document)
    return document


def check_settings(s) -> None:
    """What no other program can be compared under."""
    if s.steps < 2:
        raise UserError(f'steps={s.steps}: against={s.against!r} needs 2 or more, the first token is the prompt\'s')
    if s.budget:
        raise UserError(f"budget={s.budget!r}: counts for nothing against={s.against!r}")
    if s.nanogpt and s.against != 'nanogpt':
        raise UserError(f"nanogpt={s.nanogpt!r} is a checkout to compare with: it needs against='nanogpt'")


def check_plain(s) -> None:
    """Raises UserError where ours would store less than theirs, or be compiled."""
    if s.kv_dtype != 'auto':
        raise UserError(f"kv_dtype={s.kv_dtype!r}: against={s.against!r} both store K and V in the compute dtype, 'auto'")
    if s.weight_dtype != 'auto' or (s.compile and 'compile' in s.given):
        raise UserError(f"weight_dtype={s.weight_dtype!r}, compile={s.compile}: against={s.against!r} both sides have plain "
                        'weights, and nothing is compiled')


def both(config, s):
    """Our model and theirs with its weights, in the settings' dtype, and by how much their float32 logits differ.

    Raises:
        UserError: by more than TOLERANCE.
    """
    ours = with_biases(config)
    speed_up_few_rows(ours)
    theirs = hugging_face(ours) if s.against == 'hf' else nanogpt(ours, s.nanogpt)
    idx = random_tokens(ours, 1, min(CHECKED, config.block_size))
    with torch.inference_mode():
        out = theirs(idx).logits if s.against == 'hf' else theirs(idx, idx)[0]  # with targets nanoGPT gives all logits
        gap = float((out - ours(idx, all_logits=True)[0]).abs().max())
    check_gap(gap, TOLERANCE, s.against)
    device = pick_device(s.device)
    dtype = pick_dtype(s.dtype, device)
    return ours.to(device, dtype), theirs.to(device, dtype), gap


def with_biases(config) -> GPT:
    """A model of random weights in float32 whose biases are no zeros: with those a missing one would not show."""
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith('bias'):
                p.normal_(std=0.02)
    return model


def check_gap(gap: float, tolerance: float, against: str) -> None:
    """Raises UserError where logits differ by more than rounding."""
    if not gap <= tolerance:
        raise UserError(f'against={against!r}: the same weights give logits that differ by {gap:.1e} '
                        f'(up to {tolerance:.0e} would be rounding)')


def prompts(model, contexts, batches):
    """Random ones (B, T), of each length in each batch size, one after the other."""
    for context in contexts:
        for batch in batches:
            yield random_tokens(model, batch, context)


def sides_of(ours, theirs, prompt, s) -> dict:
    """Name -> what generates, for `measure`."""
    sides = {'ours': Ours(ours, prompt, s.steps, s.captured)}
    if s.against == 'hf':
        sides |= {name: HuggingFace(theirs, prompt, s.steps, cache) for name, cache in HF_CACHES.items()}
    else:
        sides['nanogpt'] = NanoGPT(theirs, prompt, s.steps)
    return sides


def measure(ours, sides: dict, prompt, s, tolerances: dict | None = None) -> dict:
    """One cell: figures of each side, ratios of ours over each other, and whether the tokens are the same.

    sides: name -> what generates; 'ours' is `ours`. tolerances: name -> `same_tokens`' tolerance for the sides with the
    same weights; without it TOLERANCE for all.
    """
    batch, context = prompt.shape
    found = clock.alternate(sides, s.repeats, f'prompts of {context}, batch {batch}')
    figures = {name: {'batch': batch, 'ttft_ms': clock.summary(1000 * one.ttft for one in runs),
                      'tpot_ms': clock.summary(1000 * one.tpot for one in runs),
                      'tokens_per_second': clock.summary(batch / one.tpot for one in runs)} for name, runs in found.items()}
    for name, side in sides.items():
        if hasattr(side, 'kv_bytes'):
            figures[name]['kv_bytes'] = side.kv_bytes
    others = [name for name in sides if name != 'ours']
    tolerances = dict.fromkeys(others, TOLERANCE) if tolerances is None else tolerances
    for name, tolerance in tolerances.items():
        last = found[name][-1].tokens
        figures[name] |= same_tokens(ours, prompt, found['ours'][-1].tokens, last, name, tolerance)
    return {'context': context, 'sides': figures,
            'fastest': min(tolerances, key=lambda name: figures[name]['tpot_ms']['median']),
            'ratios': {'tokens_per_second': compared(found, others, 'tpot'), 'ttft': compared(found, others, 'ttft')}}


def compared(found, others, field: str) -> dict:
    """How many times faster ours is than each of the others, round by round."""
    ours = [getattr(one, field) for one in found['ours']]
    return {name: clock.paired([getattr(one, field) for one in found[name]], ours) for name in others}


@torch.inference_mode()
def same_tokens(model, prompt, ours, theirs, name: str, tolerance: float | None = TOLERANCE) -> dict:
    """How many rows of tokens (B, steps) are equal. Where two first differ, the top two logits must lie within `tolerance`:
    then rounding decides which is taken. With None, and in bfloat16, float16 and int8, where it is coarser, rows are only
    counted.

    Raises:
        UserError: they differ where they should not.
    """
    unequal = [row for row in range(len(ours)) if not torch.equal(ours[row], theirs[row])]
    checked = tolerance is not None and model.dtype in (torch.float32, torch.float64)
    for row in unequal if checked else []:
        j = int((ours[row] != theirs[row]).nonzero()[0])
        logits = model(torch.cat([prompt[row], ours[row, :j]])[None])[0][0, -1]
        first, second = logits.topk(2).values.tolist()
        if first - second > tolerance:
            raise UserError(f'ours and {name} differ in token {j} of row {row}, where the likeliest token leads by '
                            f'{first - second:.1e}: this is more than rounding')
    return {'rows_equal': len(ours) - len(unequal), 'rows': len(ours)}
