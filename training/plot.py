"""Draw the losses of one or more runs from the metrics.jsonl that train.py writes.

    python -m training.plot out-mqa-local    # writes out-mqa-local/loss.png
    python -m training.plot out-vanilla out-mqa-local --out=compare.png --x=tokens
    python -m training.plot out --smooth=50 --log_y

The figure shows the training loss as logged (points), its running mean (dashed) and the validation
loss (circles on a line). A table on the terminal lists the last and best losses of each run.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from rich.text import Text

from config.errors import UserError
from configurator import run_program
from kv.console import output, print_table
from training.log import read_metrics
from training.plotting import plain_log_ticks, save, subplots

# Okabe and Ito's palette for colour-blind readers (https://jfly.uni-koeln.de/color/), less yellow
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
MOST_LOGGED = 3  # with more runs, the points of the logged losses would hide the lines
UNITS = {'iter': ('iteration', 1), 'tokens': ('training tokens (millions)', 1e6),
         'time': ('training time without evaluations (minutes)', 60)}


@dataclass
class Curves:
    """Columns of one run's log, float64 of equal length, NaN where a value was not logged.

    x has 'iter', 'tokens' and 'time' (seconds) at the time when the loss was measured.
    """
    name: str
    x: dict[str, np.ndarray]
    loss: np.ndarray
    val_loss: np.ndarray
    tokens_per_second: np.ndarray


def read_run(folder: str) -> Curves:
    """Read the curves in `folder`/metrics.jsonl. Raises UserError if there are none."""
    path = Path(folder) / 'metrics.jsonl'
    if not path.is_file():
        raise UserError(f'no metrics.jsonl in {folder!r}: give the out_dir of a run of train.py')
    try:
        rows = read_metrics(path)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{path} cannot be read: {e}') from e
    if not rows:
        raise UserError(f'{path} has no complete line: nothing was logged yet')
    names = ('iter', 'loss', 'val_loss', 'time_ms', 'tokens_per_second')
    columns = {name: _column(rows, name, path) for name in names}
    missing_iter = np.isnan(columns['iter'])
    if missing_iter.any():
        raise UserError(f'{path}: line {int(missing_iter.argmax()) + 1} has no iter')
    seconds = columns.pop('time_ms') / 1000  # per step, averaged since the previous line
    x = {'iter': columns.pop('iter')}
    x['time'] = _total(x['iter'], seconds)
    x['tokens'] = _total(x['iter'], np.round(seconds * columns['tokens_per_second']))
    return Curves(name=folder, x=x, **columns)


def _column(rows, name, path):
    try:
        column = np.array([math.nan if row.get(name) is None else float(row[name])
                           for row in rows])
        return np.where(np.isfinite(column), column, math.nan)
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{path} is not a metrics.jsonl of train.py: {name} is not a number in '
                        'every line') from e


def _total(iters, per_step):
    """Sum `per_step`, assumed constant between lines, over the steps before each logged one."""
    return np.cumsum(np.diff(iters, prepend=0) * per_step)


def running_mean(y: np.ndarray, n: int) -> np.ndarray:
    """Return the mean of the `n` values around each, fewer at the ends, ignoring NaN."""
    known = ~np.isnan(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    i = np.arange(len(y))
    low, high = np.maximum(i - (n - 1) // 2, 0), np.minimum(i + n // 2 + 1, len(y))
    with np.errstate(invalid='ignore', divide='ignore'):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def draw(runs: list[Curves], path: Path, x: str = 'iter', smooth: int = 0,
         log_y: bool = False) -> None:
    """Write the figure. smooth: number of values in the running mean; 0 = a fiftieth of a run.

    Raises UserError if matplotlib is missing, `path` cannot be written (or has an unknown suffix),
    or a run did not log the values needed for `x`.
    """
    for run in runs:
        if np.isnan(run.x[x]).any():
            raise UserError(f'{run.name}: its metrics.jsonl has lines without time_ms or '
                            'tokens_per_second: use --x=iter')
    label, unit = UNITS[x]
    with subplots(figsize=(8, 5), layout='constrained') as (figure, axis):
        for k, (run, name) in enumerate(zip(runs, short_names([run.name for run in runs]))):
            _draw_lines(axis, run, run.x[x] / unit, smooth, name, COLOURS[k % len(COLOURS)])
        if log_y and 0 < axis.dataLim.y0 < math.inf:
            axis.set_yscale('log')
            plain_log_ticks(axis.yaxis, *axis.dataLim.intervaly, subs=(1, 2, 3, 5))

        limits = axis.get_ylim()  # single losses may lie outside
        for k, run in enumerate(runs if len(runs) <= MOST_LOGGED else []):
            axis.plot(run.x[x] / unit, run.loss, '.', color=COLOURS[k], alpha=0.25, markersize=4,
                      markeredgewidth=0, zorder=1)
        axis.set_ylim(limits)
        axis.set(xlabel=label, ylabel='loss (nats per token)')
        axis.xaxis.set_major_formatter(lambda value, _: f'{value:,.10g}')
        axis.set_axisbelow(True)  # the grid under the points
        axis.set_title('points: training loss    dashed: its running mean    '
                       'circles: validation loss', loc='left', fontsize=8, color='#666666')
        axis.legend(loc='upper right', title='run (best validation loss)', title_fontsize=8)
        save(figure, path, dpi=150)


def _draw_lines(axis, run, x, smooth, name, colour):
    mean = running_mean(run.loss, smooth or max(1, len(run.loss) // 50))
    axis.plot(x, mean, '--', color=colour, linewidth=1.2)

    evaluated = ~np.isnan(run.val_loss)
    label = name.replace('$', r'\$')  # matplotlib's $ starts a formula
    if evaluated.any():
        label += f' ({np.nanmin(run.val_loss):.4f})'
    axis.plot(x[evaluated], run.val_loss[evaluated], color=colour, marker='o', markersize=4.5,
              markeredgecolor='white', markeredgewidth=0.7, zorder=3, label=label)


def short_names(folders: list[str]) -> list[str]:
    """Return the last part of each path, or the full path if two runs have the same one."""
    names = [Path(folder).resolve().name for folder in folders]
    return [folder if names.count(name) > 1 else name for folder, name in zip(folders, names)]


def table(runs: list[Curves]) -> Table:
    """Make a table of each run's iterations, losses and speed."""
    out = Table(box=None, header_style='bold', pad_edge=False)
    out.add_column('run', overflow='fold')
    for title in ('iterations', 'train', 'val', 'best val', 'at', 'tokens/s'):
        out.add_column(title, justify='right', no_wrap=True)
    for run, name in zip(runs, short_names([run.name for run in runs])):
        evaluated = np.flatnonzero(~np.isnan(run.val_loss))
        losses, rates = (y[~np.isnan(y)] for y in (run.loss, run.tokens_per_second))
        last = val = best = best_at = rate = '-'
        if len(losses):
            last = f'{losses[-1]:.4f}'
        if len(evaluated):
            k = evaluated[run.val_loss[evaluated].argmin()]
            val, best = f'{run.val_loss[evaluated[-1]]:.4f}', f'{run.val_loss[k]:.4f}'
            best_at = f"{run.x['iter'][k]:,.0f}"
        if len(rates):
            rate = f'{np.median(rates):,.0f}'
        out.add_row(Text(name), f"{run.x['iter'][-1]:,.0f}", last, val, best, best_at, rate)
    return out


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog='python -m training.plot', description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR',
                        help='folder with a metrics.jsonl, written by train.py')
    parser.add_argument('--out', metavar='FILE', help='figure to write: .png, .svg or .pdf '
                                                      '(loss.png in the first OUT_DIR)')
    parser.add_argument('--x', default='iter', choices=tuple(UNITS),
                        help='unit of the x axis (iter)')
    parser.add_argument('--smooth', default=0, type=int, metavar='N',
                        help='logged values in the running mean of the training loss '
                             '(a fiftieth of the run)')
    parser.add_argument('--log_y', action='store_true', help='logarithmic loss axis')
    args = parser.parse_args(argv)
    if args.smooth < 0:
        parser.error(f'argument --smooth: {args.smooth}: must be 1 or more')
    runs = [read_run(folder) for folder in args.out_dirs]
    path = Path(args.out or Path(args.out_dirs[0]) / 'loss.png')
    path = path if path.suffix else path.with_name(path.name + '.png')
    draw(runs, path, args.x, args.smooth, args.log_y)
    print_table(output(), table(runs))
    print(f'wrote {path}')


if __name__ == '__main__':
    run_program(main)
