"""The largest micro-batch of every recomputation policy, predicted without training anything.

    python -m training.memory config/train_gpt2.py --budget=24GB
    python -m training.memory config/train_gpt2.py --budget=24GB --device=cuda --chunked_loss=False
    python -m training.memory --help

Predictions are for one process and the eager model (compiled models fuse operations and keep less):
`training.memory_use` measures a step of a model of fake tensors.
"""
from config import startup  # noqa: F401  # isort: skip  (before torch is imported)
import dataclasses
import functools
import json
import os

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import configurator
from config.errors import UserError, at_least
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import nice_bytes, parse_bytes
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from kv.console import output, print_table, table_of
from model import GPT
from training import native
from training.device import autocast, pick_device
from training.loss import linear_cross_entropy, rows_at_a_time
from training.memory_use import free_memory, measure
from training.recompute import NAMES, policy_of, set_recompute

USABLE = 0.9  # fraction of the free memory; the rest is for workspaces and fragmentation
LARGEST = 2 ** 20  # sequences
PARTS = {'parameters': 'parameters', 'gradients': 'gradients', 'optimizer': 'optimizer state',
         'activations': 'activations', 'loss_peak': 'logits and loss', 'peak': 'peak',
         'offloaded': 'on the host'}


class Plans:
    """A fake model that predicts the memory of the steps of a run with settings `s`.

    device: the one that is planned for. Where it is CUDA but there is none, the predictions are for
    the CPU's kernels, because autograd needs a CUDA device even for fake tensors.

    policies: those that can be used, the fastest first. whole: the largest batch size whose logits
    are not chunked; 0 if none ever are.
    """

    def __init__(self, s, config, device: torch.device, dtype: torch.dtype, n_processes: int = 1,
                 optimizer=None):
        self.s, self.dtype, self.distributed = s, dtype, n_processes > 1
        self.accumulate = s.gradient_accumulation_steps > n_processes
        self.optimizer = optimizer if optimizer and optimizer.state else s.optimizer
        can_run = device.type != 'cuda' or torch.cuda.is_available()
        self.device = device if can_run else torch.device('cpu')
        self.fake = FakeTensorMode()
        with self.fake, torch.device(self.device):
            self.model = GPT(config)
        self.model.loss_fn = linear_cross_entropy if s.chunked_loss else None
        if native.wanted(s, device):
            native.speed_up(self.model)
        if s.attention_backend in ('math', 'sdpa'):  # the others need as much as 'auto'
            self.model.attention_backend = s.attention_backend
        offloads = self.device.type == 'cuda' and not s.compile
        self.policies = [name for name in NAMES if name != 'offload' or offloads]
        rows = rows_at_a_time(config.vocab_size, self.device.type)
        self.whole = rows // s.block_size if s.chunked_loss else 0
        self._predicted = functools.cache(self._predict)

    def memory(self, policy: str, batch_size: int = 0):
        """Return the `Memory` of a step; batch_size 0 = the settings'. With several processes the
        peak includes DDP's buckets, which are as large as the gradients."""
        return self._predicted(policy, batch_size or self.s.batch_size)

    def _predict(self, policy, batch_size):
        set_recompute(self.model, policy)
        with self.fake:
            x = torch.zeros(batch_size, self.s.block_size, dtype=torch.int64, device=self.device)
            m = measure(self.model, (x, torch.zeros_like(x)), autocast(self.device, self.dtype),
                        optimizer=self.optimizer, accumulate=self.accumulate)
        return dataclasses.replace(m, peak=m.peak + m.gradients * self.distributed)

    def rows(self, budget: int = 0) -> list[dict]:
        """Return a row per policy; 'recomputed' is the fraction of FLOPs that it adds to a step.
        With a budget also the largest micro-batch that fits (0 = none)."""
        rows = []
        for policy in self.policies:
            m = self.memory(policy)
            row = {'policy': policy, 'activations': m.activations, 'offloaded': m.offloaded,
                   'peak': m.peak, 'recomputed': m.flops / self.memory('none').flops - 1}
            if budget:
                row['largest_batch'] = n = largest_batch(
                    lambda b, policy=policy: self.memory(policy, b).peak, budget,
                    self.s.batch_size, self.whole)
                row['largest_peak'] = self.memory(policy, n).peak if n else None
            rows.append(row)
        return rows

    def nothing_fits(self, what: str, batch_size: int, budget: int) -> UserError:
        """Return the error that no policy fits the budget, with the smallest peak."""
        policy = min(self.policies, key=lambda policy: self.memory(policy, batch_size).peak)
        peak = self.memory(policy, batch_size).peak
        return UserError(f'{what}; the least is {nice_bytes(peak)} (recompute={policy!r}, '
                         f'batch_size={batch_size}), {nice_bytes(peak - budget)} too much: give a '
                         'smaller batch_size or more memory')


def largest_batch(peak, budget: int, start: int = 1, whole: int = 0) -> int:
    """Return the largest n >= 1 with peak(n) <= budget, 0 if there is none.

    peak: number of sequences -> bytes. It is the maximum of a few increasing linear functions, one
    per moment of a step, and therefore convex; but just above n = `whole` it may drop, because
    logits are then chunked. start: the first guess.

    The line through two neighbours is nowhere above a convex peak, so that no n beyond the point
    where this line reaches the budget fits. The search goes to that point until it stays there.
    """
    for low, high in ((whole + 1, LARGEST), (whole, whole), (1, whole - 1)):
        n = min(max(low, start), high)
        while n >= max(low, 1):
            at = peak(n)
            rise = max(1, peak(n + 1) - at)
            # at most to 4n, because predicting large batches is slow
            last, n = n, min(n + (budget - at) // rise, 4 * n, high)
            if n == last:
                return n
    return 0


def print_memory_report(run, dtype: torch.dtype) -> None:
    """Print, on rank 0, the report of train.py's --memory_report for a `Run` that has its first
    batch. The run's random state, data and gradients are left unchanged."""
    s, console = run.s, output()
    plans = Plans(s, run.model.config, run.device, dtype, run.ranks.world_size, run.optimizer)
    policy = policy_of(run.model)
    try:
        measured = vars(measure(run.model, run.batch, autocast=run.autocast,
                                optimizer=plans.optimizer, accumulate=plans.accumulate))
    except torch.OutOfMemoryError:  # the table has '-' there
        measured = {}
    predicted = vars(plans.memory(policy))
    table = table_of(('', 'predicted', 'measured'), (
        (name, _size(predicted[part]), _size(measured.get(part))) for part, name in PARTS.items()))
    eager = '; compiled, less' if s.compile else ''
    title = (f'Memory of a step: {s.batch_size} x {s.block_size:,} tokens, '
             f'recompute={policy!r}{eager}')
    print_table(console, table, title)
    print_table(console, _policy_table(plans.rows(), s.batch_size), '\nevery policy, predicted')


def _size(n):
    return '-' if n is None else nice_bytes(n)


def _policy_table(rows, batch_size):
    header = ['recompute', 'activations', f'peak at {batch_size}', 'FLOPs']
    lines = [[row['policy'], _size(row['activations']), _size(row['peak']),
              f"+{row['recomputed']:.1%}"] for row in rows]
    if 'largest_batch' in rows[0]:
        header += ['largest', 'its peak']
        for row, line in zip(rows, lines):
            line += [f"{row['largest_batch']:,}", _size(row['largest_peak'])]
    return table_of(header, lines, left=('recompute',))


def main(argv=None):
    s = configurator.parse('memory', argv, usage=__doc__, echo=False)
    at_least(s, batch_size=1, gradient_accumulation_steps=1)
    if s.device.startswith('cuda') and not torch.cuda.is_available():
        device = torch.device('cuda')  # the target, with bfloat16 if dtype is 'auto'
        dtype = torch.bfloat16 if s.dtype == 'auto' else getattr(torch, s.dtype)
        if not s.budget:
            raise UserError('there is no CUDA device here to ask what is free: say what it has, as '
                            '--budget=8GB')
    else:
        device = pick_device(s.device)
        dtype = native.training_dtype(s, device)
    meta = read_meta(DATA_ROOT / os.path.basename(s.dataset))
    vocab_size = meta['vocab_size'] if meta else 50304  # GPT-2's, if the data set is not prepared
    config = GPTConfig(vocab_size=vocab_size, **{key.name: getattr(s, key.name) for key in MODEL})
    budget = parse_bytes(s.budget) if s.budget else int(USABLE * free_memory(device))

    plans = Plans(s, config, device, dtype)
    rows = plans.rows(budget)
    if not any(row['largest_batch'] for row in rows):
        raise plans.nothing_fits(f'budget={s.budget!r}: nothing fits', 1, budget)
    m = plans.memory('none')
    dtype = str(dtype).removeprefix('torch.')
    title = f'micro-batches of {s.block_size:,} tokens in {nice_bytes(budget)}'
    print_table(output(), _policy_table(rows, s.batch_size), title)
    print(f'parameters {nice_bytes(m.parameters)}, gradients {nice_bytes(m.gradients)}, '
          f'optimizer {nice_bytes(m.optimizer)} are in every peak; {dtype} arithmetic')
    if plans.device.type != device.type:
        print(f"There is no {device.type} here: these are the tensors of the CPU's kernels, "
              'without offloading')
    if s.json:
        print(json.dumps({
            'budget': budget, 'device': str(device), 'kernels': str(plans.device),
            'dtype': dtype, 'block_size': s.block_size, 'policies': rows,
            'parameters': m.parameters, 'gradients': m.gradients, 'optimizer': m.optimizer}))


if __name__ == '__main__':
    configurator.run_program(main)
