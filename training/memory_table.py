"""What `--memory_report` prints before a run: figures predicted and measured, by block and kind, and what each policy costs."""
from itertools import groupby

import torch
from rich.console import Console
from rich.table import Table

from config.sizes import nice_bytes
from kv.tables import titled
from training.memory_plan import Plans
from training.memory_use import measure
from training.recompute import policy_of

PARTS = ('parameters', 'gradients', 'optimizer', 'activations', 'loss_peak', 'peak')


def print_memory_report(run, dtype: torch.dtype, console: Console | None = None) -> None:
    """The report of a `Run` that has its first batch; on rank 0 only. The run is as before: random numbers, data, gradients.

    Measured is one forward and backward pass over that batch, with the model as it is, not compiled.
    """
    s, console = run.s, console or Console()
    plans = Plans(s, run.model.config, run.device, dtype, run.ranks.world_size, run.optimizer)
    policy = policy_of(run.model)
    predicted = plans.memory(policy)
    try:
        measured = measure(run.model, run.batch, autocast=run.autocast, optimizer=plans.optimizer, accumulate=plans.accumulate)
    except torch.OutOfMemoryError:
        measured = None
    eager = '; compiled, less' if s.compile else ''
    title = f'Memory of a step: {s.batch_size} x {s.block_size:,} tokens, recompute={policy!r}{eager}'
    console.print(title, style='italic', highlight=False)
    console.print(_parts_table(predicted, measured))
    if measured is None:
        console.print(f'measured: it does not fit on {run.device}', highlight=False)
    console.print(titled('\nactivations by kind', _kinds_table(predicted, measured)))
    console.print(titled('\nactivations by block (each)',
                         _blocks_table(predicted, measured, run.model.plan.layers)))
    console.print(titled('\nevery policy, predicted', policy_table(plans.rows(), s.batch_size)))
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
    for part in PARTS:
        name = {'loss_peak': 'logits and loss', 'optimizer': 'optimizer state'}.get(part, part)
        table.add_row(name, _size(getattr(predicted, part)), _size(measured and getattr(measured, part)),
                      style='bold' if part == 'peak' else None)
    if predicted.offloaded:
        table.add_row('on the host', _size(predicted.offloaded), _size(measured and measured.offloaded))
    return table


def _kinds_table(predicted, measured):
    table = _table('', 'predicted', 'measured')
    for kind, n in sorted(predicted.by_kind.items(), key=lambda item: -item[1]):
        table.add_row(kind, _size(n), _size(measured and measured.by_kind.get(kind, 0)))
    return table


def _blocks_table(predicted, measured, layers):
    """Blocks in a row that are of one kind and keep the same are one line."""
    table = _table('blocks', 'kind', 'predicted', 'measured')
    shown = [(layer.kind, p, m) for layer, p, m in
             zip(layers, predicted.by_block, measured.by_block if measured else [None] * len(layers))]
    for (kind, p, m), group in groupby(range(len(shown)), key=lambda i: shown[i]):
        first, *others = group
        table.add_row(f'{first} to {others[-1]}' if others else str(first), kind, _size(p), _size(m))
    rest = predicted.activations - sum(predicted.by_block)
    table.add_row('outside', '', _size(rest), _size(measured and measured.activations - sum(measured.by_block)))
    return table


def policy_table(rows: list[dict], batch_size: int) -> Table:
    """Rows of `Plans.rows`: peak at this batch_size, further FLOPs of a step; with a budget the largest micro-batch."""
    budgeted = 'largest_batch' in rows[0]
    table = _table('recompute', 'activations', f'peak at {batch_size}', 'FLOPs',
                   *(('fits', 'largest', 'its peak') if budgeted else ()))
    for row in rows:
        cells = [row['policy'], _size(row['activations']), _size(row['peak']), f"+{row['recomputed']:.1%}"]
        if budgeted:
            cells += ['yes' if row['fits'] else 'no', f"{row['largest_batch']:,}", _size(row['largest_peak'])]
        table.add_row(*cells)
    return table
