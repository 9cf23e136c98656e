"""The pictures of a report."""
from pathlib import Path

from lab.ablation.stats import enough
from lab.ablation.tables import models
from training.plot.figures import COLOURS, name_points, plain_log_ticks, save, subplots

# name -> title, in the order of the report
TITLES = {
    'pareto': 'Validation loss over KV bytes per token: down and to the left is better. Bars: '
              'standard deviation over the seeds; hollow: too few seeds for a bar. Rows without a '
              'name are in the tables',
    'identifiers': 'Loss on identifiers, minus that of the baseline, by the tokens since their '
                   'last use. Bars: 95% confidence interval, paired by seed. Right of the dashed '
                   'line: beyond the reach of all local layers',
    'lookup': 'Facts recalled by content over KV bytes: up and to the left is better. Small dots: '
              'single seeds. Rows without a name are in the tables',
}
SIDE = '#8b949e'  # grey


def write_all(summary: dict, folder: Path) -> list[str]:
    """Write the pictures. Those without data are omitted. Returns names in TITLES."""
    if not summary['pictures']:
        return []
    ladder = [row['name'] for row in summary['rows'] if not row['side']]
    color_of_row = dict(zip(ladder, COLOURS * len(ladder)))
    names = []
    for draw in (pareto, identifiers, lookup):
        with subplots(figsize=(7.2, 4.4)) as (figure, axis):
            draw(axis, summary, lambda row: color_of_row.get(row['name'], SIDE))
            if not axis.has_data():
                continue
            names.append(draw.__name__)
            # without the version of matplotlib
            save(figure, folder / f'{names[-1]}.png', metadata={'Software': None})
    return names


def pareto(axis, summary, color):
    """All rows."""
    points = [(row, row['kv']['bytes_per_token'], row['val_loss']['mean'])
              for row in models(summary) if 'val_loss' in row]
    for row, nbytes, mean in points:
        sd = row['val_loss']['sd'] if enough(row['val_loss']) else None
        axis.errorbar(nbytes, mean, yerr=sd, capsize=2, fmt='s' if row['side'] else 'o',
                      markersize=4 if row['side'] else 6, elinewidth=1, color=color(row),
                      markerfacecolor='none' if sd is None else color(row))
    over_bytes(axis, points, color, 'KV bytes per token', 'validation loss, nats per token')


def lookup(axis, summary, color):
    """Of the largest number of facts."""
    rows = [row for row in summary['rows'] if row.get('lookup')]
    if not rows:
        return
    most = list(rows[0]['lookup']['accuracy'])[-1]
    points = []
    for row in rows:
        found = row['lookup']
        each = [100 * x for x in found['accuracy'][most]['each']]
        mean, nbytes = 100 * found['accuracy'][most]['mean'], found['kv_bytes']
        axis.plot([nbytes] * len(each), each, '.', markersize=3, color=color(row))
        axis.plot(nbytes, mean, 's' if row['side'] else 'o', markersize=6, color=color(row))
        points.append((row, nbytes, mean))
    axis.set_ylim(-5, 105)
    over_bytes(axis, points, color, 'KV bytes, as allocated', f'recalled of {int(most):,} facts, %')


def identifiers(axis, summary, color):
    rows = [row for row in summary['rows'] if row.get('identifiers', {}).get('above_baseline')
            and (not row['side'] or row['identifiers']['alone'])]
    if not rows:
        return
    first = rows[0]['identifiers']
    keys = [key for key in first['count']
            if all(key in row['identifiers']['above_baseline'] for row in rows)]
    for k, row in enumerate(rows):
        found = [row['identifiers']['above_baseline'][key] for key in keys]
        at = [i + 0.06 * (k - len(rows) / 2) for i in range(len(keys))]  # apart, to be legible
        means = [each['mean'] for each in found]
        halves = [each['half_95'] if enough(each) else 0 for each in found]
        axis.plot(at, means, color=color(row), label=row['name'], linewidth=1)
        axis.errorbar(at, means, yerr=halves, fmt='.', color=color(row), elinewidth=1)
    axis.set_xticks(range(len(keys)), keys)
    if first['beyond'] and first['beyond'][0] in keys:
        axis.axvline(keys.index(first['beyond'][0]) - 0.5, color=SIDE, linestyle='--',
                     linewidth=1, label='_')
    axis.axhline(0, color=SIDE, linewidth=1, label='_')
    axis.set(xlabel='tokens since the last use (from a power of two to the next; new: none)',
             ylabel=f"nats of an identifier above {summary['baseline']}")
    axis.legend()


def over_bytes(axis, points, color, x_label: str, y_label: str) -> None:
    """Label both axes, the one of the bytes logarithmic, and the points (row, x, y)."""
    if not points:
        return
    axis.figure.set_size_inches(9.5, 5.6)
    axis.set(xscale='log', xlabel=x_label, ylabel=y_label)
    axis.margins(x=0.1)
    axis.ticklabel_format(axis='y', useOffset=False)
    plain_log_ticks(axis.xaxis, *axis.get_xlim(), subs=(1, 3))
    # in a crowd, only rows of the ladder are named
    name_points(axis, [(x, y, row['name'], color(row), 24 if row['side'] else 96)
                       for row, x, y in points])
