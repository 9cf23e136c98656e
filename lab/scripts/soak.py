"""Training that is killed again and again, at any moment, ends exactly where training that is left alone does.

    python lab/scripts/soak.py                 # 20 kills: results/cpu/soak.json (a few minutes on 2 cores)
    python lab/scripts/soak.py --kills=100 --seed=2 --save=soak.json

One small run (dropout, gradient accumulation; made-up tokens, nothing is fetched) is trained twice by train.py as a process
of its own: once to the end, and once killed with SIGKILL `--kills` times, each time resumed from its last checkpoint. Half
of the kills wait for a checkpoint that is being written; of the others a third come while it starts. Exit status 1 if a
loss, learning rate or gradient norm of metrics.jsonl, a weight at the end or a checkpoint's place differs, or if a kill
lost more than the iterations since the last checkpoint.
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
from rich.table import Table

import configurator
import train
from config.errors import UserError
from data.making.writer import write_dataset
from lab.benchmarks.setting import processor
from training.checkpoint import load_checkpoint
from training.checkpoint_manager import peek
from training.log import read_metrics

RESULT = ROOT / 'results' / 'cpu' / 'soak.json'
VOCAB = 64
SETTINGS = dict(  # a checkpoint of 21 MB, so that writing it takes a while
    dataset='soak', device='cpu', compile=False, n_layer=4, n_head=4, n_embd=192, block_size=32, batch_size=2, dropout=0.1,
    gradient_accumulation_steps=2, max_iters=400, lr_decay_iters=400, warmup_iters=20, learning_rate=1e-3, min_lr=1e-4,
    eval_interval=50, eval_iters=4, checkpoint_interval=10, keep_checkpoints=3)
SPAN = 2.0  # seconds: a kill comes up to so long after the first iteration,
STARTING = 4.0  # or up to so long after the process was started
COMPARED = ('iter', 'loss', 'lr', 'grad_norm', 'train_loss', 'val_loss')  # of the rows; others are the clock's


def make_data(root: Path) -> None:
    """data/ with one data set: a cycle of ids with noise, something to learn and never quite."""
    rng = np.random.default_rng(1)
    noisy = {split: np.where(rng.random(n) < 0.2, rng.integers(VOCAB, size=n), np.arange(n) % VOCAB)
             for split, n in (('train', 50_000), ('val', 5_000))}
    write_dataset(root / 'soak', noisy, {'vocab_size': VOCAB, 'stoi': {chr(48 + i): i for i in range(VOCAB)},
                                         'itos': {i: chr(48 + i) for i in range(VOCAB)}})


class Child:
    """train.py as a process, on the made-up data, writing to `out_dir`."""

    def __init__(self, folder: Path, out_dir: Path):
        self.out_dir, self.log, at = out_dir, folder / 'log.txt', peek(out_dir / 'ckpt.pt')
        self.start = at[1] if at else 0
        settings = SETTINGS | dict(out_dir=out_dir, init_from='resume' if at else 'scratch')
        with open(self.log, 'w') as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, '--child', str(folder / 'data'), *(f'--{k}={v}' for k, v in settings.items())],
                stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def ended(self) -> bool:
        """Whether it has trained to its end.

        Raises:
            UserError: it ended with an error.
        """
        if self.process.poll():
            last = self.log.read_text().strip().splitlines()[-1:]
            raise UserError(f'training ended with status {self.process.returncode}: {"".join(last)}')
        return self.process.returncode == 0

    def reached(self) -> int:
        """Iterations done, from the first of the run."""
        done = re.findall(r'^iter (\d+):', self.log.read_text(), re.M)
        return int(done[-1]) + 1 if done else self.start

    def writing(self) -> bool:
        """Whether a checkpoint is being written, or was when it died."""
        return (self.out_dir / f'.ckpt.pt.{self.process.pid}.tmp').exists()


def trained(folder: Path, out_dir: Path, show) -> None:
    """Train to the end."""
    with Child(folder, out_dir) as child:
        while not child.ended():
            show(child.reached())
            time.sleep(0.2)


def killed(folder: Path, out_dir: Path, when: str, delay: float, limit: int, show) -> dict | None:
    """Train, and kill after `delay` seconds of the first iteration, or `limit` iterations after it.

    when: 'training': just then; 'writing': in the writing of the first checkpoint from then on; 'starting': the delay
    counts from the start of the process.
    Returns what the kill met and cost, or None if training came to its end before.
    """
    with Child(folder, out_dir) as child:
        reached, looked, since = 0, 0.0, time.monotonic() if when == 'starting' else None
        while not child.ended():
            now = time.monotonic()
            due = since is not None and (now >= since + delay or reached >= child.start + limit)
            if due and (when != 'writing' or child.writing()):
                break
            if now >= looked + 0.05:  # rarely: it reads a file
                reached, looked = child.reached(), now
                since = now if since is None and reached > child.start else since
                show(reached)
            time.sleep(0.0005)
        else:
            return None
        child.process.kill()
        child.process.wait()
        at = peek(out_dir / 'ckpt.pt')
        return {'when': when, 'iteration': child.reached(), 'inside': child.writing(), 'resumed': at[1] if at else 0}


def soak(folder: Path, out_dir: Path, kills: int, seed: int, console, show) -> list[dict]:
    """The run that is killed, and then trained to its end."""
    rng, met = random.Random(seed), []
    moments = [('writing', 'training', 'writing', 'training', 'writing', 'starting')[i % 6] for i in range(kills)]
    rng.shuffle(moments)
    for i, when in enumerate(moments):
        begun = met[-1]['resumed'] if met else 0
        limit = (SETTINGS['max_iters'] - begun) // (kills - i + 1)  # so that there is something left to kill
        found = killed(folder, out_dir, when, rng.uniform(0, STARTING if when == 'starting' else SPAN), limit, show)
        if found is None:
            break
        met.append(found)
        where = 'inside checkpoint writing' if found['inside'] else f'while {found["when"]}'
        console.print(f"kill {i + 1} of {kills}: iteration {found['iteration']}, {where}; goes on from {found['resumed']}")
    trained(folder, out_dir, show)
    return met


def compare(one: Path, other: Path) -> dict:
    """Rows, weights and files of two runs."""
    rows = [[{k: v for k, v in row.items() if k in COMPARED} for row in read_metrics(d / 'metrics.jsonl')]
            for d in (one, other)]
    differ = sum(a != b for a, b in zip(*rows)) + abs(len(rows[0]) - len(rows[1]))
    # whatever is there, but for a metrics_old.jsonl: of what was killed before its first checkpoint
    files = [{p.name: (peek(p) or ('', None))[1] for p in d.iterdir() if p.suffix != '.jsonl'} for d in (one, other)]
    saved = [load_checkpoint(d / 'ckpt.pt') for d in (one, other)]
    weights = [[*c['model'].values(), *(m for p in c['optimizer']['state'].values() for m in p.values())] for c in saved]
    return {'rows': len(rows[0]), 'compared': sorted(set().union(*rows[0])), 'rows_that_differ': differ,
            'checkpoints': files[0], 'same_checkpoints': files[0] == files[1],
            'same_weights': all(torch.equal(a, b) for a, b in zip(*weights, strict=True))}


def result(args, met: list[dict], comparison: dict, n_bytes: int, seconds: float) -> dict:
    """The JSON document."""
    lost = [kill['iteration'] - kill['resumed'] for kill in met]
    save = [f'--save={args.save}'] if args.save != RESULT else []
    return {'kills': len(met), 'kills_inside_checkpoint_writing': sum(kill['inside'] for kill in met),
            'iterations_lost': sum(lost), 'most_lost_by_one_kill': max(lost, default=0),
            'iterations_between_checkpoints': SETTINGS['checkpoint_interval'], 'checkpoint_bytes': n_bytes,
            **comparison, 'seconds': round(seconds, 1), 'hardware': processor(), 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'seed': args.seed, 'settings': SETTINGS, 'each': met,
            'command': ' '.join(['python', 'lab/scripts/soak.py', f'--kills={args.kills}', f'--seed={args.seed}', *save])}


def passed(found: dict, kills: int) -> bool:
    """Whether all that was asked for happened, and nothing of it shows."""
    return (found['kills'] == kills and found['rows_that_differ'] == 0 and found['same_weights'] and found['same_checkpoints']
            and found['most_lost_by_one_kill'] <= found['iterations_between_checkpoints'])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=20, help='default: 20')
    parser.add_argument('--seed', type=int, default=1, help='of the moments of the kills; default: 1')
    parser.add_argument('--save', type=Path, default=RESULT, help='JSON file to write; default: results/cpu/soak.json')
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f'--kills={args.kills}: must be at least 1')
    args.save.parent.mkdir(parents=True, exist_ok=True)
    console, begun = Console(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, Progress(console=console, disable=not console.is_terminal) as progress:
        folder = Path(name)
        make_data(folder / 'data')
        shows = {}
        for run in ('alone', 'killed'):
            task = progress.add_task(f'iterations, {run}', total=SETTINGS['max_iters'] + 1)
            shows[run] = lambda reached, task=task: progress.update(task, completed=reached)
        trained(folder, folder / 'alone', shows['alone'])
        met = soak(folder, folder / 'killed', args.kills, args.seed, console, shows['killed'])
        found = result(args, met, compare(folder / 'alone', folder / 'killed'),
                       (folder / 'alone' / 'ckpt.pt').stat().st_size, time.monotonic() - begun)
    args.save.write_text(json.dumps(found, indent=1) + '\n')
    table = Table('', 'measured', title=f'{args.kills} times SIGKILL')
    for key, value in found.items():
        if type(value) in (int, float, bool):
            table.add_row(key.replace('_', ' '), f'{value:,}' if type(value) is not bool else str(value))
    console.print(table)
    return 0 if passed(found, args.kills) else 1


def child(argv: list[str]) -> None:
    """train.py, but for the folder that holds its data sets."""
    train.DATA_ROOT = Path(argv[0])
    configurator.run_program(lambda: train.main(argv[1:]))


if __name__ == '__main__':
    if sys.argv[1:2] == ['--child']:
        child(sys.argv[2:])
        raise SystemExit(0)
    try:
        raise SystemExit(main(sys.argv[1:]))
    except (KeyboardInterrupt, UserError, OSError) as e:
        print('interrupted' if isinstance(e, KeyboardInterrupt) else f'error: {e}', file=sys.stderr)
        raise SystemExit(130 if isinstance(e, KeyboardInterrupt) else 2) from None
