"""Shared by all plots: matplotlib without a display, one style, readable logarithmic axes, and
names next to points."""
import contextlib
import itertools
from pathlib import Path

from common.errors import UserError
from common.files import replacing

STYLE = {'figure.facecolor': 'white', 'axes.facecolor': 'white',
         'text.color': '#1f2328', 'axes.labelcolor': '#1f2328', 'axes.edgecolor': '#8c959f',
         'xtick.color': '#57606a', 'ytick.color': '#57606a', 'grid.color': '#d0d7de',
         'font.size': 10, 'axes.grid': True, 'grid.linewidth': 0.6,
         'axes.spines.top': False, 'axes.spines.right': False, 'legend.frameon': False,
         'legend.fontsize': 8.5, 'figure.dpi': 110, 'savefig.bbox': 'tight',
         'lines.linewidth': 1.6}
COLOURS = [f'C{k}' for k in range(10) if k != 7]  # without matplotlib's grey


def pyplot(alternative: str = ''):
    """Import matplotlib.pyplot without a display. Raises UserError if matplotlib is missing;
    `alternative` tells the user what to do instead."""
    try:
        import matplotlib
    except ImportError as e:
        raise UserError(f'plots need matplotlib: pip install matplotlib{alternative}') from e
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    return plt


@contextlib.contextmanager
def subplots(**kwargs):
    """Like `pyplot.subplots`, in the shared style; yields (figure, axes) and closes the figure."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(**kwargs)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def save(figure, path, **kwargs) -> None:
    """Write a figure; a link is replaced, not followed. Raises UserError if the path is not
    writable or has an unknown suffix."""
    try:
        with replacing(Path(path)) as temporary:
            figure.savefig(temporary, format=Path(path).suffix[1:], **kwargs)
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be written: {e}') from e


def plain_log_ticks(axis, low, high, subs=(1, 2, 5)):
    """Label the x or y axis 2, 5, 10 rather than 2 x 10^0. If `high` is at most four times
    `low`, use up to seven evenly spaced ticks."""
    from matplotlib import ticker
    narrow = high < 4 * low
    axis.set_major_locator(ticker.MaxNLocator(7) if narrow else ticker.LogLocator(subs=subs))
    axis.set_major_formatter(lambda value, _: f'{value:,.10g}')
    axis.set_minor_locator(ticker.NullLocator())


def name_points(axis, points):
    """Write names next to points (x, y, name, colour, far). A name that would cover another name or
    a point is moved up or down, with a line to its point, by at most `far` (in 1/72 inch), or
    omitted. Call it when the axes have their final limits and scales."""
    from matplotlib.transforms import Bbox
    renderer = axis.figure.canvas.get_renderer()
    pixels = axis.transData.transform([point[:2] for point in points])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in pixels]
    sides = {1: 'left', -1: 'right', 0: 'center'}  # of the text, if it is to that side of the point
    for x, y, name, colour, far in points:
        places = itertools.product(sides, range(-far, far + 1, 12))
        for side, up in sorted(places, key=lambda place: abs(place[1]) - 10 * abs(place[0])):
            shift = side * (8 + abs(up) / 4)
            label = axis.annotate(name, (x, y), (shift, up), textcoords='offset points',
                                  ha=sides[side], va='center', fontsize=8, color=colour)
            box = label.get_window_extent(renderer).padded(1)
            inside = axis.bbox.x0 <= box.x0 and axis.bbox.y0 <= box.y0 <= box.y1 <= axis.bbox.y1
            if inside and box.x1 <= axis.figure.bbox.x1 and box.count_overlaps(taken) == 0:
                taken.append(box)
                if abs(up) > 12:
                    axis.annotate('', (x, y), (shift, up), textcoords='offset points',
                                  arrowprops=dict(arrowstyle='-', color=colour, lw=0.5, shrinkB=4))
                break
            label.remove()
