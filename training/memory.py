"""The largest micro-batch of every recomputation policy, predicted without training anything.

    python -m training.memory config/train_gpt2.py --budget=24GB
    python -m training.memory config/train_gpt2.py --budget=24GB --device=cuda --chunked_loss=False
    python -m training.memory --help

Predictions are for the eager model on one process (`training.memory_use`); compiled models fuse
operations and keep less.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import json
import os
from pathlib import Path

import torch
from rich.console import Console

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import nice_bytes, parse_bytes
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from kv.tables import titled
from training.device import pick_device, pick_dtype
from training.memory_plan import USABLE, Plans, least_peak, recommend
from training.memory_table import policy_table
from training.memory_use import free_memory


def main(argv=None):
    s = configurator.parse('memory', argv, usage=__doc__, echo=False)
    for name in ('batch_size', 'gradient_accumulation_steps'):
        if getattr(s, name) < 1:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 1')
    device, dtype = planned_device(s)
    config = planned_config(s, DATA_ROOT)
    if not s.budget and device.type == 'cuda' and not torch.cuda.is_available():
        raise UserError('there is no CUDA device here to ask what is free: say what it has, as '
                        '--budget=8GB')
    budget = parse_bytes(s.budget) if s.budget else int(USABLE * free_memory(device))
    console = Console()
    with Console(stderr=True).status('predicting') as status:  # seen on a terminal only
        plans = Plans(s, config, device, dtype)
        rows = plans.rows(budget, status.update)
    if not any(row['largest_batch'] for row in rows):
        raise UserError(f'budget={s.budget!r}: nothing fits; {least_peak(plans, 1, budget)}')
    advice = recommend(rows, s.batch_size)
    m = plans.memory('none')
    title = f'micro-batches of {s.block_size:,} tokens in {nice_bytes(budget)}'
    console.print(titled(title, policy_table(rows, s.batch_size)))
    dtype = str(dtype).removeprefix('torch.')
    lines = [f'parameters {nice_bytes(m.parameters)}, gradients {nice_bytes(m.gradients)}, '
             f'optimizer {nice_bytes(m.optimizer)} are in every peak; {dtype} arithmetic']
    lines += _words(advice)
    if plans.predictor.device.type != device.type:
        lines.append(f"There is no {device.type} here: these are the tensors of the CPU's kernels, "
                     'without offloading')
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if s.json:
        print(json.dumps({
            'budget': budget, 'device': str(device), 'kernels': str(plans.predictor.device),
            'dtype': dtype, 'block_size': s.block_size, 'policies': rows,
            'parameters': m.parameters, 'gradients': m.gradients, 'optimizer': m.optimizer,
            **advice}))


def _words(advice):
    at = advice['at_batch_size']
    yours = f"--recompute={at} is the fastest that fits" if at else 'nothing fits'
    lines = [f"batch_size={advice['batch_size']}: {yours}",
             f"without recomputing more than needed: --recompute={advice['fastest']} "
             f"--batch_size={advice['fastest_batch']}"]
    if advice['largest'] != advice['fastest']:
        lines.append(f"largest micro-batch: --recompute={advice['largest']} "
                     f"--batch_size={advice['largest_batch']}")
    return lines


def planned_device(s):
    """(device, dtype) of a plan: 'cuda' may be planned for where there is none (with bfloat16, if
    dtype is 'auto')."""
    if s.device.startswith('cuda') and not torch.cuda.is_available():
        dtype = torch.bfloat16 if s.dtype == 'auto' else getattr(torch, s.dtype)
        return torch.device('cuda'), dtype
    device = pick_device(s.device)
    return device, pick_dtype(s.dtype, device)


def planned_config(s, data_root: Path) -> GPTConfig:
    """The settings' model; the data set says the vocabulary if it is prepared (else GPT-2's,
    50304)."""
    meta = read_meta(data_root / os.path.basename(s.dataset))
    shape = {key.name: getattr(s, key.name) for key in MODEL}
    return GPTConfig(vocab_size=meta['vocab_size'] if meta else 50304, **shape)


if __name__ == '__main__':
    configurator.run_program(main)
