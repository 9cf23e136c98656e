"""Does training wait for its batches? Out of 10 GB of token shards that are not in memory: beside a training step, and alone.

    python lab/scripts/loader.py                      # results/cpu/loader.json (about 5 minutes and 10 GB of disk on 2 cores)
    python lab/scripts/loader.py --gigabytes=1 --steps=2 --save=loader.json

The shards are random ids, written once to a temporary folder and dropped from the system's memory (where it lets us). Then

  step    GPT-2 124M's shape is trained a few steps (batch 1, T=1024, float32) on batches that a thread makes ahead
  alone   batches are asked for `--faster` times as often, by a program that does nothing else, in each order of the windows
  most    and as fast as they can be made, without the thread
  memory  what the process holds while all 10 GB pass through it in order, once
"""
import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from config.errors import UserError
from config.gpt_config import GPTConfig
from configurator import run_program
from data.order import ORDERS
from data.tokenfiles import open_split
from lab.benchmarks.setting import processor
from model import GPT
from training.batches import TokenBatches
from training.device import memory_use
from training.prefetch import Prefetched

RESULT = ROOT / 'results' / 'cpu' / 'loader.json'
T, VOCAB, SHARD_BYTES, CPU = 1024, 50304, 100_000_000, torch.device('cpu')


def write_shards(folder: Path, nbytes: int) -> None:
    """Random ids, in shards, and a small val.bin."""
    rng = np.random.default_rng(0)
    for number in track(range(max(1, nbytes // SHARD_BYTES)), 'writing shards', console=Console(stderr=True)):
        write(folder / f'train_{number:05d}.bin', rng.integers(VOCAB, size=SHARD_BYTES // 2, dtype=np.uint16))
    write(folder / 'val.bin', rng.integers(VOCAB, size=10 * T, dtype=np.uint16))


def write(path: Path, ids: np.ndarray) -> None:
    try:
        with open(path, 'wb') as file:
            ids.tofile(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        raise UserError(f'cannot write {path}: {e.strerror}; --gigabytes and --folder say how much and where') from e


def forget(folder: Path) -> bool:
    """Ask the system to drop its copies of the files. Returns whether that can be asked here."""
    for path in folder.glob('*.bin'):
        if not hasattr(os, 'posix_fadvise'):
            return False
        with open(path, 'rb') as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def batches(folder: Path, batch_size: int, order: str = 'random', depth: int = 2) -> Prefetched:
    made = TokenBatches(folder, T, batch_size, CPU, torch.Generator().manual_seed(1), order=order, seed=1, vocab_size=VOCAB)
    return Prefetched(made, depth)


def beside_a_step(folder: Path, steps: int) -> dict:
    """Seconds of a training step, and which share of them waits."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=T, vocab_size=VOCAB, n_layer=12, n_head=12, n_embd=768))
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), 'cpu')
    loader, seconds = batches(folder, 1), []
    batch = loader.next()
    for _ in track(range(steps + 1), 'training steps', console=Console(stderr=True)):
        began = time.perf_counter()
        loss = model(*batch)[1]
        batch = loader.next()  # as train.py does
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    loader.close()
    return {'seconds': statistics.median(seconds[1:]), 'steps': steps, 'share': loader.waited / sum(seconds),
            'parameters': model.get_num_params()}


def alone(folder: Path, every: float, n: int, order: str) -> dict:
    """Batches asked for every so many seconds: the share of the time that waits, and the longest wait, in ms."""
    loader, waits = batches(folder, 1, order), []
    loader.next()
    began = time.perf_counter()
    for _ in track(range(n), f'batches, {order}', console=Console(stderr=True)):
        time.sleep(every)
        before = loader.waited
        loader.next()
        waits.append(loader.waited - before)
    whole = time.perf_counter() - began
    loader.close()
    return {'share': sum(waits) / whole, 'longest_ms': 1000 * max(waits), 'batches': n}


def most(folder: Path, n: int, batch_size: int, order: str) -> dict:
    """Batches a second where nothing else is done."""
    loader = batches(folder, batch_size, order, depth=0)
    loader.next()
    began = time.perf_counter()
    for _ in range(n):
        loader.next()
    return {'batch_size': batch_size, 'batches_per_second': n / (time.perf_counter() - began)}


def memory(folder: Path) -> dict:
    """Bytes that this process holds before and at most, while it reads all windows in order once."""
    loader = batches(folder, 64, 'sequential', depth=0)
    loader.next()
    before = memory_use(CPU).used
    high, n = before, loader.batches.order.n // 64
    for i in track(range(n), 'all of it, once', console=Console(stderr=True)):
        loader.next()
        if i % 100 == 0:
            high = max(high, memory_use(CPU).used)
    return {'read_bytes': n * 64 * T * 2, 'before_bytes': before, 'most_bytes': high, 'growth_bytes': high - before}


def measure(folder: Path, args) -> dict:
    write_shards(folder, int(args.gigabytes * 1e9))
    split = open_split(folder, 'train')
    found = {'command': 'python ' + ' '.join(['lab/scripts/loader.py', *sys.argv[1:]]), 'processor': processor(),
             'threads': torch.get_num_threads(), 'torch': torch.__version__, 'dtype': 'float32', 'B': 1, 'T': T,
             'tokens': len(split), 'bytes': 2 * len(split), 'shards': len(split.files), 'dropped_from_memory': forget(folder)}
    found['memory'] = memory(folder)  # before there is a model in it
    forget(folder)
    found['step'] = beside_a_step(folder, args.steps)
    every = found['step']['seconds'] / args.faster
    found['faster'] = args.faster
    found['alone'] = {}
    for order in ORDERS:
        forget(folder)
        found['alone'][order] = alone(folder, every, args.batches, order)
    forget(folder)
    found['most'] = {order: most(folder, 500, 12, order) for order in ORDERS}
    return found


def show(found: dict) -> None:
    table = Table(title=f"{found['bytes'] / 1e9:.1f} GB in {found['shards']} shards; {found['processor']}", box=None)
    for name in ('', 'waits', 'of'):
        table.add_column(name, justify='left' if not name else 'right')
    step = found['step']
    table.add_row('beside a training step', f"{step['share']:.4%}", f"{step['seconds']:.2f} s")
    for order, row in found['alone'].items():
        table.add_row(f"{found['faster']:g} times as often, {order}", f"{row['share']:.4%}",
                      f"{1000 * step['seconds'] / found['faster']:.0f} ms")
    console = Console()
    console.print(table)
    for order, row in found['most'].items():
        console.print(f"{order}: at most {row['batches_per_second']:,.0f} batches of {row['batch_size']} x {T} a second",
                      highlight=False)
    held = found['memory']
    console.print(f"{held['read_bytes'] / 1e9:.1f} GB read; memory {held['before_bytes'] / 1e6:,.0f} MB before, "
                  f"{held['growth_bytes'] / 1e6:,.1f} MB more at most", highlight=False)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--gigabytes', type=float, default=10, help='of token shards (%(default)s)')
    parser.add_argument('--steps', type=int, default=8, help='training steps, after one to warm up (%(default)s)')
    parser.add_argument('--faster', type=float, default=20, help='how many times as often without the step (%(default)s)')
    parser.add_argument('--batches', type=int, default=200, help='to ask for in each order (%(default)s)')
    parser.add_argument('--folder', type=Path, help='where the shards are for the time being (a temporary folder)')
    parser.add_argument('--save', type=Path, default=RESULT, help='the JSON file (%(default)s)')
    args = parser.parse_args(argv)
    if args.folder is not None and not args.folder.is_dir():
        raise UserError(f'--folder={args.folder}: there is no such folder')
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(Path(folder), args)
    args.save.parent.mkdir(parents=True, exist_ok=True)
    args.save.write_text(json.dumps(found, indent=1) + '\n')
    show(found)


if __name__ == '__main__':
    run_program(main)
