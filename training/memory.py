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
from itertools import groupby

import torch
from rich.console import Console
from rich.table import Table

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import nice_bytes, parse_bytes
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from kv.console import output, print_table
from training.device import pick_device, pick_dtype
from training.memory_plan import USABLE, Plans
from training.memory_use import free_memory, measure
from training.recompute import policy_of


def main(argv=None):
    s = configurator.parse('memory', argv, usage=__doc__, echo=False)
    for name in ('batch_size', 'gradient_accumulation_steps'):
        if getattr(s, name) < 1:
            raise UserError(f'{name}={getattr(s, name)}: must be at least 1')
    if s.device.startswith('cuda') and not torch.cuda.is_available():
        device = torch.device('cuda')  # the target, with bfloat16 if dtype is 'auto'
        dtype = torch.bfloat16 if s.dtype == 'auto' else getattr(torch, s.dtype)
        if not s.budget:
            raise UserError('there is no CUDA device here to ask what is free: say what it has, as '
                            '--budget=8GB')
    else:
        device = pick_device(s.device)
        dtype = pick_dtype(s.dtype, device)
    meta = read_meta(DATA_ROOT / os.path.basename(s.dataset))
    vocab_size = meta['vocab_size'] if meta else 50304  # GPT-2's, if the data set is not prepared
    config = GPTConfig(vocab_size=vocab_size, **{key.name: getattr(s, key.name) for key in MODEL})
    budget = parse_bytes(s.budget) if s.budget else int(USABLE * free_memory(device))
    console = output()
    with Console(stderr=True).status('predicting') as status:  # on a terminal only
        plans = Plans(s, config, device, dtype)
        rows = plans.rows(budget, status.update)
    if not any(row['largest_batch'] for row in rows):
        raise UserError(f'budget={s.budget!r}: nothing fits; {plans.least_peak(1, budget)}')
    m, advice = plans.memory('none'), recommend(rows, s.batch_size)
    kernels, dtype = plans.predictor.device, str(dtype).removeprefix('torch.')
    title = f'micro-batches of {s.block_size:,} tokens in {nice_bytes(budget)}'
    print_table(console, _policy_table(rows, s.batch_size), title)
    lines = [f'parameters {nice_bytes(m.parameters)}, gradients {nice_bytes(m.gradients)}, '
             f'optimizer {nice_bytes(m.optimizer)} are in every peak; {dtype} arithmetic']
    lines += _advice_lines(advice)
    if kernels.type != device.type:
        lines.append(f"There is no {device.type} here: these are the tensors of the CPU's kernels, "
                     'without offloading')
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if s.json:
        print(json.dumps({
            'budget': budget, 'device': str(device), 'kernels': str(kernels),
            'dtype': dtype, 'block_size': s.block_size, 'policies': rows,
            'parameters': m.parameters, 'gradients': m.gradients, 'optimizer': m.optimizer,
            **advice}))


def recommend(rows: list[dict], batch_size: int) -> dict:
    """Choose from `Plans.rows`: the fastest policy that fits this batch_size (or None), the fastest
    that fits at all, and the fastest one with the largest micro-batch."""
    largest = max(rows, key=lambda row: row['largest_batch'])
    fastest = next(row for row in rows if row['largest_batch'])
    at_batch_size = next((row['policy'] for row in rows if row['fits']), None)
    return {'at_batch_size': at_batch_size, 'batch_size': batch_size,
            'largest': largest['policy'], 'largest_batch': largest['largest_batch'],
            'fastest': fastest['policy'], 'fastest_batch': fastest['largest_batch']}


def _advice_lines(advice):
    at = advice['at_batch_size']
    yours = f'--recompute={at} is the fastest that fits' if at else 'nothing fits'
    lines = [f"batch_size={advice['batch_size']}: {yours}",
             f"without recomputing more than needed: --recompute={advice['fastest']} "
             f"--batch_size={advice['fastest_batch']}"]
    if advice['largest'] != advice['fastest']:
        lines.append(f"largest micro-batch: --recompute={advice['largest']} "
                     f"--batch_size={advice['largest_batch']}")
    return lines


def print_memory_report(run, dtype: torch.dtype) -> None:
    """Print, on rank 0, the report of train.py's --memory_report for a `Run` that has its first
    batch. The run's random state, data and gradients are left unchanged."""
    s, console = run.s, output()
    plans = Plans(s, run.model.config, run.device, dtype, run.ranks.world_size, run.optimizer)
    policy = policy_of(run.model)
    predicted = plans.memory(policy)
    try:
        measured = measure(run.model, run.batch, autocast=run.autocast, optimizer=plans.optimizer,
                           accumulate=plans.accumulate)
    except torch.OutOfMemoryError:
        measured = None
    eager = '; compiled, less' if s.compile else ''
    console.print(f'Memory of a step: {s.batch_size} x {s.block_size:,} tokens, '
                  f'recompute={policy!r}{eager}', style='italic', highlight=False)
    print_table(console, _parts_table(predicted, measured))
    if measured is None:
        console.print(f'measured: it does not fit on {run.device}', highlight=False)
    kinds = _table('', 'predicted', 'measured')
    for kind, n in sorted(predicted.by_kind.items(), key=lambda item: -item[1]):
        kinds.add_row(kind, _size(n), _size(measured and measured.by_kind.get(kind, 0)))
    print_table(console, kinds, '\nactivations by kind')
    print_table(console, _blocks_table(predicted, measured, run.model.plan.layers),
                '\nactivations by block (each)')
    print_table(console, _policy_table(plans.rows(), s.batch_size), '\nevery policy, predicted')
    console.print('\nTraining begins. (python -m training.memory reports without training.)')


def _table(*columns):
    table = Table(box=None, pad_edge=False, header_style='bold')
    for i, name in enumerate(columns):
        table.add_column(name, justify='right' if i else 'left', no_wrap=True)
    return table


def _size(n):
    return '-' if n is None else nice_bytes(n)


def _parts_table(predicted, measured):
    table = _table('', 'predicted', 'measured')
    parts = {'parameters': 'parameters', 'gradients': 'gradients', 'optimizer': 'optimizer state',
             'activations': 'activations', 'loss_peak': 'logits and loss', 'peak': 'peak'}
    if predicted.offloaded:
        parts['offloaded'] = 'on the host'
    for part, name in parts.items():
        table.add_row(name, _size(getattr(predicted, part)),
                      _size(measured and getattr(measured, part)),
                      style='bold' if part == 'peak' else None)
    return table


def _blocks_table(predicted, measured, layers):
    """Make a table with a row per series of blocks of the same type and size."""
    table = _table('blocks', 'kind', 'predicted', 'measured')
    measured_blocks = measured.by_block if measured else [None] * len(layers)
    rows = list(zip([layer.kind for layer in layers], predicted.by_block, measured_blocks))
    for (kind, p, m), group in groupby(range(len(rows)), key=lambda i: rows[i]):
        first, *others = group
        blocks = f'{first} to {others[-1]}' if others else str(first)
        table.add_row(blocks, kind, _size(p), _size(m))
    outside = [memory and memory.activations - sum(memory.by_block)
               for memory in (predicted, measured)]
    table.add_row('outside', '', *map(_size, outside))
    return table


def _policy_table(rows, batch_size):
    """Make a table of `Plans.rows`; with a budget also of the largest micro-batches."""
    columns = ['recompute', 'activations', f'peak at {batch_size}', 'FLOPs']
    has_budget = 'largest_batch' in rows[0]
    table = _table(*columns, *(('fits', 'largest', 'its peak') if has_budget else ()))
    for row in rows:
        cells = [row['policy'], _size(row['activations']), _size(row['peak']),
                 f"+{row['recomputed']:.1%}"]
        if has_budget:
            cells += ['yes' if row['fits'] else 'no', f"{row['largest_batch']:,}",
                      _size(row['largest_peak'])]
        table.add_row(*cells)
    return table


if __name__ == '__main__':
    configurator.run_program(main)
