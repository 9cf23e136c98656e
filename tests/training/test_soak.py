"""A run that is killed again and again, at any moment, ends as a run that was left alone.

`make soak` kills it 20 times.
"""
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.programs.support import HARD, LAUNCH, TINY, flags, make_tiny
from training.checkpoint.file import load_checkpoint
from training.checkpoint.manager import peek
from training.loop.log import read_metrics

KILLS = int(os.environ.get('KILLS', 3))
EVERY = 10  # iterations between checkpoints
SETTINGS = dict(  # a checkpoint of 21 MB, so that writing it takes a while
    TINY, n_layer=4, n_head=4, n_embd=192, batch_size=2, max_iters=20 * KILLS, eval_interval=50,
    lr_decay_iters=20 * KILLS, checkpoint_interval=EVERY, **HARD)
COMPARED = {'iter', 'loss', 'lr', 'grad_norm', 'train_loss', 'val_loss'}  # the rest are timings


def start(data: Path, out: Path) -> subprocess.Popen:
    """Train, or go on training, in a process."""
    begin = 'resume' if peek(out / 'ckpt.pt') else 'scratch'
    command = [sys.executable, '-c', LAUNCH.format('train'), str(data),
               *flags(SETTINGS | dict(out_dir=out, init_from=begin))]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def resumes_from(out: Path) -> int:
    found = peek(out / 'ckpt.pt')
    return found.iteration if found else 0


def half_written(out: Path) -> set[Path]:
    return set(out.glob('.ckpt.pt.*.tmp'))


def kill(data: Path, out: Path, iterations: int, writing: bool) -> bool:
    """Train for so many iterations and then kill: at once, or while the next checkpoint is being
    written. Returns whether it was being written."""
    stale, reached = half_written(out), resumes_from(out)
    with start(data, out) as process:
        logged = (line for line in process.stdout if line.startswith('iter '))
        reached += len(list(islice(logged, iterations)))
        while writing and process.poll() is None and half_written(out) <= stale:
            time.sleep(0.0005)
        process.kill()
        rest = process.stdout.read()
    assert process.returncode == -signal.SIGKILL, rest
    reached += len(re.findall('^iter ', rest, re.M))
    assert reached - resumes_from(out) <= EVERY
    return not half_written(out) <= stale


def outcome(out: Path):
    """(rows of the log without timings, iterations of the files, weights and moments) of a run."""
    rows = [{key: value for key, value in row.items() if key in COMPARED}
            for row in read_metrics(out / 'metrics.jsonl')]
    # a run killed before its first checkpoint leaves a metrics_old.jsonl
    files = {path.name: (peek(path) or ('', None))[1] for path in out.iterdir()
             if path.suffix != '.jsonl'}
    checkpoint = load_checkpoint(out / 'ckpt.pt')
    moments = [x for state in checkpoint['optimizer']['state'].values() for x in state.values()]
    return rows, files, [*checkpoint['model'].values(), *moments]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_as_one_left_alone(tmp_path):
    make_tiny(tmp_path)
    alone, killed, rng = tmp_path / 'alone', tmp_path / 'killed', random.Random(1)
    inside = 0
    for k in range(KILLS):
        # leave some for later kills
        most = (SETTINGS['max_iters'] - resumes_from(killed)) // (KILLS - k + 1)
        inside += kill(tmp_path, killed, rng.randint(0, most), writing=k % 2 == 0)
    assert inside and resumes_from(killed)

    for out in (alone, killed):
        with start(tmp_path, out) as process:
            said = process.stdout.read()
        assert process.returncode == 0, said
    (rows, files, tensors), (wanted, its_files, its_tensors) = outcome(killed), outcome(alone)
    assert rows == wanted and len(rows) == SETTINGS['max_iters'] + 1
    assert {'loss', 'lr', 'grad_norm', 'train_loss', 'val_loss'} <= set().union(*rows)
    assert files == its_files
    assert all(torch.equal(a, b) for a, b in zip(tensors, its_tensors, strict=True))
