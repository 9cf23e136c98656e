"""Can a vanilla checkpoint be finetuned into RoPE, and into a longer context? nanoGPT's CPU recipe, then 1,000 further steps.

    python lab/scripts/rope_finetune.py            # about 10 minutes on 2 CPU cores; finished runs are not repeated
    python lab/scripts/rope_finetune.py --table    # only remake the table from the JSON files

Writes results/rope_finetune/NAME-seedSEED.json and results/rope_finetune/README.md.
"""
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import run_program
from data.datasets import ensure_dataset
from data.tokenfiles import open_tokens
from lab.scripts.nanogpt_parity import RECIPE
from lab.scripts.runs import run_all, whole_split_loss
from model import GPT
from training.checkpoint import config_of, load_checkpoint, load_weights
from training.log import read_metrics

RESULTS = ROOT / 'results' / 'rope_finetune'
LONGER = ['--max_iters=3000', '--lr_decay_iters=3000']
# run -> the run it goes on from, and its settings
RUNS = {
    'vanilla': ('', []),
    'vanilla-more': ('vanilla', LONGER),
    'into-rope': ('vanilla', [*LONGER, '--pos_embedding=rope']),
    'into-rope-T128': ('vanilla', [*LONGER, '--pos_embedding=rope', '--block_size=128', '--batch_size=6']),
    'rope': ('', [*LONGER, '--pos_embedding=rope']),
    'rope-T128': ('', [*LONGER, '--pos_embedding=rope', '--block_size=128', '--batch_size=6']),
}
SEEDS = [1]


def run(name: str, seed: int) -> dict:
    """Train one run, after the one that it goes on from."""
    origin, flags = RUNS[name]
    out_dir = folder(name, seed)
    if origin:
        if not (folder(origin, seed) / 'ckpt.pt').is_file():
            run(origin, seed)
        shutil.rmtree(out_dir, ignore_errors=True)
        shutil.copytree(folder(origin, seed), out_dir)
        flags = [*flags, '--init_from=resume']
    command = [sys.executable, str(ROOT / 'train.py'), *RECIPE, '--always_save_checkpoint=True', *flags, f'--seed={seed}',
               f'--out_dir={out_dir}', '--log_interval=50']
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise UserError(f'training {name!r} failed; its output is above')
    checkpoint = load_checkpoint(out_dir / 'ckpt.pt')
    model = GPT(config_of(checkpoint, out_dir / 'ckpt.pt')).eval()
    load_weights(model, checkpoint, out_dir / 'ckpt.pt')
    tokens = open_tokens(ensure_dataset('shakespeare_char') / 'val.bin')
    T = model.config.block_size
    return {'run': name, 'seed': seed, 'from': origin, 'T': T, 'B': checkpoint['config']['batch_size'],
            'val_loss': whole_split_loss(model, tokens, T), 'steps': checkpoint['iter_num'],
            'evaluations': [[row['iter'], row['val_loss']] for row in read_metrics(out_dir / 'metrics.jsonl')
                            if 'val_loss' in row],
            'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})', 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'dtype': 'float32'}


def folder(name: str, seed: int) -> Path:
    return RESULTS / 'runs' / f'{name}-seed{seed}'


def table(rows: list[dict]) -> str:
    """The Markdown page made from the runs."""
    one = rows[0]
    lines = ['# A vanilla checkpoint finetuned into RoPE', '',
             f"shakespeare_char, nanoGPT's CPU recipe (4 layers, 4 heads, width 128, 768 tokens a step), {one['dtype']}, "
             f"{one['hardware']}, torch {one['torch']}. Validation loss in nats per character over the whole split. "
             'The first evaluation is on 20 sampled batches. Made by `python lab/scripts/rope_finetune.py`.', '',
             '| run | goes on from | seed | steps in all | B | T | first evaluation after the change | validation loss |',
             '|---|---|---|---|---|---|---|---|']
    for name in RUNS:
        for r in (r for r in rows if r['run'] == name):
            first = f"{dict(map(tuple, r['evaluations']))[2000]:.4f}" if r['from'] else '-'
            lines.append(f"| {name} | {r['from'] or '-'} | {r['seed']} | {r['steps']:,} | {r['B']} | {r['T']} | {first} | "
                         f"{r['val_loss']:.4f} |")
    return '\n'.join(lines) + '\n'


def main(argv=None):
    run_all(globals(), 'runs', RUNS, argv)


if __name__ == '__main__':
    run_program(main)
