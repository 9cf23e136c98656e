"""The pictures of a report."""
import io
import math
from pathlib import Path

from config.sizes import nice_bytes
from lab.ablation.stats import enough
from lab.ablation.summary import local_reach
from lab.ablation.tables import models
from training.plotting import (COLOURS, context_axes, label_line_ends, name_points,
                               plain_log_ticks, subplots)

# name -> title, in the order of the report
TITLES = {
    'talk': 'Validation loss over KV bytes per token, from the baseline to the last row. Bars: 95% '
            'confidence interval of the difference from the baseline, paired by seed; hollow: too '
            'few seeds for an interval',
    'pareto': 'Validation loss over KV bytes per token: down and to the left is better. Bars: '
              'standard deviation over the seeds; hollow: too few seeds for a bar. Rows without a '
              'name are in the tables',
    'curves': 'Validation loss during training: mean of the seeds, shaded from lowest to highest',
    'gaps': 'Validation loss during training, minus the baseline\'s: mean of the seeds, shaded '
            'from lowest to highest, without the first tenth of the steps',
    'recovery': 'Training of converted weights; dashed: the model they were converted from; '
                'dotted: the same memory trained from scratch',
    'positions': 'Validation loss by position in the window',
    'identifiers': 'Loss on identifiers, minus that of the baseline, by the tokens since their '
                   'last use. Bars: 95% confidence interval, paired by seed. Right of the dashed '
                   'line: beyond the reach of all local layers',
    'lookup': 'Facts recalled by content over KV bytes: up and to the left is better. Small dots: '
              'single seeds. Rows without a name are in the tables',
    'recall': 'Recall by distance: bars are means, dots single seeds',
    'decode': 'Time per output token over cached tokens',
    'kv': 'KV bytes of one sequence over its length',
}
FEW = 3  # lines with fewer points have markers
SIDE = '#8b949e'  # grey


def draw_all(summary: dict, kind: str = 'png') -> dict[str, bytes]:
    """Return name in TITLES -> file ('png', 'svg' or 'pdf'). Pictures without data are omitted."""
    if not summary['pictures']:
        return {}
    ladder = [row['name'] for row in summary['rows'] if not row['side']]
    color_of_row = dict(zip(ladder, COLOURS * len(ladder)))

    def color(row):
        return color_of_row.get(row['name'], SIDE)
    files = {}
    # omit metadata that would change from run to run
    metadata = {'png': {'Software': None}, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}
    for draw in DRAWN:
        with subplots(figsize=(7.2, 4.4)) as (figure, axis):
            draw(axis, summary, color)
            if any(each.has_data() for each in figure.axes):
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata=metadata[kind])
                files[draw.__name__] = file.getvalue()
    return files


def not_drawn(summary: dict) -> list[str]:
    """Return a warning if there are too few evaluations during training to draw curves."""
    most = max((sum(i > 0 for i in row['evaluations']['iterations']) for row in summary['rows']
                if row.get('evaluations') and not row['side']), default=FEW)
    if not summary['pictures'] or most >= FEW:
        return []
    if not most:
        return ['no pictures of the losses while training: no row was evaluated after its first '
                'step; lower eval_interval']
    return [f"pictures of training show {most} evaluation{'s' * (most > 1)} after the first step: "
            'lower eval_interval for curves']


def write_all(summary: dict, folder: Path, also_as: str = '') -> list[str]:
    """Write the pictures as PNG and in the format `also_as`, if given, and delete those of an
    earlier report. Returns their names."""
    for name in TITLES:
        for kind in ('png', 'svg', 'pdf'):
            (folder / f'{name}.{kind}').unlink(missing_ok=True)
    for kind in {'png', also_as or 'png'}:
        for name, content in (files := draw_all(summary, kind=kind)).items():
            (folder / f'{name}.{kind}').write_bytes(content)
    return list(files)


def lines_of(summary, key):
    """Return the ladder's rows that have a value for `key`. If the value depends only on training,
    rows that share their weights are represented by the first."""
    seen, rows = set(), []
    for row in summary['rows']:
        repeated = key in ('evaluations', 'gap') and row.get('trained_as') in seen
        if not row['side'] and row.get(key) and not repeated:
            seen.add(row.get('trained_as'))
            rows.append(row)
    return rows


def log_bytes(row) -> float:
    return math.log(row['kv']['bytes_per_token'])


def talk_rows(summary) -> list[dict]:
    """Return up to five rows of the ladder from the baseline to the last, spaced as evenly as
    possible in the logarithm of their KV bytes, smallest first."""
    rows = [row for row in summary['rows'] if not row['side'] and 'val_loss' in row
            and (row['name'] == summary['baseline'] or row.get('against_baseline'))]
    while rows and rows[0]['name'] != summary['baseline']:
        rows = rows[1:]
    if len(rows) < 2:
        return []
    first, *between, last = rows
    shown = [first, last]
    for k in range(1, 4):
        wanted = log_bytes(first) + (log_bytes(last) - log_bytes(first)) * k / 4
        left = [row for row in between if row not in shown]
        if left:
            shown.append(min(left, key=lambda row: abs(log_bytes(row) - wanted)))
    return sorted(shown, key=log_bytes)


def talk(axis, summary, color):
    """A few rows in large type, for slides."""
    rows = talk_rows(summary)
    if not rows:
        return
    first = next(row for row in rows if row['name'] == summary['baseline'])
    axis.figure.set_size_inches(10, 5.6)
    for k, row in enumerate(rows):
        x, y = row['kv']['bytes_per_token'], row['val_loss']['mean']
        name, half = f"baseline:\n{row['name']}", 0
        certain = enough(row['val_loss' if row is first else 'against_baseline'])
        if row is not first:
            name = f"{row['name']}\n{first['kv']['bytes_per_token'] / x:.3g}x"
            half = row['against_baseline']['half_95'] if certain else 0
        axis.errorbar(x, y, yerr=half or None, fmt='o', markersize=13, capsize=7, elinewidth=2.5,
                      color=color(row), markerfacecolor=color(row) if certain else 'none')
        sign, side = (1, 'bottom') if k % 2 else (-1, 'top')
        axis.annotate(name, (x, y + sign * half), (0, sign * 14), ha='center', va=side,
                      textcoords='offset points', fontsize=15, color=color(row))
    axis.axhline(first['val_loss']['mean'], color=SIDE, linestyle='--', linewidth=1.5)
    axis.set_xscale('log')
    plain_log_ticks(axis.xaxis, *axis.get_xlim())
    axis.margins(x=0.2, y=0.25)
    axis.ticklabel_format(axis='y', useOffset=False)
    axis.tick_params(labelsize=14)
    axis.set_xlabel('KV bytes per token, and how many times smaller', fontsize=16)
    axis.set_ylabel('validation loss, nats', fontsize=16)


def pareto(axis, summary, color):
    """All rows, except those far off, which are named below."""
    rows = [row for row in models(summary) if 'val_loss' in row]
    near = without_outliers(rows)
    for row in near:
        certain = enough(row['val_loss'])
        axis.errorbar(row['kv']['bytes_per_token'], row['val_loss']['mean'],
                      yerr=row['val_loss']['sd'] if certain else None, capsize=2,
                      fmt='s' if row['side'] else 'o', markersize=4 if row['side'] else 6,
                      elinewidth=1, color=color(row),
                      markerfacecolor=color(row) if certain else 'none')
    far = '; '.join(f"{row['name']}: {row['val_loss']['mean']:.2f}"
                    for row in rows if row not in near)
    over_bytes(axis, [(row, row['kv']['bytes_per_token'], row['val_loss']['mean'])
                      for row in near], color,
               'KV bytes per token' + (f' (far above: {far})' if far else ''),
               'validation loss, nats per token')


def lookup(axis, summary, color):
    """Of the largest number of facts."""
    rows = summary.get('lookup_rows') or [row for row in summary['rows'] if row.get('lookup')]
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
    over_bytes(axis, points, color, 'KV bytes, as allocated',
               f'recalled of {int(most):,} facts, %')


def identifiers(axis, summary, color):
    rows = [row for row in summary['rows'] if row.get('identifiers', {}).get('above_baseline')
            and (not row['side'] or row['identifiers']['alone'])]
    if not rows:
        return
    first = rows[0]['identifiers']
    shown = without_outliers(rows)
    keys = [key for key in first['count']
            if all(key in row['identifiers']['above_baseline'] for row in shown)]
    for k, row in enumerate(shown):
        found = [row['identifiers']['above_baseline'][key] for key in keys]
        at = [i + 0.06 * (k - len(shown) / 2) for i in range(len(keys))]  # apart, to be legible
        means = [each['mean'] for each in found]
        halves = [each['half_95'] if enough(each) else 0 for each in found]
        axis.plot(at, means, color=color(row), label=row['name'], linewidth=1)
        axis.errorbar(at, means, yerr=halves, fmt='.', color=color(row), elinewidth=1)
    axis.set_xticks(range(len(keys)), keys)
    if first['beyond'] and first['beyond'][0] in keys:
        axis.axvline(keys.index(first['beyond'][0]) - 0.5, color=SIDE, linestyle='--',
                     linewidth=1, label='_')
    axis.axhline(0, color=SIDE, linewidth=1, label='_')
    label_axes(axis, 'tokens since the last use (from a power of two to the next; new: none)',
               f"nats of an identifier above {summary['baseline']}")


def over_bytes(axis, points, color, x_label: str, y_label: str) -> None:
    """Label both axes, the one of the bytes logarithmic, and the points (row, x, y)."""
    if not points:
        return
    axis.figure.set_size_inches(9.5, 5.6)
    axis.set_xscale('log')
    axis.margins(x=0.1)
    axis.ticklabel_format(axis='y', useOffset=False)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    plain_log_ticks(axis.xaxis, *axis.get_xlim(), subs=(1, 3))
    # in a crowd, only rows of the ladder are named
    name_points(axis, [(x, y, row['name'], color(row), 24 if row['side'] else 96)
                       for row, x, y in points])


def without_outliers(rows: list[dict]) -> list[dict]:
    """Drop the few worst rows if they are so far off that the others would look the same."""
    losses = sorted(row['val_loss']['mean'] for row in rows)
    for n_off in range(1, len(losses) // 4 + 1):
        near, off = losses[:-n_off], losses[-n_off]
        if off - near[-1] >= 2 * (near[-1] - near[0]):
            return [row for row in rows if row['val_loss']['mean'] < off]
    return rows


def line_with_range(axis, row, color, x, mean, low, high) -> None:
    axis.plot(x, mean, color=color, label=row['name'], marker='o' if len(x) < FEW else '')
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def label_axes(axis, x_label: str, y_label: str = 'validation loss, nats per token') -> None:
    """Label the axes and the ends of the lines."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    label_line_ends(axis)


def curves(axis, summary, color):
    rows = [row for row in lines_of(summary, 'evaluations')
            if max(row['evaluations']['iterations'], default=0) > 0]
    settled = []  # per row, the losses after the first tenth of its steps
    for row in rows:
        c, start = row['evaluations'], 0.1 * row['iterations']
        line_with_range(axis, row, color(row), c['iterations'], c['mean'], c['low'], c['high'])
        settled.append([loss for i, loss in zip(c['iterations'], c['mean']) if i >= start])
    x_label = 'iteration'
    # the steep drop in the first steps would flatten the rest
    if min(map(len, settled), default=0) >= FEW:
        low, high = min(map(min, settled)), max(map(max, settled))
        axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        x_label = 'iteration (losses of the first tenth are above the picture)'
    label_axes(axis, x_label)


def gaps(axis, summary, color):
    baseline = next(row for row in summary['rows'] if row['name'] == summary['baseline'])
    settled, rows = {}, []
    for row in lines_of(summary, 'gap'):
        points = [point for point in row['gap'] if point[0] >= 0.1 * row['iterations'] > 0]
        other = row is not baseline and not row['converted_from']
        if other and points and row['iterations'] == baseline['iterations']:
            settled[row['name']] = points
            rows.append(row)
    if not rows:
        return
    shown = without_outliers(rows)  # outliers would flatten the rest
    for row in shown:
        iterations, mean, low, high = zip(*settled[row['name']])
        line_with_range(axis, row, color(row), iterations, mean, low, high)
        if len(iterations) == 1:
            axis.vlines(iterations, low, high, color=color(row), linewidth=1)
    axis.axhline(0, color=SIDE, linewidth=1)
    outliers = ', '.join(row['name'] for row in rows if row not in shown)
    label_axes(axis, f'iteration (outliers, not shown: {outliers})' if outliers else 'iteration',
               f"nats per token above {summary['baseline']}")


def recovery(axis, summary, color):
    rows = [row for row in summary['rows'] if row['converted_from'] and row.get('evaluations')]
    ends = {}  # by label: several rows may start from the same row
    for k, row in enumerate(rows):
        curve, colour = row['evaluations'], f'C{k}'
        axis.plot(curve['iterations'], curve['mean'], color=colour, label=row['name'], marker='.')
        styles = {'origin': (row['converted_from'], '--', SIDE),
                  'scratch': (row['above'], ':', colour)}
        for source, (name, style, tint) in styles.items():
            if end := row['recovery'].get(source):
                label = f"{name} ({end['iterations']:,} iterations)"
                ends.setdefault(label, (end['mean'], style, tint))
    for label, (loss, style, tint) in ends.items():
        axis.axhline(loss, color=tint, linestyle=style, linewidth=1, label=label)
    label_axes(axis, 'iteration after the conversion')


def positions(axis, summary, color):
    for row in lines_of(summary, 'loss_by_position'):
        losses = row['loss_by_position']
        step = max(1, len(losses) // 32)
        blocks = [losses[i:i + step] for i in range(0, len(losses), step)]
        axis.plot([i * step + (step - 1) / 2 for i in range(len(blocks))],
                  [sum(block) / len(block) for block in blocks], color=color(row),
                  label=row['name'])
    label_axes(axis, 'position in the window')


def recall(axis, summary, color):
    """A panel of bars for each distance."""
    rows = [row for row in summary['rows'] if row.get('recall')][::-1]
    if not rows:
        return
    reach, figure = local_reach(rows), axis.figure
    distances = list(rows[0]['recall']['accuracy'])
    axis.remove()
    figure.set_size_inches(3 + 2.4 * len(distances), 1 + 0.27 * len(rows))
    panels = figure.subplots(1, len(distances), sharey=True, squeeze=False)[0]
    for distance, panel in zip(distances, panels):
        for k, row in enumerate(rows):
            accuracy = row['recall']['accuracy'][distance]
            each = [100 * x for x in accuracy['each']]
            panel.barh(k, 100 * accuracy['mean'], color=color(row), height=0.7, alpha=0.6)
            panel.plot(each, [k] * len(each), 'o', markersize=3.5,
                       color=panel.xaxis.label.get_color(), clip_on=False)
        panel.set_yticks(range(len(rows)), [row['name'] for row in rows], fontsize=8.5)
        panel.grid(False, axis='y')
        panel.set_xlim(0, 100)
        panel.set_xlabel('named right, %')
        beyond = f', beyond local layers ({reach})' if int(distance) > reach > 0 else ''
        panel.set_title(f'{int(distance):,} back{beyond}', fontsize=9)


def decode(axis, summary, color):
    rows = lines_of(summary, 'speed')
    cells = [(row, cell) for row in rows for cell in row['speed'] if 'tpot_ms' in cell]
    if not cells:
        return
    batch = max(cell['batch'] for _, cell in cells)
    for row in rows:
        times = {cell['context']: cell['tpot_ms']['median'] for of, cell in cells
                 if of is row and cell['batch'] == batch}
        line_of_dots(axis, row, color, times)
    context_axes(axis, sorted({cell['context'] for _, cell in cells}))
    label_axes(axis, 'cached tokens', f"ms per token, {batch:,} sequence{'s' * (batch > 1)}")


def line_of_dots(axis, row, color, points: dict) -> None:
    axis.plot(list(points), list(points.values()), color=color(row), label=row['name'],
              marker='o', markersize=4)


def kv(axis, summary, color):
    rows = [row for row in summary['rows'] if not row['side']]
    for row in rows:
        at = {int(n): each['bytes'] for n, each in row['kv']['at'].items()}
        line_of_dots(axis, row, color, at)
    context_axes(axis, list(at))
    axis.yaxis.set_major_formatter(lambda y, _: nice_bytes(round(y)))
    label_axes(axis, 'tokens', 'KV bytes of one sequence')


DRAWN = talk, pareto, curves, gaps, recovery, positions, identifiers, lookup, recall, decode, kv
