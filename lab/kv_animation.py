"""Animate the KV cache of the demo as SVG: its slots while a text is read and continued, and its
bytes beside those of vanilla GPT-2.

    python -m lab.kv_animation     # writes results/kv/animation.svg
"""
from pathlib import Path

import configurator
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import nice_bytes
from kv.plan import GLOBAL, KVPlan, Slot, plan_kv
from kv.svg import DARK, LIGHT, bar, text

ROOT = Path(__file__).resolve().parents[1]
PROMPT, TOKENS = 24, 72       # tokens of the text that is read at once, and at the end
TOKEN_SECONDS, PAUSE = 0.3, 4
SECONDS = TOKEN_SECONDS * (TOKENS - PROMPT) + PAUSE
CELL, LABELS, WIDTH, LANES = 10, 190, 930, 110  # pixels; LANES: y of the first slot
STYLE = """text {{ font: 12px ui-monospace, monospace; fill: {ink}; white-space: pre }}
.dim {{ fill: {dim} }}
.strong {{ font-weight: 600 }}
.global, .made {{ fill: {blue} }}
.prompt {{ fill: {thin} }}
.vanilla, .free {{ fill: {rule} }}
.newest {{ fill: none; stroke: {ink}; stroke-width: 2 }}
"""


def keyframes(name: str, steps: dict[int, str]) -> str:
    """CSS: from each length on, the element has these properties. Without motion, the last."""
    body = ' '.join(f'{100 * TOKEN_SECONDS * (length - PROMPT) / SECONDS:.3f}% {{ {css} }}'
                    for length, css in steps.items())
    return (f'@keyframes {name} {{ {body} }}\n.{name} {{ animation: {name} {SECONDS}s step-end '
            f'infinite; {list(steps.values())[-1]} }}')


def captions(plan: KVPlan) -> dict[int, str]:
    """Length -> what happens then."""
    rings = [slot for slot in plan.slots if slot.kind != GLOBAL]
    full = max(slot.window for slot in rings)
    shared = next(slot for slot in plan.slots if len(slot.layers) > 1)
    return {PROMPT: f'A text of {PROMPT} tokens was read. Each slot stores its keys and values.',
            PROMPT + 4: f'Layer {shared.layers[-1]} reads what layer {shared.owner} stored.',
            full + 1: f'The rings are full: a new token overwrites the oldest of {full}.',
            full + PROMPT: 'The rings have forgotten the text. The global slot has all of it.'}


def lane(slot: Slot, y: int, styles: list[str]) -> list[str]:
    """The cells of a slot: free, then of the prompt, then of a generated token that replaces it."""
    elements = [cell(index, y, 'free') for index in range(slot.capacity(TOKENS))]
    places = {}
    for length in range(PROMPT, TOKENS + 1):
        held = slot.positions(length, TOKENS)
        kind = 'prompt' if length == PROMPT else f'made t{length}'
        for position in held if length == PROMPT else [length - 1]:
            elements.append(cell(held.index(position), y, kind))
        places[length] = f'transform: translate({CELL * held.index(length - 1)}px, 0)'
    name = f'newest{slot.index}'
    styles.append(keyframes(name, places))
    return elements + [f'<g class="{name}">{cell(0, y, "newest")}</g>']


def cell(index: int, y: int, kind: str) -> str:
    return (f'<rect x="{LABELS + CELL * index}" y="{y}" width="{CELL - 2}" height="{CELL + 4}" '
            f'class="{kind}"/>')


def during(words: dict[int, str], x: int, y: int, name: str, styles: list[str]) -> list[str]:
    """Each text from its length on, until the next one."""
    found, lengths = [], list(words)
    for k, (length, line) in enumerate(words.items()):
        steps = {PROMPT: f'opacity: {int(k == 0)}', length: 'opacity: 1'}
        if k + 1 < len(lengths):
            steps[lengths[k + 1]] = 'opacity: 0'
        styles.append(keyframes(f'{name}{k}', steps))
        found.append(text(x, y, line, f'strong {name}{k}'))
    return found


def animation(plan: KVPlan, kv_dtype: str = 'float32') -> str:
    """The SVG of one sequence, with a light and a dark scheme."""
    lengths = range(PROMPT, TOKENS + 1)
    sides = {'this model': plan, 'vanilla GPT-2': plan.vanilla()}
    most = plan.vanilla().nbytes(1, TOKENS, kv_dtype)
    styles = [keyframes(f't{n}', {PROMPT: 'opacity: 0', n: 'opacity: 1'}) for n in lengths[1:]]
    elements = []
    for k, (name, side) in enumerate(sides.items()):
        nbytes, y = {n: side.nbytes(1, n, kv_dtype) for n in lengths}, 24 + 24 * k
        steps = {n: f'transform: scaleX({each / most:.4f})' for n, each in nbytes.items()}
        styles.append(keyframes(f'bar{k}', steps))
        elements += [text(8, y + 4, name), f'<g transform="translate({LABELS}, 0)"><g '
                     f'class="bar{k}">{bar(0, y, 600, ("global", "vanilla")[k], 14)}</g></g>']
        elements += during({n: nice_bytes(nbytes[n]) for n in lengths[::4]}, LABELS + 612, y + 4,
                           f'bytes{k}', styles)
    elements += during(captions(plan), LABELS, 84, 'caption', styles)
    for k, slot in enumerate(plan.slots):
        y, layers = LANES + 24 * k, ', '.join(map(str, slot.layers))
        kind = 'all tokens' if slot.kind == GLOBAL else f'last {slot.window}'
        elements += [text(8, y + 11, f'layers {layers}: {kind}', 'dim'), *lane(slot, y, styles)]
    height = LANES + 24 * len(plan.slots) + 24
    elements.append(text(8, height - 8, 'A cell holds K and V of one token: grey of the text, blue '
                         'of what the model wrote. The frame marks the newest token.', 'dim'))
    dark = f'@media (prefers-color-scheme: dark) {{\n{STYLE.format(**DARK)}}}'
    still = '@media (prefers-reduced-motion: reduce) { * { animation: none !important } }'
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<title>KV cache in {kv_dtype} while {TOKENS - PROMPT} tokens are generated</title>',
        f'<style>\n{STYLE.format(**LIGHT)}{dark}', *styles, f'{still}\n</style>', *elements,
        '</svg>\n'])


def main():
    s = configurator.parse('kv', [str(ROOT / 'config/train_mqa_local.py')], echo=False)
    plan = plan_kv(GPTConfig(**{key.name: getattr(s, key.name) for key in MODEL}))
    file = ROOT / 'results/kv/animation.svg'
    file.write_text(animation(plan), encoding='utf-8')
    print(f'wrote {file}')


if __name__ == '__main__':
    main()
