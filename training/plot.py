"""Draw the losses of one or more runs from the metrics.jsonl that train.py writes.

    python -m training.plot out-mqa-local    # writes out-mqa-local/loss.png
    python -m training.plot out-vanilla out-mqa-local --out=compare.png --x=tokens
    python -m training.plot out --smooth=50 --log_y

The upper panel shows the training loss as logged (points), its running mean (dashed) and the
validation loss (circles on a line); the lower ones, if logged, the gradient norm before clipping
and the learning rate. A table on the terminal lists the last and best validation loss of each run.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import argparse
import functools
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
DASHES = ('-', '--', ':', '-.')  # the eighth run reuses the first colour with the next style
DASHED = dict(linestyle=(0, (4, 2)))  # running means
X_LABELS = {'iter': 'iteration', 'tokens': 'training tokens',
            'time': 'training time without evaluations'}


@dataclass
class Curves:
    """Columns of one run's log, float64 of equal length, NaN where a value was not logged.

    x has 'iter', 'tokens' and 'time' (seconds) at the time when the loss was measured.
    """
    name: str
    x: dict[str, np.ndarray]
    loss: np.ndarray
    val_loss: np.ndarray
    lr: np.ndarray
    grad_norm: np.ndarray
    tokens_per_second: np.ndarray


def read_run(folder: str) -> Curves:
    """Read the curves in `folder`/metrics.jsonl. Raises UserError if there are none."""
    path = Path(folder) / 'metrics.jsonl'
    if not Path(folder).is_dir():
        raise UserError(f'no folder {folder!r}: give the out_dir of a run')
    if not path.is_file():
        raise UserError(f'no metrics.jsonl in {folder!r}: give the out_dir of a run of train.py')
    try:
        rows = read_metrics(path)
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'{path} cannot be read: {e}') from e
    if not rows:
        raise UserError(f'{path} has no complete line: nothing was logged yet')
    names = ('iter', 'loss', 'val_loss', 'lr', 'grad_norm', 'time_ms', 'tokens_per_second')
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
    unit, scale = unit_of(x, max(run.x[x].max() for run in runs))
    curves = [(run.x[x] / scale, running_mean(run.loss, _width(run, smooth)), run) for run in runs]
    panels = {'grad_norm': functools.partial(_draw_norms, smooth=smooth), 'lr': _draw_rates}
    below = [panel for name, panel in panels.items()
             if not all(np.isnan(getattr(run, name)).all() for run in runs)]
    with subplots(1 + len(below), sharex=True, squeeze=False, figsize=(8, 4.2 + 0.8 * len(below)),
                  layout='constrained', height_ratios=[5] + [1] * len(below)) as (figure, axes):
        _draw_losses(axes[0, 0], curves, log_y)
        for axis, panel in zip(axes[1:, 0], below):
            panel(axis, curves)
        for axis in axes[:, 0]:
            axis.set_axisbelow(True)  # the grid under the points
        axes[-1, 0].set_xlabel(X_LABELS[x] + unit)
        axes[-1, 0].xaxis.set_major_formatter(lambda value, _: f'{value:,g}')
        save(figure, path, dpi=150)


def _width(run, smooth):
    return smooth or max(1, len(run.loss) // 50)


def _style(k):
    return dict(color=COLOURS[k % len(COLOURS)], linestyle=DASHES[k // len(COLOURS) % len(DASHES)])


def _draw_logged(axis, k, x, y, mean, points):
    if points:
        axis.plot(x, y, '.', zorder=1, color=COLOURS[k % len(COLOURS)], alpha=0.5, markersize=5,
                  markeredgewidth=0)
    axis.plot(x, mean, linewidth=1.1, alpha=0.65, zorder=2, **_style(k) | DASHED)


def _draw_losses(axis, curves, log_y):
    names = short_names([run.name for _, _, run in curves])
    logged = len(curves) <= MOST_LOGGED
    for k, (x, mean, run) in enumerate(curves):
        evaluated = ~np.isnan(run.val_loss)
        label = names[k].replace('$', r'\$')  # matplotlib's $ starts a formula
        if evaluated.any():
            label += f' ({np.nanmin(run.val_loss):.4f})'
        _draw_logged(axis, k, x, run.loss, mean, logged)
        axis.plot(x[evaluated], run.val_loss[evaluated], linewidth=1.6, marker='o',
                  markersize=4.5, markeredgecolor='white', markeredgewidth=0.7, zorder=3,
                  label=label, **_style(k))
    low, high = loss_range(curves)
    margin = 0.05 * (high - low)
    limits = low - margin, high + margin
    if log_y and low > 0:
        axis.set_yscale('log')
        plain_log_ticks(axis.yaxis, low, high, subs=(1, 2, 3, 5))
        margin = (high / low) ** 0.05
        limits = low / margin, high * margin
    if high > low:
        axis.set_ylim(*limits)
    axis.set_ylabel('loss (nats per token)')
    title = 'dashed: running mean of the training loss    circles: validation loss'
    if logged:
        title = f'points: training loss as logged    {title}'
    axis.set_title(title, loc='left', fontsize=8, color='#666666')
    axis.legend(loc='upper right', title='run (best validation loss)', title_fontsize=8,
                fontsize=8, alignment='left')


def loss_range(curves) -> tuple[float, float]:
    """Return the minimum and maximum of running means and validation losses; (0, 1) if none."""
    losses = np.concatenate([y for _, mean, run in curves for y in (mean, run.val_loss)])
    losses = losses[~np.isnan(losses)]
    return (float(losses.min()), float(losses.max())) if len(losses) else (0.0, 1.0)


def _draw_norms(axis, curves, smooth):
    """Draw gradient norms on a logarithmic axis, because of spikes; zeros are left out."""
    for k, (x, _, run) in enumerate(curves):
        norm = np.where(run.grad_norm > 0, run.grad_norm, math.nan)
        mean = running_mean(norm, _width(run, smooth))
        _draw_logged(axis, k, x, norm, mean, len(curves) <= MOST_LOGGED)
    low, high = axis.dataLim.intervaly
    if 0 < low <= high < math.inf:
        axis.set_yscale('log')
        subs = (1, 3) if high < 30 * low else (1,)
        plain_log_ticks(axis.yaxis, low, high, most=3, subs=subs)
    axis.set_ylabel('grad norm')


def _draw_rates(axis, curves):
    for k, (x, _, run) in enumerate(curves):
        axis.plot(x, run.lr, linewidth=1.2, **_style(k))
    axis.set_ylabel('learning rate')
    axis.set_ylim(bottom=0)
    axis.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3), useMathText=True)


def unit_of(x: str, highest: float) -> tuple[str, float]:
    """Return the unit of the x axis: a suffix for its label, and a divisor."""
    units = {'iter': [('', 1.0)],
             'tokens': [(' (billions)', 1e9), (' (millions)', 1e6), (' (thousands)', 1e3), ('', 1)],
             'time': [(' (hours)', 3600.0), (' (minutes)', 60.0), (' (seconds)', 1.0)]}[x]
    return next((unit for unit in units if highest >= 2 * unit[1]), units[-1])


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
    parser.add_argument('--x', default='iter', choices=tuple(X_LABELS),
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
