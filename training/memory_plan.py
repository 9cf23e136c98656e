"""Which recomputation fits in how much memory: `--recompute=auto`, and the largest micro-batch of every policy.

    python -m training.memory config/train_gpt2.py --budget=24GB
    python -m training.memory config/train_gpt2.py --budget=24GB --device=cuda --chunked_loss=False --json=True
    python -m training.memory --help

Nothing is trained and nothing allocated: figures are predictions for the eager model (`training.memory`), on one process.
Compiled models fuse operations and keep less.
"""
import dataclasses
import json
import os
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import available_memory, nice_bytes, parse_bytes
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from kv.tables import titled
from training.device import pick_device, pick_dtype
from training.loss import rows_at_a_time
from training.memory import Predictor, free_memory
from training.optim import state_name

FASTEST_FIRST = ('none', 'selective', 'mlp', 'block', 'sqrt')
USABLE = 0.9  # of what is free: the rest is for what a prediction does not see (kernels' own memory, fragmentation)
LARGEST = 2 ** 20  # sequences; nobody wants more


class Plans:
    """Predictions for a run's settings `s` (train.py's keys) and a GPTConfig, each made once."""

    def __init__(self, s, config, device: torch.device, dtype: torch.dtype, n_processes: int = 1, optimizer=None):
        self.s, self.dtype = s, dtype
        self.optimizer = optimizer if optimizer and optimizer.state else state_name(s)
        self.predictor = Predictor(config, device)
        if s.attention_backend in ('math', 'sdpa'):  # the others keep as much as what is chosen by itself
            self.predictor.model.attention_backend = s.attention_backend
        self.accumulate = s.gradient_accumulation_steps // n_processes > 1
        self.distributed = n_processes > 1
        self.policies = FASTEST_FIRST + ('offload',) * (device.type == 'cuda' == self.predictor.device.type and not s.compile)
        self.whole = 0  # sequences up to which logits are whole; 0 where nothing changes with their number
        if s.chunked_loss:
            self.whole = rows_at_a_time(config.vocab_size, self.predictor.device.type) // s.block_size
        self.made = {}

    def memory(self, policy: str, batch_size: int = 0):
        """`Memory` with this policy; 0 = the settings' batch_size. With several processes DDP's buckets, as large as the
        gradients, are in the peak."""
        batch_size = batch_size or self.s.batch_size
        if (policy, batch_size) not in self.made:
            m = self.predictor.predict(policy, batch_size, self.s.block_size, self.s.chunked_loss, self.dtype,
                                       self.accumulate, self.optimizer)
            self.made[policy, batch_size] = dataclasses.replace(m, peak=m.peak + m.gradients * self.distributed)
        return self.made[policy, batch_size]

    def recomputed(self, policy: str) -> float:
        """Further FLOPs of products and attention, as a share of those of a step that computes nothing again."""
        all_kept = self.memory('none').flops
        return self.memory(policy).flops / all_kept - 1

    def rows(self, budget: int = 0, tell=lambda text: None) -> list[dict]:
        """A row per policy; with a budget also whether it fits, and the largest micro-batch that
        does (0 = none).

        tell: called with a line of progress before each policy.
        """
        rows = []
        for k, policy in enumerate(self.policies, 1):
            tell(f'predicting the memory of recompute={policy!r} ({k} of {len(self.policies)})')
            m = self.memory(policy)
            rows.append({'policy': policy, 'activations': m.activations, 'offloaded': m.offloaded, 'peak': m.peak,
                         'recomputed': self.recomputed(policy)})
            if budget:
                n = largest_batch(lambda b, policy=policy: self.memory(policy, b).peak, budget, self.s.batch_size, self.whole)
                rows[-1] |= {'fits': m.peak <= budget, 'largest_batch': n,
                             'largest_peak': self.memory(policy, n).peak if n else None}
        return rows


def largest_batch(peak, budget: int, start: int = 1, whole: int = 0) -> int:
    """The largest n from 1 on with peak(n) <= budget, 0 if there is none. Below it there may be some that do not fit: from n =
    `whole` to the next the peak may fall, as logits are no longer whole but in chunks.

    peak: number of sequences -> bytes. On either side of `whole` it is the largest of a few growing, straight functions (one
    for each moment of a step that may be the worst), so it is convex: between two points it lies below the line through them,
    beyond them above. Two or three questions about it are enough.
    """
    sides = [(whole + 1, LARGEST), (1, min(whole, LARGEST))]
    return next((n for low, high in sides if low <= high and (n := _largest_between(low, high, peak, budget, start))), 0)


def _largest_between(low, high, peak, budget, start):
    """The largest n from `low` to `high` that fits, 0 if there is none; peak is convex there."""
    fits, over, n = [], None, min(max(low, start), high)
    while True:
        p = peak(n)
        if p <= budget:
            fits = sorted([*fits, (n, p)])[-2:]
        else:
            over = n, p
        if not fits:
            if n == low:
                return 0
            n = low
            continue
        best, under = fits[-1]
        most = over[0] - 1 if over else high
        if len(fits) == 2:
            most = min(most, best + _steps(budget - under, under - fits[0][1], best - fits[0][0]))
        if best >= most:
            return best
        if over is None:
            n = min(most, (2 if len(fits) < 2 else 4) * best)  # a large batch is long to ask about: chunks
        else:
            least = best + _steps(budget - under, over[1] - under, over[0] - best)
            n = least if least > best else (best + 1 + most) // 2


def _steps(room, rise, run):
    """How many steps of a line that rises by `rise` in `run` steps stay within `room`."""
    return LARGEST if rise <= 0 else room * run // rise


def choose_policy(s, config, device: torch.device, dtype: torch.dtype, n_processes: int = 1,
                  least=lambda value: value) -> str:
    """What recompute='auto' stands for: the fastest policy whose predicted peak fits `memory_budget`; says which, and why.

    least: of what each process finds free, so that all choose alike.

    Raises:
        UserError: none fits, with the least that is needed; a memory_budget that is no size.
    """
    plans = Plans(s, config, device, dtype, n_processes)
    if s.memory_budget:
        budget, words = parse_bytes(s.memory_budget, 'memory_budget'), f'memory_budget={s.memory_budget}'
    else:
        free = least(free_memory(device)) // (n_processes if device.type == 'cpu' else 1)
        budget = int(USABLE * (plans.memory('none').parameters + free))
        words = f'{nice_bytes(budget)}, {USABLE:.0%} of what is free'
    for policy in plans.policies:
        peak = plans.memory(policy).peak
        if peak <= budget:
            eager = ' (for the model as it is; compiled it keeps less)' if s.compile else ''
            print(f"recompute='auto' is {policy!r}: predicted peak {nice_bytes(peak)}{eager}, budget {words}")
            return policy
    raise UserError(f"recompute='auto': no policy fits {words}; {_least(plans, plans.s.batch_size, budget)}: give a smaller "
                    'batch_size or a larger memory_budget')


def warn_of_memory(s, config, policy: str, device, dtype: torch.dtype, n_processes: int = 1) -> None:
    """Print a note if a step is predicted to need more memory than is free now.

    A prediction takes seconds, so it is made only if activations of 16 float32 numbers per token,
    layer and embedding dimension (GPT-2 keeps about that many) would fill half of it.
    """
    free = available_memory() if device.type != 'cuda' else free_memory(device)
    tokens = s.batch_size * s.block_size
    if not free or policy == 'auto' or 64 * tokens * config.n_layer * config.n_embd < free / 2:
        return
    plans, n = Plans(s, config, device, dtype, n_processes), min(8, s.batch_size)
    peak = plans.memory(policy, n).peak
    if s.batch_size > n:  # the peak grows along a line; large predictions take long
        slope = (plans.memory(policy, 2 * n).peak - peak) / n
        peak += int(slope * (s.batch_size - n))
    if peak > free:
        print(f'Note: a step is predicted to need {nice_bytes(peak)} of memory, and {nice_bytes(free)} '
              f'are free: lower --batch_size={s.batch_size}, or try --recompute=auto '
              '(python -m training.memory finds what fits)')


def _least(plans, batch_size, budget):
    policy = min(plans.policies, key=lambda policy: plans.memory(policy, batch_size).peak)
    peak = plans.memory(policy, batch_size).peak
    return (f'the least is {nice_bytes(peak)} (recompute={policy!r}, batch_size={batch_size}), '
            f'{nice_bytes(peak - budget)} too much')


def recommend(rows, batch_size: int) -> dict:
    """Of rows with a budget: the fastest policy that fits this batch_size (None if none does), and what gives the largest
    micro-batch, the fastest of equals."""
    return {'at_batch_size': next((row['policy'] for row in rows if row['fits']), None), 'batch_size': batch_size,
            'largest': max(rows, key=lambda row: row['largest_batch'])['policy'],
            'largest_batch': max(row['largest_batch'] for row in rows),
            'fastest': next((row['policy'] for row in rows if row['largest_batch']), None),
            'fastest_batch': next((row['largest_batch'] for row in rows if row['largest_batch']), 0)}


def main(argv=None):
    from rich.console import Console

    from training.memory_table import policy_table
    s = configurator.parse('memory', argv, usage=__doc__, echo=False)
    for name in ('batch_size', 'gradient_accumulation_steps'):
        if getattr(s, name) < 1:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 1')
    device, dtype = planned_device(s)
    config = planned_config(s, DATA_ROOT)
    if not s.budget and device.type == 'cuda' and not torch.cuda.is_available():
        raise UserError('there is no CUDA device here to ask what is free: say what it has, as --budget=8GB')
    budget = parse_bytes(s.budget) if s.budget else int(USABLE * free_memory(device))
    console = Console()
    with Console(stderr=True).status('predicting') as status:  # seen on a terminal only
        plans = Plans(s, config, device, dtype)
        rows = plans.rows(budget, status.update)
    if not any(row['largest_batch'] for row in rows):
        raise UserError(f'budget={s.budget!r}: nothing fits; {_least(plans, 1, budget)}')
    advice = recommend(rows, s.batch_size)
    m = plans.memory('none')
    console.print(titled(f'micro-batches of {s.block_size:,} tokens in {nice_bytes(budget)}',
                         policy_table(rows, s.batch_size)))
    for line in [f'parameters {nice_bytes(m.parameters)}, gradients {nice_bytes(m.gradients)}, optimizer '
                 f'{nice_bytes(m.optimizer)} are in every peak; {dtype} arithmetic'.replace('torch.', '')] + _words(advice):
        console.print(line, highlight=False, soft_wrap=True)
    if plans.predictor.device.type != device.type:
        console.print(f'There is no {device.type} here: these are the tensors of the CPU\'s kernels, without offloading',
                      highlight=False, soft_wrap=True)
    if s.json:
        print(json.dumps({'budget': budget, 'device': str(device), 'kernels': str(plans.predictor.device),
                          'dtype': str(dtype).removeprefix('torch.'), 'block_size': s.block_size, 'policies': rows,
                          'parameters': m.parameters, 'gradients': m.gradients, 'optimizer': m.optimizer, **advice}))


def _words(advice):
    at = advice['at_batch_size']
    yours = f"--recompute={at} is the fastest that fits" if at else 'nothing fits'
    lines = [f"batch_size={advice['batch_size']}: {yours}",
             f"without recomputing more than needed: --recompute={advice['fastest']} --batch_size={advice['fastest_batch']}"]
    if advice['largest'] != advice['fastest']:
        lines.append(f"largest micro-batch: --recompute={advice['largest']} --batch_size={advice['largest_batch']}")
    return lines


def planned_device(s):
    """(device, dtype) of a plan: 'cuda' may be planned for where there is none (with bfloat16, if dtype is 'auto')."""
    if s.device.startswith('cuda') and not torch.cuda.is_available():
        return torch.device('cuda'), torch.bfloat16 if s.dtype == 'auto' else getattr(torch, s.dtype)
    device = pick_device(s.device)
    return device, pick_dtype(s.dtype, device)


def planned_config(s, data_root: Path) -> GPTConfig:
    """The settings' model; the data set says the vocabulary where it is there already (else GPT-2's, 50304)."""
    meta = read_meta(data_root / os.path.basename(s.dataset))
    return GPTConfig(vocab_size=meta['vocab_size'] if meta else 50304, **{key.name: getattr(s, key.name) for key in MODEL})
