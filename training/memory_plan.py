"""Which recomputation fits in how much memory: `--recompute=auto`, and the largest micro-batch of
every policy.

Predictions for the eager model (`training.memory_use`), on one process: compiled models fuse
operations and keep less.
"""

import dataclasses

import torch

from config.errors import UserError
from config.sizes import available_memory, nice_bytes, parse_bytes
from training.loss import rows_at_a_time
from training.memory_use import Predictor, free_memory
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
    raise UserError(f"recompute='auto': no policy fits {words}; {least_peak(plans, plans.s.batch_size, budget)}: give a smaller "
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


def least_peak(plans, batch_size, budget):
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
