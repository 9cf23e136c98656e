"""Recomputation policies that fit a memory budget, and their largest micro-batches."""
import dataclasses

import torch

from config.errors import UserError
from config.sizes import available_memory, nice_bytes, parse_bytes
from training.int8_forward import train_for_int8
from training.loss import rows_at_a_time
from training.memory_use import Predictor, free_memory
from training.optim import state_name
from training.z_loss import add_z_loss

FASTEST_FIRST = ('none', 'selective', 'mlp', 'block', 'sqrt')
USABLE = 0.9  # fraction of the free memory; the rest is for workspaces and fragmentation
LARGEST = 2 ** 20  # sequences


class Plans:
    """Cached predictions for a run's settings `s` and a GPTConfig. policies: the fastest first.
    whole: the largest batch size whose logits are not chunked; 0 if none ever are."""

    def __init__(self, s, config, device: torch.device, dtype: torch.dtype, n_processes: int = 1,
                 optimizer=None):
        self.s, self.dtype = s, dtype
        self.optimizer = optimizer if optimizer and optimizer.state else state_name(s)
        self.predictor = Predictor(config, device)
        kernels = self.predictor.device.type
        if s.attention_backend in ('math', 'sdpa'):  # the others need as much as 'auto'
            self.predictor.model.attention_backend = s.attention_backend
        with self.predictor.fake:
            if s.int8_forward:
                train_for_int8(self.predictor.model)
            if s.attention_z_loss:
                add_z_loss(self.predictor.model, s.attention_z_loss)
        self.accumulate = s.gradient_accumulation_steps // n_processes > 1
        self.distributed = n_processes > 1
        self.policies = FASTEST_FIRST
        if device.type == kernels == 'cuda' and not s.compile:
            self.policies += ('offload',)
        rows = rows_at_a_time(config.vocab_size, kernels)
        self.whole = rows // s.block_size if s.chunked_loss else 0
        self._cache = {}

    def memory(self, policy: str, batch_size: int = 0):
        """Return the `Memory` of a step; batch_size 0 = the settings'. With several processes the
        peak includes DDP's buckets, which are as large as the gradients."""
        s, key = self.s, (policy, batch_size or self.s.batch_size)
        if key not in self._cache:
            m = self.predictor.predict(*key, s.block_size, s.chunked_loss, self.dtype,
                                       self.accumulate, self.optimizer)
            peak = m.peak + m.gradients * self.distributed
            self._cache[key] = dataclasses.replace(m, peak=peak)
        return self._cache[key]

    def rows(self, budget: int = 0, progress=lambda text: None) -> list[dict]:
        """Return a row per policy; 'recomputed' is the fraction of FLOPs that it adds to a step.
        With a budget also whether it fits, and the largest micro-batch (0 = none)."""
        rows = []
        for k, policy in enumerate(self.policies, 1):
            progress(f'predicting the memory of recompute={policy!r} ({k} of {len(self.policies)})')
            m = self.memory(policy)
            row = {'policy': policy, 'activations': m.activations, 'offloaded': m.offloaded,
                   'peak': m.peak, 'recomputed': m.flops / self.memory('none').flops - 1}
            if budget:
                n = largest_batch(lambda b, policy=policy: self.memory(policy, b).peak, budget,
                                  self.s.batch_size, self.whole)
                row |= {'fits': m.peak <= budget, 'largest_batch': n,
                        'largest_peak': self.memory(policy, n).peak if n else None}
            rows.append(row)
        return rows

    def least_peak(self, batch_size: int, budget: int) -> str:
        """Describe the smallest peak, for an error message."""
        policy = min(self.policies, key=lambda policy: self.memory(policy, batch_size).peak)
        peak = self.memory(policy, batch_size).peak
        return (f'the least is {nice_bytes(peak)} (recompute={policy!r}, batch_size={batch_size}), '
                f'{nice_bytes(peak - budget)} too much')


def largest_batch(peak, budget: int, start: int = 1, whole: int = 0) -> int:
    """Return the largest n >= 1 with peak(n) <= budget, 0 if there is none.

    peak: number of sequences -> bytes. It is the maximum of a few increasing linear functions, one
    per moment of a step, and therefore convex; but just above n = `whole` it may drop, because
    logits are then chunked. start: the first guess.
    """
    for low, high in (whole + 1, LARGEST), (1, min(whole, LARGEST)):
        n = _largest_between(low, high, peak, budget, start) if low <= high else 0
        if n:
            return n
    return 0


def _largest_between(low, high, peak, budget, start):
    """Return the largest n in low..high that fits, 0 if there is none, by linear extrapolation.

    A convex peak is below the line through two points between them (a lower bound for n), and
    above it beyond them (an upper bound). Two or three predictions are usually enough.
    """
    fits = []  # (n, peak) of the two largest n that fit
    over = None  # and of the smallest n that does not
    n = min(max(low, start), high)
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
        best, best_peak = fits[-1]
        most = over[0] - 1 if over else high
        if len(fits) == 2:
            steps = _steps(budget - best_peak, best_peak - fits[0][1], best - fits[0][0])
            most = min(most, best + steps)
        if best >= most:
            return best
        if over is None:  # in small steps, because predicting large batches is slow
            n = min(most, (2 if len(fits) < 2 else 4) * best)
        else:
            n = best + _steps(budget - best_peak, over[1] - best_peak, over[0] - best)
            if n == best:
                n = (best + 1 + most) // 2


def _steps(room, rise, run):
    """Return how many steps fit in `room` on a line that rises by `rise` in `run` steps."""
    return LARGEST if rise <= 0 else room * run // rise


def choose_policy(s, config, device: torch.device, dtype: torch.dtype, n_processes: int = 1,
                  least=lambda value: value) -> str:
    """Choose the policy for recompute='auto': the fastest whose predicted peak fits the budget.

    Prints the choice. least: minimum over processes, so that all make the same choice.

    Raises:
        UserError: if none fits (naming the smallest peak), or memory_budget is not a size.
    """
    plans = Plans(s, config, device, dtype, n_processes)
    if s.memory_budget:
        budget = parse_bytes(s.memory_budget, 'memory_budget')
        words = f'memory_budget={s.memory_budget}'
    else:
        free = least(free_memory(device)) // (n_processes if device.type == 'cpu' else 1)
        budget = int(USABLE * (plans.memory('none').parameters + free))
        words = f'{nice_bytes(budget)}, {USABLE:.0%} of what is free'
    for policy in plans.policies:
        peak = plans.memory(policy).peak
        if peak <= budget:
            eager = ' (for the model as it is; compiled it keeps less)' if s.compile else ''
            print(f"recompute='auto' is {policy!r}: predicted peak {nice_bytes(peak)}{eager}, "
                  f'budget {words}')
            return policy
    raise UserError(f"recompute='auto': no policy fits {words}; "
                    f'{plans.least_peak(s.batch_size, budget)}: give a smaller batch_size or a '
                    'larger memory_budget')


def warn_of_memory(s, config, policy: str, device, dtype: torch.dtype,
                   n_processes: int = 1) -> None:
    """Print a note if a step is predicted to need more memory than is currently free.

    A prediction takes seconds, so it is only made if 16 float32 activations per token, layer and
    embedding dimension (roughly what GPT-2 keeps) would fill half of the free memory.
    """
    free = available_memory() if device.type != 'cuda' else free_memory(device)
    tokens = s.batch_size * s.block_size
    if not free or policy == 'auto' or 64 * tokens * config.n_layer * config.n_embd < free / 2:
        return
    plans, n = Plans(s, config, device, dtype, n_processes), min(8, s.batch_size)
    peak = plans.memory(policy, n).peak
    if s.batch_size > n:  # extrapolated: predicting large batches is slow
        slope = (plans.memory(policy, 2 * n).peak - peak) / n
        peak += int(slope * (s.batch_size - n))
    if peak > free:
        print(f'Note: a step is predicted to need {nice_bytes(peak)} of memory, and '
              f'{nice_bytes(free)} are free: lower --batch_size={s.batch_size}, or try '
              '--recompute=auto (python -m training.memory finds what fits)')
