"""Draw the losses of one or more runs from the metrics.jsonl that train.py writes.

    python -m training.plot out-mqa-local    # writes out-mqa-local/loss.png
    python -m training.plot out-vanilla out-mqa-local --out=compare.png --x=tokens

The figure shows the training loss as logged (a pale line) and the validation loss (circles).
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import itertools
import math
from pathlib import Path

import numpy as np

from common.errors import UserError
from configurator import run_program
from data.making.script import Arguments
from training.loop.log import read_metrics
from training.plot.figures import COLOURS, save, subplots

COLUMNS = 'iter', 'loss', 'val_loss', 'time_ms', 'tokens_per_second'
UNITS = {'iter': ('iteration', 1), 'tokens': ('training tokens (millions)', 1e6),
         'time': ('training time without evaluations (minutes)', 60)}


def read_run(folder: str, x: str = 'iter') -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read `folder`/metrics.jsonl: x (iterations, tokens or seconds before each loss was measured),
    losses and validation losses, NaN where there is none. UserError if it has no such curves."""
    path = Path(folder) / 'metrics.jsonl'
    rows = ([math.nan if row.get(name) is None else float(row[name]) for name in COLUMNS]
            for row in read_metrics(path))
    try:
        table = np.fromiter(map(tuple, rows), np.dtype((float, len(COLUMNS))))
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from e
    except (TypeError, ValueError, OverflowError) as e:
        raise UserError(f'{path} is not a metrics.jsonl of train.py: not every one of '
                        f'{", ".join(COLUMNS)} is a number') from e
    if not len(table):
        raise UserError(f'nothing was logged in {str(path)!r}: give the out_dir of a run of '
                        'train.py')
    iters, loss, val_loss, time_ms, rate = np.where(np.isfinite(table), table, math.nan).T
    seconds = time_ms / 1000  # per step, the mean since the previous line
    per_step = {'iter': np.ones_like(iters), 'time': seconds, 'tokens': np.round(seconds * rate)}[x]
    at = np.cumsum(np.diff(iters, prepend=0) * per_step)
    if np.isnan(at).any():
        raise UserError(f'{path} has lines without time_ms or tokens_per_second: use --x=iter')
    return at, loss, val_loss


def draw(folders: list[str], path: Path, x: str = 'iter') -> None:
    """Write the figure. Raises UserError as `read_run`, `subplots` and `save` do."""
    runs, (label, unit) = [read_run(folder, x) for folder in folders], UNITS[x]
    with subplots(figsize=(8, 5), layout='constrained') as (figure, axis):
        for folder, colour, (at, loss, val_loss) in zip(folders, itertools.cycle(COLOURS), runs):
            axis.plot(at / unit, loss, color=colour, alpha=0.35, linewidth=0.8)

            evaluated = ~np.isnan(val_loss)
            name = folder.replace('$', r'\$')  # matplotlib's $ starts a formula
            if evaluated.any():
                name += f' ({np.nanmin(val_loss):.4f})'
            axis.plot(at[evaluated] / unit, val_loss[evaluated], 'o-', color=colour, markersize=4.5,
                      label=name)

        axis.set(xlabel=label, ylabel='loss (nats per token)')
        axis.legend(loc='upper right', title='run (best validation loss)', title_fontsize=8)
        save(figure, path, dpi=150)


def main(argv=None):
    parser = Arguments(__doc__, prog='python -m training.plot')
    parser.add_argument('out_dirs', nargs='+', metavar='OUT_DIR',
                        help='folder with a metrics.jsonl, written by train.py')
    parser.add_argument('--out', metavar='FILE', type=Path,
                        help='figure to write: .png, .svg or .pdf (loss.png in the first OUT_DIR)')
    parser.add_argument('--x', default='iter', choices=tuple(UNITS),
                        help='unit of the x axis (%(default)s)')
    args = parser.parse_args(argv)
    path = args.out or Path(args.out_dirs[0]) / 'loss.png'
    path = path if path.suffix else path.with_suffix('.png')
    draw(args.out_dirs, path, args.x)
    print(f'wrote {path}')


if __name__ == '__main__':
    run_program(main)
