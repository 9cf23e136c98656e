"""Kill a training run repeatedly and compare it with an uninterrupted run.

    python lab/scripts/soak.py                 # 20 kills: results/cpu/soak.json; a few minutes
    python lab/scripts/soak.py --kills=100 --seed=2 --save=soak.json

A small run is trained twice by train.py: once to the end, and once killed `--kills` times and
resumed from its last checkpoint each time, half of the times while a checkpoint is being written.
Exit status 1 if a loss, learning rate or gradient norm in metrics.jsonl, a final weight or the set
of checkpoints differs, or if a kill lost more than the iterations since the last checkpoint.
"""
import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

import train
from config.errors import UserError
from configurator import run_program
from data.making.writer import write_dataset
from lab.benchmarks.setting import processor
from training.checkpoint import load_checkpoint
from training.checkpoint_manager import peek
from training.log import read_metrics

RESULT = ROOT / 'results' / 'cpu' / 'soak.json'
VOCAB = 64
SETTINGS = dict(  # a checkpoint of 21 MB, so that writing it takes a while
    dataset='soak', device='cpu', compile=False, n_layer=4, n_head=4, n_embd=192, block_size=32,
    batch_size=2, dropout=0.1, gradient_accumulation_steps=2, max_iters=400, lr_decay_iters=400,
    warmup_iters=20, learning_rate=1e-3, min_lr=1e-4, eval_interval=50, eval_iters=4,
    checkpoint_interval=10, keep_checkpoints=3)
SPAN = 2.0      # seconds: the longest time from the first iteration to a kill,
STARTING = 4.0  # or from the start of the process
COMPARED = ('iter', 'loss', 'lr', 'grad_norm', 'train_loss', 'val_loss')  # the rest are timings


def make_data(root: Path) -> None:
    """Create data/ with one data set: a cycle of ids with noise."""
    rng = np.random.default_rng(1)
    splits = {}
    for split, n in (('train', 50_000), ('val', 5_000)):
        cycle, noise = np.arange(n) % VOCAB, rng.integers(VOCAB, size=n)
        splits[split] = np.where(rng.random(n) < 0.2, noise, cycle)
    itos = {i: chr(48 + i) for i in range(VOCAB)}
    meta = {'vocab_size': VOCAB, 'stoi': {c: i for i, c in itos.items()}, 'itos': itos}
    write_dataset(root / 'soak', splits, meta)


class Child(subprocess.Popen):
    """train.py as a process on the synthetic data, writing to `out_dir`."""

    def __init__(self, folder: Path, out_dir: Path):
        self.out_dir, self.log = out_dir, folder / 'log.txt'
        self.stale = self.temporary()  # of a process that was killed
        found = peek(out_dir / 'ckpt.pt')
        self.start = found[1] if found else 0
        settings = SETTINGS | dict(out_dir=out_dir, init_from='resume' if found else 'scratch')
        flags = [f'--{name}={value}' for name, value in settings.items()]
        command = [sys.executable, __file__, '--child', str(folder / 'data'), *flags]
        with open(self.log, 'w') as log:
            super().__init__(command, stdout=log, stderr=subprocess.STDOUT)

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)

    def ended(self) -> bool:
        """Whether training has finished. UserError: if it ended with an error."""
        status = self.poll()
        if status:
            last = self.log.read_text().strip().rpartition('\n')[2]
            raise UserError(f'training ended with status {status}: {last}')
        return status == 0

    def reached(self) -> int:
        """Iterations completed since the start of the run."""
        done = re.findall(r'^iter (\d+):', self.log.read_text(), re.M)
        return int(done[-1]) + 1 if done else self.start

    def writing(self) -> bool:
        """Whether it is writing a checkpoint, or was when it died."""
        return not self.temporary() <= self.stale

    def temporary(self) -> set[Path]:
        return set(self.out_dir.glob('.ckpt.pt.*.tmp'))


def train_to_end(folder: Path, out_dir: Path, show) -> None:
    with Child(folder, out_dir) as child:
        while not child.ended():
            show(child.reached())
            time.sleep(0.2)


def train_and_kill(folder: Path, out_dir: Path, when: str, delay: float, limit: int,
                   show) -> dict | None:
    """Train, and kill `delay` seconds after the first iteration, or `limit` iterations after it.

    when: 'training': kill immediately then; 'writing': while the next checkpoint is being written;
        'starting': the delay starts with the process.
    Returns a record of the kill, or None if training ended before it.
    """
    with Child(folder, out_dir) as child:
        reached = looked = 0
        since = time.monotonic() if when == 'starting' else None
        while not child.ended():
            now = time.monotonic()
            due = since is not None and (now >= since + delay or reached >= child.start + limit)
            if due and (when != 'writing' or child.writing()):
                break
            if now >= looked + 0.05:  # not more often, because it reads a file
                reached, looked = child.reached(), now
                if since is None and reached > child.start:
                    since = now
                show(reached)
            time.sleep(0.0005)
        else:
            return None
        child.kill()
        child.wait()
        found = peek(out_dir / 'ckpt.pt')
        return {'when': when, 'iteration': child.reached(), 'inside': child.writing(),
                'resumed': found[1] if found else 0}


def soak(folder: Path, out_dir: Path, kills: int, seed: int, console, show) -> list[dict]:
    """Train with kills, then to the end. Returns a record of each kill."""
    rng, met = random.Random(seed), []
    cycle = ['writing', 'training', 'writing', 'training', 'writing', 'starting']
    moments = (cycle * kills)[:kills]
    rng.shuffle(moments)
    for i, when in enumerate(moments):
        start = met[-1]['resumed'] if met else 0
        limit = (SETTINGS['max_iters'] - start) // (kills - i + 1)  # leave some for later kills
        delay = rng.uniform(0, STARTING if when == 'starting' else SPAN)
        found = train_and_kill(folder, out_dir, when, delay, limit, show)
        if found is None:
            break
        met.append(found)
        where = 'inside checkpoint writing' if found['inside'] else f'while {when}'
        console.print(f"kill {i + 1} of {kills}: iteration {found['iteration']}, {where}; "
                      f"resumes from {found['resumed']}")
    train_to_end(folder, out_dir, show)
    return met


def compare(one: Path, other: Path) -> dict:
    """Compare rows, weights, moments and files of two runs."""
    rows, files, tensors = [], [], []
    for folder in (one, other):
        rows.append([{k: v for k, v in row.items() if k in COMPARED}
                     for row in read_metrics(folder / 'metrics.jsonl')])
        # a run killed before its first checkpoint leaves a metrics_old.jsonl
        files.append({path.name: (peek(path) or ('', None))[1] for path in folder.iterdir()
                      if path.suffix != '.jsonl'})
        checkpoint = load_checkpoint(folder / 'ckpt.pt')
        states = checkpoint['optimizer']['state'].values()
        tensors.append([*checkpoint['model'].values(), *(m for s in states for m in s.values())])
    differ = sum(a != b for a, b in zip(*rows)) + abs(len(rows[0]) - len(rows[1]))
    same = all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
    return {'rows': len(rows[0]), 'compared': sorted(set().union(*rows[0])),
            'rows_that_differ': differ, 'checkpoints': files[0],
            'same_checkpoints': files[0] == files[1], 'same_weights': same}


def result(args, met: list[dict], comparison: dict, n_bytes: int, seconds: float) -> dict:
    lost = [kill['iteration'] - kill['resumed'] for kill in met]
    command = f'python lab/scripts/soak.py --kills={args.kills} --seed={args.seed}'
    if args.save != RESULT:
        command += f' --save={args.save}'
    return {'kills': len(met), 'kills_inside_checkpoint_writing': sum(k['inside'] for k in met),
            'iterations_lost': sum(lost), 'most_lost_by_one_kill': max(lost, default=0),
            'iterations_between_checkpoints': SETTINGS['checkpoint_interval'],
            'checkpoint_bytes': n_bytes, **comparison, 'seconds': round(seconds, 1),
            'hardware': processor(), 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'seed': args.seed, 'settings': SETTINGS, 'each': met,
            'command': command}


def passed(found: dict, kills: int) -> bool:
    """Whether all kills happened and none changed the result."""
    return (found['kills'] == kills and found['rows_that_differ'] == 0
            and found['same_weights'] and found['same_checkpoints']
            and found['most_lost_by_one_kill'] <= found['iterations_between_checkpoints'])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20, help='default: 20')
    parser.add_argument('--seed', type=int, default=1, help='of the moments of the kills (1)')
    parser.add_argument('--save', type=Path, default=RESULT, help='default: results/cpu/soak.json')
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f'--kills={args.kills}: must be at least 1')
    args.save.parent.mkdir(parents=True, exist_ok=True)
    console, start = Console(), time.monotonic()
    progress = Progress(console=console, disable=not console.is_terminal)
    with tempfile.TemporaryDirectory() as name, progress:
        folder = Path(name)
        alone, killed = folder / 'alone', folder / 'killed'
        make_data(folder / 'data')
        shows = []
        for run in (alone, killed):
            task = progress.add_task(f'iterations, {run.name}', total=SETTINGS['max_iters'] + 1)
            shows.append(lambda n, task=task: progress.update(task, completed=n))
        train_to_end(folder, alone, shows[0])
        met = soak(folder, killed, args.kills, args.seed, console, shows[1])
        n_bytes = (alone / 'ckpt.pt').stat().st_size
        found = result(args, met, compare(alone, killed), n_bytes, time.monotonic() - start)
    args.save.write_text(json.dumps(found, indent=1) + '\n')
    for key, value in found.items():
        if isinstance(value, (int, float)):
            console.print(f"{key.replace('_', ' ')}: {value:,}")
    return 0 if passed(found, args.kills) else 1


if __name__ == '__main__':
    if sys.argv[1:2] == ['--child']:  # train.py with a different data folder
        train.DATA_ROOT = Path(sys.argv[2])
        raise SystemExit(run_program(lambda: train.main(sys.argv[3:])))
    run_program(lambda: sys.exit(main(sys.argv[1:])))
