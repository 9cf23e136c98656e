"""Shared by all plots: matplotlib without a display, one style, readable logarithmic axes, and
names next to points and the ends of lines."""
import contextlib
import itertools
from pathlib import Path

from config.errors import UserError
from config.files import replacing

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


def context_axes(axis, contexts):
    """Make both axes logarithmic, with x labels at the given context lengths."""
    axis.set_xscale('log', base=2)
    axis.set_yscale('log')
    axis.set_xticks(contexts, [f'{n:,}' for n in contexts])
    plain_log_ticks(axis.yaxis, *axis.get_ylim())


def label_line_ends(axis, gap: float = 0.052, fontsize: float = 8.5):
    """Write each line's label next to its end, at least `gap` of the axis height apart."""
    axis.autoscale_view()
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = [(line.get_xydata()[-1], line) for line in axis.lines
            if len(line.get_xydata()) and not line.get_label().startswith('_')]
    ends.sort(key=lambda end: end[0][1])
    places = [to_axes.transform(end)[1] for end, _ in ends]
    for _ in range(200):  # labels that are too close push each other away
        for k in range(len(places) - 1):
            lack = gap - (places[k + 1] - places[k])
            if lack > 1e-4:
                places[k] -= lack / 2
                places[k + 1] += lack / 2
    for place, (end, line) in zip(places, ends):
        arrow = dict(arrowstyle='-', color=line.get_color(), lw=0.6, shrinkA=1, shrinkB=3)
        axis.annotate(line.get_label(), end, (1.05, place), textcoords='axes fraction',
                      fontsize=fontsize, va='center', color=line.get_color(), arrowprops=arrow)


def name_points(axis, points):
    """Write names next to points (x, y, name, colour, far), the first ones first. A name that would
    cover another name or a point is moved up or down, with a line to its point, by at most `far`
    (in 1/72 inch); if there is no room it is omitted. Call it when the axes have their final limits
    and scales."""
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
