"""Plot the KV bytes of one sequence by length in GPT-2's shape, from the plan's arithmetic.

    python -m lab.kv_picture       # writes results/kv/kv_bytes.png
"""
from pathlib import Path

from config.gpt_config import GPTConfig
from config.sizes import nice_bytes
from configurator import run_program
from kv.plan import plan_kv
from training.plotting import COLOURS, context_axes, label_line_ends, save, subplots

CONTEXTS = [2 ** k for k in range(8, 16)]
PICTURE = Path(__file__).resolve().parents[1] / 'results' / 'kv' / 'kv_bytes.png'
# each row adds to the one above: model settings, and the storage of K and V
STEPS = {
    'vanilla GPT-2': ({}, 'bfloat16'),
    '+ MQA': (dict(n_kv_head=1), 'bfloat16'),
    '+ windows': (dict(layer_pattern='LLLLLG', window_size=256), 'bfloat16'),
    '+ shared KV': (dict(kv_share='AABBBC'), 'bfloat16'),
    '+ global KV tied': (dict(share_global_kv=True), 'bfloat16'),
    '+ int8 KV': ({}, 'int8'),
}


def kv_bytes() -> dict[str, list[int]]:
    """Return row -> bytes of one sequence at each of CONTEXTS."""
    settings = dict(n_layer=12, n_head=12, n_embd=768, block_size=CONTEXTS[-1])
    found = {}
    for name, (changes, dtype) in STEPS.items():
        settings |= changes
        plan = plan_kv(GPTConfig(**settings))
        found[name] = [plan.nbytes(1, n, dtype) for n in CONTEXTS]
    return found


def main(path: Path = PICTURE):
    rows = kv_bytes()
    vanilla = max(each[-1] for each in rows.values())
    with subplots(figsize=(8, 4.6)) as (figure, axis):
        for colour, (name, each) in zip(COLOURS, rows.items()):
            label = name if each[-1] == vanilla else f'{name}: {vanilla / each[-1]:.0f}x smaller'
            axis.plot(CONTEXTS, each, color=colour, label=label, marker='o', markersize=4)
        context_axes(axis, CONTEXTS)
        axis.yaxis.set_major_formatter(lambda y, _: nice_bytes(round(y)))
        axis.set_xlabel('context, tokens (GPT-2 shape, bfloat16, W=256; ratios at 32,768)')
        axis.set_ylabel('KV bytes of one sequence')
        label_line_ends(axis, gap=0.06, fontsize=10)
        save(figure, path, dpi=150)
    print(f'wrote {path}')


if __name__ == '__main__':
    run_program(main)
