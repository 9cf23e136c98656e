"""Does the small cache cost loss? The demo config against vanilla GPT-2 and RoPE MHA: same size, data, steps, three seeds.

    python scripts/compare.py                                # all nine runs; finished ones are not repeated
    python scripts/compare.py --runs train_vanilla --seeds 2
    python scripts/compare.py --table                           # only remake the table from the JSON files

Each run is `python train.py config/NAME.py --seed=SEED`, then the mean loss over the whole validation split in windows
that do not overlap. Writes results/compare/NAME-seedSEED.json and results/compare/README.md.
"""
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import parse, run_program
from data.datasets import DATA_ROOT
from data.tokenfiles import open_tokens
from model import GPT
from scripts.runs import run_all
from training.checkpoint import config_of, load_checkpoint, load_weights
from training.log import read_metrics

RESULTS = ROOT / 'results' / 'compare'
# run -> what it changes in the config that its name begins with
RUNS = {
    'train_vanilla': [],
    'train_rope_mha': [],
    'train_mqa_local': [],
    # by name only: settings that were weighed for the three above
    'train_mqa_local-GLLLLL': ['--layer_pattern=GLLLLL', '--kv_share=ABBCCC'],
    'train_mqa_local-untied': ['--share_global_kv=False'],
    'train_mqa_local-W32': ['--window_size=32'],
    'train_mqa_local-W128': ['--window_size=128'],
    'train_vanilla-lr2e-3': ['--learning_rate=2e-3', '--min_lr=2e-4'],
}
SEEDS = [1, 2, 3]
STEPS = ['--max_iters=700', '--lr_decay_iters=700', '--warmup_iters=70', '--eval_interval=350']  # longer than the demo
MAIN = ('train_vanilla', 'train_rope_mha', 'train_mqa_local')
SAME = ('dataset', 'B', 'T', 'steps', 'dtype', 'val_tokens')  # what all runs of one table have in common


@torch.inference_mode()
def whole_split_loss(model, tokens, block_size, batch_size=16) -> float:
    """Mean loss in nats per token over a whole split, in windows that do not overlap (a last partial one left out)."""
    starts, total = range(0, len(tokens) - block_size, block_size), 0.0
    for first in range(0, len(starts), batch_size):
        some = starts[first:first + batch_size]
        rows = torch.stack([torch.from_numpy(tokens[i:i + block_size + 1].astype('int64')) for i in some])
        total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(some)
    return total / len(starts)


def run(name: str, seed: int) -> dict:
    """Train one config with one seed and measure it."""
    out_dir = RESULTS / 'runs' / f'{name}-seed{seed}'
    config = ROOT / 'config' / f"{name.split('-')[0]}.py"
    settings = [str(config), *STEPS, *RUNS[name], f'--seed={seed}', f'--out_dir={out_dir}']
    command = [sys.executable, str(ROOT / 'train.py'), *settings, '--device=cpu']
    if (out_dir / 'ckpt.pt').is_file():
        command.append('--init_from=resume')
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise UserError(f'training {name} with seed {seed} failed; its output is above')
    s = parse('train', settings, echo=False)
    path = out_dir / 'ckpt.pt'
    checkpoint = load_checkpoint(path)
    if checkpoint['iter_num'] != s.max_iters:
        raise UserError(f"{path} stands at iteration {checkpoint['iter_num']} of {s.max_iters}: run this again to go on")
    model = GPT(config_of(checkpoint, path)).eval()
    stale = [key for key in vars(s) if checkpoint['config'][key] != getattr(s, key) and key not in ('init_from', 'device')]
    if stale:
        raise UserError(f'{path} was trained with another {stale[0]}: delete {out_dir} to train it anew')
    load_weights(model, checkpoint, path)
    tokens = {split: open_tokens(DATA_ROOT / s.dataset / f'{split}.bin') for split in ('train', 'val')}
    rows, plan, T = read_metrics(out_dir / 'metrics.jsonl'), model.plan, s.block_size
    return {'config': name, 'seed': seed, 'val_loss': whole_split_loss(model, tokens['val'], T),
            'val_tokens': len(tokens['val']), 'dataset': s.dataset, 'params': model.get_num_params(),
            'params_all': model.get_num_params(non_embedding=False), 'B': s.batch_size, 'T': T, 'W': s.window_size,
            'steps': s.max_iters, 'tokens': s.max_iters * s.batch_size * T, 'learning_rate': s.learning_rate,
            'dtype': 'float32', 'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})',
            'threads': torch.get_num_threads(), 'torch': torch.__version__,
            'kv_bytes_bf16': plan.nbytes(1, T, 'bfloat16'),
            'kv_ratio': plan.vanilla().nbytes(1, T, 'bfloat16') / plan.nbytes(1, T, 'bfloat16'),
            'loss_curve': [[row['iter'], row['loss']] for row in rows]}


def table(runs: list[dict]) -> str:
    """The Markdown page made from the runs."""
    first = runs[0]
    for r in runs:
        for key in SAME:
            if r[key] != first[key]:
                raise UserError(f"{r['config']} seed {r['seed']} has {key}={r[key]}, {first['config']} seed {first['seed']} "
                                f'{first[key]}: these do not belong into one table')
    lines = ['# Small cache against full memory, trained alike', '',
             f"{first['dataset']}, characters, {first['steps']} steps of B={first['B']} x T={first['T']} "
             f"({first['tokens']:,} tokens), {first['dtype']}, {first['hardware']}, torch {first['torch']}. "
             f"Validation loss in nats per character over the whole split ({first['val_tokens']:,} tokens, windows of T that "
             'do not overlap). Made by `python scripts/compare.py`.', '',
             '| run | parameters | learning rate | W | KV bytes at T (bf16) | smaller | val loss by seed | mean | sd |',
             '|---|---|---|---|---|---|---|---|---|']
    for name in RUNS:
        some = sorted((r for r in runs if r['config'] == name), key=lambda r: r['seed'])
        if some:
            losses, one = [r['val_loss'] for r in some], some[0]
            sd = f'{statistics.stdev(losses):.4f}' if len(losses) > 1 else '-'
            lines.append(f"| {name} | {one['params']:,} | {one['learning_rate']:g} | {one['W'] or '-'} | "
                         f"{one['kv_bytes_bf16']:,} | {one['kv_ratio']:.0f}x | {', '.join(f'{x:.4f}' for x in losses)} | "
                         f'{statistics.mean(losses):.4f} | {sd} |')
    return '\n'.join(lines) + '\n'


def main(argv=None):
    run_all(globals(), 'runs', MAIN, argv)


if __name__ == '__main__':
    run_program(main)
