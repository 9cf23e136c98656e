"""Times of train.py's iterations on a CPU, optimizer included, in interleaved runs: dtype=auto (C++
kernels, Muon in float32), dtype=float32 (torch's), and another checkout.

    python lab/scripts/train_times.py > results/cpu/train-iterations-PROCESSOR.json
    python lab/scripts/train_times.py --before=../nanokv-f824aed > ...

Needs the demo's data set in each checkout.
"""
import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.benchmarks.setting import processor

ROUNDS, ITERATIONS, BURN_IN = 3, 40, 10
COMMON = ['config/train_mqa_local.py', f'--max_iters={ITERATIONS}', '--eval_interval=1000',
          '--eval_iters=1', '--log_interval=1']
ADAMW = ['--optimizer=adamw', '--learning_rate=1e-3']
SHAPES = {  # name: what differs from the demo's config
    'demo: 8 x 96, T=256, B=8, W=32, Muon': [],
    'ladder: 12 x 128, T=256, B=8, W=32, AdamW': [
        *ADAMW, '--n_layer=12', '--n_embd=128', '--n_head=4', '--mlp_hidden=512',
        '--layer_pattern=LLLLLG', '--kv_share=AABBBC'],
    '8 x 384, T=512, B=4, W=64, AdamW': [
        *ADAMW, '--n_embd=384', '--mlp_hidden=1536', '--block_size=512', '--batch_size=4',
        '--window_size=64']}


def milliseconds(folder: Path, settings: list[str]) -> float:
    """The median time of an iteration of a run in this checkout."""
    with tempfile.TemporaryDirectory() as out_dir:
        command = [sys.executable, 'train.py', *COMMON, *settings, f'--out_dir={out_dir}']
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    times = re.findall(r'iter \d+: loss [\d.]+, time ([\d.]+)ms', done.stdout)
    return statistics.median(map(float, times[BURN_IN:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--before', type=Path, help='another checkout to compare with')
    before = parser.parse_args().before
    sides = {'auto': (ROOT, ['--dtype=auto']), 'float32': (ROOT, ['--dtype=float32'])}
    if before:
        sides['before'] = before, ['--dtype=auto']
    found = {'processor': f'{processor()}, {torch.backends.cpu.get_cpu_capability()}',
             'torch': torch.__version__, 'rounds': ROUNDS, 'unit': 'ms', 'shapes': {}}
    for shape, settings in SHAPES.items():
        times = {side: [] for side in sides}
        for _ in range(ROUNDS):
            for side, (folder, more) in sides.items():
                times[side].append(milliseconds(folder, settings + more))
        ratios = {f'{side} / auto': statistics.median(
            a / b for a, b in zip(times[side], times['auto'])) for side in sides if side != 'auto'}
        found['shapes'][shape] = {'each': times, 'ratios': ratios}
    print(json.dumps(found, indent=1))


if __name__ == '__main__':
    main()
