"""A tiny character data set, tiny configs, and helpers to run train.py and sample.py on them."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
import train
from tests.helpers.datasets import write_dataset

ROOT = Path(train.__file__).resolve().parent
ALPHABET = '\n abcdefghij'
TINY = dict(
    dataset='tiny', device='cpu', compile=False, n_layer=2, n_head=2, n_embd=16, block_size=16,
    batch_size=4, gradient_accumulation_steps=1, max_iters=20, lr_decay_iters=20, warmup_iters=2,
    learning_rate=1e-2, min_lr=1e-3, eval_interval=10, eval_iters=2)
VANILLA = dict(TINY)
FULL_STACK = dict(
    TINY, n_layer=7, n_kv_head=1, layer_pattern='LLLLLG', window_size=4, kv_share='AABBBC',
    share_global_kv=True, pos_embedding='rope', qk_norm=True)
# with these, the losses depend on every random number and on the data position
HARD = dict(dropout=0.1, gradient_accumulation_steps=2)
# runs a program with a different folder of data sets
LAUNCH = ('import sys, pathlib, configurator, interop.load, {0} as program; '
          'program.DATA_ROOT = interop.load.DATA_ROOT = pathlib.Path(sys.argv.pop(1)); '
          'configurator.run_program(program.main)')


def prefixed(prefix: str):
    return lambda weights: {prefix + name: x for name, x in weights.items()}


def with_masks(weights):
    """As nanoGPT stores them with a torch that has no flash attention, and as some forks do."""
    masks = {'bias': torch.ones(1, 1, 16, 16).tril(), 'masked_bias': torch.tensor(-1e4)}
    return weights | {f'transformer.h.{layer}.attn.{name}': x
                      for layer in range(2) for name, x in masks.items()}


# the names of weights in checkpoints of nanoGPT and its forks
NANOGPT_FORMS = {
    'compiled': prefixed('_orig_mod.'), 'DDP': prefixed('module.'), 'masks': with_masks,
    'compiled DDP with masks': lambda weights: prefixed('_orig_mod.module.')(with_masks(weights)),
    'DDP of compiled blocks': lambda weights: prefixed('module.')({
        re.sub(r'(h\.\d+\.)', r'\1_orig_mod.', name): x for name, x in weights.items()})}


def flags(settings: dict) -> list[str]:
    return [f'--{name}={value}' for name, value in settings.items()]


def tiny_tokens(n: int) -> np.ndarray:
    """The alphabet in order with 20% noise: learnable, but not to a loss of zero."""
    rng, letters = np.random.default_rng(7), len(ALPHABET)
    noisy = rng.random(n) < 0.2
    return np.where(noisy, rng.integers(letters, size=n), np.arange(n) % letters)


def meta_of(letters: str) -> dict:
    return {'vocab_size': len(letters), 'stoi': {c: i for i, c in enumerate(letters)},
            'itos': dict(enumerate(letters))}


def make_tiny(root, letters=ALPHABET):
    tokens = {'train': tiny_tokens(2000), 'val': tiny_tokens(400)}
    write_dataset(root / 'tiny', tokens, meta_of(letters))


def run_train(out_dir, config=VANILLA, **overrides):
    train.main(flags(dict(config, out_dir=out_dir) | overrides))
    return SimpleNamespace(path=Path(out_dir) / 'ckpt.pt', rows=metrics(out_dir))


def metrics(out_dir) -> list[dict]:
    path = Path(out_dir) / 'metrics.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(out_dir) -> list[tuple]:
    return [(row['iter'], row['loss']) for row in metrics(out_dir)]


def raise_signal(number):
    return lambda: os.kill(os.getpid(), number)


def no_links(*_):
    raise OSError('a file system without hard links')


class Died(BaseException):
    """Simulates kill -9: the program must not catch it."""


def die():
    raise Died


def kept(folder) -> dict[str, int]:
    """The iteration of every checkpoint in the folder, by file name."""
    return {path.name: load(path)['iter_num'] for path in sorted(folder.glob('*.pt'))}


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(path) -> dict:
    return torch.load(path, map_location='cpu', weights_only=True)


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def run_sample(capsys, **overrides):
    """Run sample.py and return its standard output."""
    capsys.readouterr()
    settings = dict(device='cpu', start='ab', max_new_tokens=12, num_samples=1)
    sample.main(flags(settings | overrides))
    return capsys.readouterr().out


def in_terminal(*args) -> tuple[int, str]:
    """Run Python in a terminal of 80 x 24. Returns its exit status, and what the terminal gets."""
    pty = pytest.importorskip('pty')  # not on Windows
    ours, theirs = pty.openpty()
    env = dict(os.environ, OMP_NUM_THREADS='1', TERM='xterm', COLUMNS='80', LINES='24',
               PYTHONIOENCODING='utf-8')
    process = subprocess.Popen([sys.executable, *map(str, args)], cwd=ROOT, env=env, stdin=theirs,
                               stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b''
    with contextlib.suppress(OSError):  # EIO: the program has ended
        while data := os.read(ours, 65536):
            out += data
    os.close(ours)
    return process.wait(), out.decode().replace('\r\n', '\n')


def _default_sigint():
    """Reset SIGINT, which processes started by `nohup` inherit as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_program(name, *args, data_root=None, before='', torchrun=()):
    """Start train.py or sample.py as a separate process.

    data_root: the folder with data sets; before: code to run first (requires data_root);
    torchrun: options of torchrun, to start the program with it.
    """
    command = [str(ROOT / f'{name}.py')]
    if data_root is not None:
        command = ['-c', before + LAUNCH.format(name), str(data_root)]
    command = [sys.executable, *command, *map(str, args)]
    if torchrun:
        launcher = [sys.executable, '-m', 'torch.distributed.run']
        command = [*launcher, *torchrun, '--no-python', *command]
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PYTHONUNBUFFERED='1')
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=env, preexec_fn=_default_sigint)
