"""The pictures of a report, for light and for dark pages."""
import io
import math
from pathlib import Path

from config.sizes import nice_bytes
from lab.ablation.summary import local_reach
from lab.ablation.tables import models
from training.plotting import COLOURS, context_axes, label_line_ends, plain_log_ticks, subplots

# name -> what it shows; the order is that of the report
TITLES = {
    'talk': 'Validation loss over KV bytes per token, five rows of the ladder. Bars: 95% confidence interval of the difference '
            'from the baseline, paired by seed; hollow: too few seeds for one',
    'pareto': 'Validation loss over KV bytes per token: down and to the left is better. Bars: standard deviation over the '
              'seeds; hollow: one seed, which has no bar and is no more certain',
    'curves': 'Validation loss while training: mean of the seeds, shaded from the lowest to the highest',
    'gaps': 'Validation loss while training, less that of the baseline: mean of the seeds, shaded from lowest to highest, '
            'without the first tenth of the steps',
    'recovery': 'Converted weights that are trained on: what they came from, dashed, and the same memory from scratch, dotted',
    'positions': 'Validation loss by position in the window',
    'recall': 'Recall by distance: bars are means, dots single seeds',
    'decode': 'Time per output token over tokens held',
    'kv': 'KV bytes of one sequence over its length',
}
FEW = 3  # points: with fewer of them a line alone would say little, or nothing


def draw_all(summary: dict, dark: bool = False, kind: str = 'png') -> dict[str, bytes]:
    """name of TITLES -> file ('png', 'svg' or 'pdf'); those there is nothing to draw for are left out."""
    if not summary['pictures']:
        return {}
    made = {}
    # leave out what would change from run to run
    metadata = {'png': {'Software': None}, 'svg': {'Date': None}, 'pdf': {'CreationDate': None}}
    for name, draw in DRAWN.items():
        with subplots(figsize=(7.2, 4.4), page='dark' if dark else 'light') as (figure, axis):
            if draw(axis, summary, Colors(summary)):
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata=metadata[kind])
                made[name] = file.getvalue()
    return made


def not_drawn(summary: dict) -> list[str]:
    """A line where the pictures of training show single evaluations only, or are left out for want of any."""
    rows = [row for row in summary['rows'] if row.get('evaluations') and not row['side']]
    most = max((sum(i > 0 for i in row['evaluations']['iterations']) for row in rows), default=FEW)
    if not summary['pictures'] or most >= FEW:
        return []
    if not most:
        return ['no pictures of the losses while training: no row was evaluated after its first step; lower eval_interval']
    return [f"pictures of training show {most} evaluation{'s' * (most > 1)} after the first step: "
            'lower eval_interval for curves']


def write_all(summary: dict, folder: Path, also_as: str = '') -> list[str]:
    """The light ones as PNG files, and in the format `also_as` if one is given, in the place of those
    of a former report. Returns their names."""
    for name in TITLES:
        for kind in ('png', 'svg', 'pdf'):
            (folder / f'{name}.{kind}').unlink(missing_ok=True)
    for kind in {'png', also_as or 'png'}:
        drawn = draw_all(summary, kind=kind)
        for name, content in drawn.items():
            (folder / f'{name}.{kind}').write_bytes(content)
    return list(drawn)


class Colors:
    """A color for every row of the ladder; side rows are grey."""

    def __init__(self, summary):
        ladder = [row['name'] for row in summary['rows'] if not row['side']]
        self.of_row = dict(zip(ladder, COLOURS * len(ladder)))
        self.side = '#8b949e'

    def __call__(self, row):
        return self.of_row.get(row['name'], self.side)


def lines_of(summary, key):
    """Rows to draw as lines: the ladder's, with what there is to draw. Those that share their weights are drawn once."""
    seen, rows = set(), []
    for row in summary['rows']:
        if row['side'] or not row.get(key) or (key in ('evaluations', 'gap') and row['trained_as'] in seen):
            continue
        seen.add(row.get('trained_as'))
        rows.append(row)
    return rows


def talk(axis, summary, color):
    """Rows of the ladder from the baseline to the last: those nearest to five even steps on the logarithmic axis."""
    rows = [row for row in summary['rows'] if not row['side'] and 'val_loss' in row]
    while rows and rows[0]['name'] != summary['baseline']:
        rows = rows[1:]
    if len(rows) < 2:
        return False
    first, *between, last = rows
    size = {row['name']: math.log(row['kv']['bytes_per_token']) for row in rows}
    shown = [first, last]
    for k in range(1, 4):
        wanted = size[first['name']] + (size[last['name']] - size[first['name']]) * k / 4
        left = [row for row in between if row not in shown]
        shown += [min(left, key=lambda row: abs(size[row['name']] - wanted))] if left else []
    axis.figure.set_size_inches(10, 5.6)
    for k, row in enumerate(sorted(shown, key=lambda row: size[row['name']])):
        x, y = row['kv']['bytes_per_token'], row['val_loss']['mean']
        certain = len((row['val_loss'] if row is first else row['against_baseline'])['each']) > 2
        half = row['against_baseline']['half_95'] if certain and row is not first else 0
        axis.errorbar(x, y, yerr=half or None, fmt='o', markersize=13, capsize=7, elinewidth=2.5, color=color(row),
                      markerfacecolor=color(row) if certain else 'none')
        smaller = first['kv']['bytes_per_token'] / x
        name = f"baseline:\n{row['name'].lstrip('+ ')}" if row is first else f"{row['name']}\n{smaller:.3g}x"
        axis.annotate(name, (x, y + (half if k % 2 else -half)), (0, 14 if k % 2 else -14), ha='center',
                      textcoords='offset points', fontsize=15, color=color(row), va='bottom' if k % 2 else 'top')
    axis.axhline(first['val_loss']['mean'], color=color.side, linestyle='--', linewidth=1.5)
    axis.set_xscale('log')
    plain_log_ticks(axis.xaxis, *axis.get_xlim())
    axis.margins(x=0.2, y=0.25)
    axis.tick_params(labelsize=14)
    axis.set_xlabel('KV bytes per token, and how many times smaller', fontsize=16)
    axis.set_ylabel('validation loss, nats', fontsize=16)
    return True


def pareto(axis, summary, color):
    """Rows are numbered, for their names would cover one another. Where some are far off, a second panel shows the others. Side
    rows that are only trained in another way tell nothing of memory."""
    rows = [row for row in models(summary) if 'val_loss' in row]
    if not rows:
        return False
    near = without_outliers(rows)
    panels = [(axis, rows)]
    if len(near) < len(rows):
        axis.figure.set_size_inches(10.4, 4.6)
        axis.set_position([0.07, 0.12, 0.3, 0.8])
        panels.append((axis.figure.add_axes([0.45, 0.12, 0.52, 0.8]), near))
    numbers = {row['name']: k for k, row in enumerate(rows, 1)}
    for panel, shown in panels:
        for row in shown:
            x, y = row['kv']['bytes_per_token'], row['val_loss']
            one = len(y['each']) == 1
            panel.errorbar(x, y['mean'], yerr=y['sd'], fmt='s' if row['side'] else 'o', color=color(row), capsize=2,
                           markersize=4 if row['side'] else 6, markerfacecolor='none' if one else color(row),
                           label=f"{numbers[row['name']]}  {row['name']}, n={len(y['each'])}")
            if panel is panels[-1][0] or row not in near:
                panel.annotate(str(numbers[row['name']]), (x, y['mean']), xytext=(5, 4), textcoords='offset points', fontsize=8)
        panel.set_xscale('log')
        plain_log_ticks(panel.xaxis, *panel.get_xlim())
        panel.tick_params(axis='x', which='both', labelsize=8)
        panel.set_xlabel('KV bytes per token')
    axis.set_ylabel('validation loss, nats per token')
    handles, names = axis.get_legend_handles_labels()
    panels[-1][0].legend(handles, names, loc='center left', bbox_to_anchor=(1.01, 0.5), fontsize=7.5)
    return True


def without_outliers(rows: list[dict]) -> list[dict]:
    """The rows without the worst few, where these lie so far off that the others would look alike beside them."""
    losses = sorted(row['val_loss']['mean'] for row in rows)
    for n_off in range(1, len(losses) // 4 + 1):
        near, off = losses[:-n_off], losses[-n_off]
        if off - near[-1] >= 2 * (near[-1] - near[0]):
            return [row for row in rows if row['val_loss']['mean'] < off]
    return rows


def curves(axis, summary, color):
    rows = [row for row in lines_of(summary, 'evaluations') if max(row['evaluations']['iterations'], default=0) > 0]
    for row in rows:
        c = row['evaluations']
        axis.plot(c['iterations'], c['mean'], color=color(row), label=row['name'], marker=marker(c['iterations']))
        axis.fill_between(c['iterations'], c['low'], c['high'], color=color(row), alpha=0.2, linewidth=0)
    if not rows:
        return False
    axis.set_xlabel('iteration')
    settled = [[y for i, y in zip(row['evaluations']['iterations'], row['evaluations']['mean']) if i >= 0.1 * row['iterations']]
               for row in rows]
    if min(map(len, settled)) >= FEW:  # the drop of the first steps would flatten the rest
        low, high = min(map(min, settled)), max(map(max, settled))
        axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        axis.set_xlabel('iteration (losses of the first tenth are above the picture)')
    axis.set_ylabel('validation loss, nats per token')
    label_line_ends(axis)
    return True


def marker(points):
    return 'o' if len(points) < FEW else ''


def gaps(axis, summary, color):
    rows = [row for row in lines_of(summary, 'gap') if row['name'] != summary['baseline'] and not row['converted_from']]
    baseline = next(row for row in summary['rows'] if row['name'] == summary['baseline'])
    settled = {row['name']: [point for point in row['gap'] if point[0] >= 0.1 * row['iterations'] > 0] for row in rows}
    rows = [row for row in rows if settled[row['name']] and row['iterations'] == baseline['iterations']]
    shown = without_outliers(rows)  # they would flatten the rest
    for row in shown:
        iterations, mean, low, high = zip(*settled[row['name']])
        axis.plot(iterations, mean, color=color(row), label=row['name'], marker=marker(iterations))
        if len(iterations) == 1:
            axis.vlines(iterations, low, high, color=color(row), linewidth=1)
        axis.fill_between(iterations, low, high, color=color(row), alpha=0.2, linewidth=0)
    if rows:
        axis.axhline(0, color=color.side, linewidth=1)
        far = ', '.join(row['name'] for row in rows if row not in shown)
        axis.set_xlabel('iteration' + f' (far off, not shown: {far})' * bool(far))
        axis.set_ylabel(f"nats per token above {summary['baseline'].lstrip('+ ')}")
        label_line_ends(axis)
    return bool(rows)


def recovery(axis, summary, color):
    rows = [row for row in summary['rows'] if row['converted_from'] and row.get('evaluations')]
    ends = {}  # several rows may have come from one
    for k, row in enumerate(rows):
        axis.plot(row['evaluations']['iterations'], row['evaluations']['mean'], color=f'C{k}', label=row['name'], marker='.')
        for other, style in (('origin', '--'), ('scratch', ':')):
            if end := row['recovery'].get(other):
                name = row['converted_from'] if other == 'origin' else row['above']
                ends.setdefault(f"{name} ({end['iterations']:,} iterations)",
                                (end['mean'], style, f'C{k}' if style == ':' else color.side))
    for label, (loss, style, tint) in ends.items():
        axis.axhline(loss, color=tint, linestyle=style, linewidth=1, label=label)
    if rows:
        axis.set_xlabel('iteration after the conversion')
        axis.set_ylabel('validation loss, nats per token')
        label_line_ends(axis)
    return bool(rows)


def positions(axis, summary, color):
    rows = lines_of(summary, 'loss_by_position')
    for row in rows:
        losses = row['loss_by_position']
        step = max(1, len(losses) // 32)
        means = [sum(losses[i:i + step]) / len(losses[i:i + step]) for i in range(0, len(losses), step)]
        axis.plot([i * step + (step - 1) / 2 for i in range(len(means))], means, color=color(row), label=row['name'])
    if rows:
        axis.set_xlabel('position in the window')
        axis.set_ylabel('validation loss, nats per token')
        label_line_ends(axis)
    return bool(rows)


def recall(axis, summary, color):
    rows = [row for row in summary['rows'] if row.get('recall')][::-1]
    if not rows:
        return False
    distances, reach, figure = list(rows[0]['recall']['accuracy']), local_reach(rows), axis.figure
    axis.remove()
    figure.set_size_inches(3 + 2.4 * len(distances), 1 + 0.27 * len(rows))
    for distance, panel in zip(distances, figure.subplots(1, len(distances), sharey=True, squeeze=False)[0]):
        for k, row in enumerate(rows):
            found = row['recall']['accuracy'][distance]
            panel.barh(k, 100 * found['mean'], color=color(row), height=0.7, alpha=0.6)
            panel.plot([100 * x for x in found['each']], [k] * len(found['each']), 'o', markersize=3.5,
                       color=panel.xaxis.label.get_color(), clip_on=False)
        panel.set_yticks(range(len(rows)), [row['name'] for row in rows], fontsize=8.5)
        panel.grid(False, axis='y')
        panel.set_xlim(0, 100)
        panel.set_xlabel('named right, %')
        beyond = f', beyond local layers ({reach})' if int(distance) > reach > 0 else ''
        panel.set_title(f'{int(distance):,} back{beyond}', fontsize=9)
    return True


def decode(axis, summary, color):
    rows = lines_of(summary, 'speed')
    batches = sorted({cell['batch'] for row in rows for cell in row['speed'] if 'tpot_ms' in cell})
    if not batches:
        return False
    for row in rows:
        cells = [cell for cell in row['speed'] if 'tpot_ms' in cell and cell['batch'] == batches[-1]]
        axis.plot([c['context'] for c in cells], [c['tpot_ms']['median'] for c in cells], color=color(row), label=row['name'],
                  marker='o', markersize=4)
    context_axes(axis, sorted({cell['context'] for row in rows for cell in row['speed'] if 'tpot_ms' in cell}))
    axis.set_xlabel('tokens held')
    axis.set_ylabel(f"ms per token, {batches[-1]:,} sequence{'s at once' * (batches[-1] > 1)}")
    label_line_ends(axis)
    return True


def kv(axis, summary, color):
    rows = [row for row in summary['rows'] if not row['side']]
    for row in rows:
        at = row['kv']['at']
        axis.plot([int(n) for n in at], [a['bytes'] for a in at.values()], color=color(row), label=row['name'], marker='o',
                  markersize=4)
    context_axes(axis, [int(n) for n in rows[0]['kv']['at']])
    axis.yaxis.set_major_formatter(lambda y, _: nice_bytes(round(y)))
    axis.set_xlabel('tokens')
    axis.set_ylabel('KV bytes of one sequence')
    label_line_ends(axis)
    return bool(rows)


DRAWN = {'talk': talk, 'pareto': pareto, 'curves': curves, 'gaps': gaps, 'recovery': recovery, 'positions': positions,
         'recall': recall, 'decode': decode, 'kv': kv}
