"""The pictures of a report, for light and for dark pages."""
import io
from pathlib import Path

from ablation.summary import local_reach
from ablation.tables import models
from config.errors import UserError

# name -> what it shows; the order is that of the report
TITLES = {
    'pareto': 'Validation loss over KV bytes per token: down and to the left is better',
    'curves': 'Validation loss while training: mean of the seeds, shaded from the lowest to the highest',
    'gaps': 'Validation loss while training, less that of the baseline: mean of the seeds, shaded from lowest to highest',
    'recovery': 'Converted weights that are trained on: what they came from, dashed, and the same memory from scratch, dotted',
    'positions': 'Validation loss by position in the window',
    'recall': 'Recall over distance',
    'decode': 'Time per output token over tokens held',
    'kv': 'KV bytes of one sequence over its length',
}
LIGHT = {'figure.facecolor': 'white', 'axes.facecolor': 'white', 'text.color': '#1f2328', 'axes.labelcolor': '#1f2328',
         'axes.edgecolor': '#8c959f', 'xtick.color': '#57606a', 'ytick.color': '#57606a', 'grid.color': '#d0d7de'}
DARK = {'figure.facecolor': '#0d1117', 'axes.facecolor': '#0d1117', 'text.color': '#e6edf3', 'axes.labelcolor': '#e6edf3',
        'axes.edgecolor': '#6e7681', 'xtick.color': '#9da7b1', 'ytick.color': '#9da7b1', 'grid.color': '#30363d'}
COMMON = {'font.size': 10, 'axes.grid': True, 'grid.linewidth': 0.6, 'axes.spines.top': False, 'axes.spines.right': False,
          'legend.frameon': False, 'legend.fontsize': 8.5, 'figure.dpi': 110, 'savefig.bbox': 'tight', 'lines.linewidth': 1.6}

SIDE_MARKERS = 's^vDPX*'  # side rows are all grey


def pyplot():
    """matplotlib's, without a display.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as e:
        raise UserError("the report's pictures need matplotlib: pip install -e '.[plot]' (or give --pictures=False)") from e
    matplotlib.use('Agg')
    from matplotlib import pyplot as plt
    return plt


def draw_all(summary: dict, dark: bool = False) -> dict[str, bytes]:
    """name of TITLES -> PNG; those there is nothing to draw for are left out."""
    if not summary['pictures']:
        return {}
    plt = pyplot()
    made = {}
    with plt.rc_context(COMMON | (DARK if dark else LIGHT)):
        for name in TITLES:
            figure, axis = plt.subplots(figsize=(7.2, 4.4))
            try:
                if DRAWN[name](axis, summary, Colors(summary, plt, dark)):
                    file = io.BytesIO()
                    figure.savefig(file, format='png', metadata={'Software': None})
                    made[name] = file.getvalue()
            finally:
                plt.close(figure)
    return made


def write_all(summary: dict, folder: Path) -> list[str]:
    """The light ones as files, in the place of those of a former report. Returns their names."""
    drawn = draw_all(summary)
    for name in TITLES:
        (folder / f'{name}.png').unlink(missing_ok=True)
    for name, png in drawn.items():
        (folder / f'{name}.png').write_bytes(png)
    return list(drawn)


class Colors:
    """A color for every row: the ladder's go through a scale from the first to the last, side rows are grey."""

    def __init__(self, summary, plt, dark):
        ladder = [row['name'] for row in summary['rows'] if not row['side']]
        scale, low, high = plt.get_cmap('plasma' if dark else 'viridis'), *((0.25, 0.98) if dark else (0.0, 0.88))
        self.of_row = {name: scale(low + (high - low) * i / max(len(ladder) - 1, 1)) for i, name in enumerate(ladder)}
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


def legend(axis):
    """Beside the picture, so that it never covers a line."""
    axis.legend(loc='center left', bbox_to_anchor=(1.01, 0.5))


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
            panel.errorbar(x, y['mean'], yerr=y['sd'] or 0, fmt='s' if row['side'] else 'o', color=color(row), capsize=2,
                           markersize=4 if row['side'] else 6, label=f"{numbers[row['name']]}  {row['name']}")
            if panel is panels[-1][0] or row not in near:
                panel.annotate(str(numbers[row['name']]), (x, y['mean']), xytext=(5, 4), textcoords='offset points', fontsize=8)
        panel.set_xscale('log')
        panel.xaxis.set_major_formatter(lambda x, _: f'{x:,.0f}')
        panel.xaxis.set_minor_formatter(lambda x, _: f'{x:,.0f}' if str(x)[0] in '25' else '')
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
    rows = lines_of(summary, 'evaluations')
    for row in rows:
        c = row['evaluations']
        if len(c['iterations']) < 2:
            continue
        axis.plot(c['iterations'], c['mean'], color=color(row), label=row['name'])
        axis.fill_between(c['iterations'], c['low'], c['high'], color=color(row), alpha=0.2, linewidth=0)
    if not axis.lines:
        return False
    settled = [y for row in rows for i, y in zip(row['evaluations']['iterations'], row['evaluations']['mean'])
               if i >= 0.1 * row['iterations']]
    low, high = min(settled), max(settled)
    axis.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))  # the drop of the first steps would flatten the rest
    axis.set_xlabel('iteration')
    axis.set_ylabel('validation loss, nats per token')
    legend(axis)
    return True


def gaps(axis, summary, color):
    rows = [row for row in lines_of(summary, 'gap') if row['name'] != summary['baseline'] and not row['converted_from']]
    baseline = next(row for row in summary['rows'] if row['name'] == summary['baseline'])
    rows = [row for row in rows if len(row['gap']) > 1 and row['iterations'] == baseline['iterations']]
    shown = without_outliers(rows)  # they would flatten the rest
    for row in shown:
        iterations, mean, low, high = zip(*[point for point in row['gap'] if point[0] >= 0.1 * row['iterations']])
        axis.plot(iterations, mean, color=color(row), label=row['name'])
        axis.fill_between(iterations, low, high, color=color(row), alpha=0.2, linewidth=0)
    if rows:
        axis.axhline(0, color=color.side, linewidth=1)
        axis.set_xlabel('iteration')
        axis.set_ylabel(f"nats per token above {summary['baseline'].lstrip('+ ')}")
        for row in rows:
            if row not in shown:
                axis.plot([], [], color=color(row), linestyle=':', label=f"{row['name']}: far off, not shown")
        legend(axis)
    return bool(rows)


def recovery(axis, summary, color):
    rows = [row for row in summary['rows'] if row['converted_from'] and row.get('evaluations')]
    for k, row in enumerate(rows):
        tint = f'C{k}'
        axis.plot(row['evaluations']['iterations'], row['evaluations']['mean'], color=tint, label=row['name'], marker='.')
        for other, style in (('origin', '--'), ('scratch', ':')):
            if end := row['recovery'].get(other):
                name = row['converted_from'] if other == 'origin' else row['above']
                axis.axhline(end['mean'], color=tint if style == ':' else color.side, linestyle=style, linewidth=1,
                             label=f"{name} ({end['iterations']:,} iterations)")
    if rows:
        axis.set_yscale('log')
        axis.yaxis.set_major_formatter(lambda y, _: f'{y:.2f}')
        axis.yaxis.set_minor_formatter(lambda y, _: f'{y:.2f}')
        axis.set_xlabel('iteration after the conversion')
        axis.set_ylabel('validation loss, nats per token')
        legend(axis)
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
        legend(axis)
    return bool(rows)


def recall(axis, summary, color):
    rows = [row for row in summary['rows'] if row.get('recall')]
    markers = iter(SIDE_MARKERS * len(rows))
    for row in rows:
        accuracy = row['recall']['accuracy']
        axis.plot([int(d) for d in accuracy], [100 * a['mean'] for a in accuracy.values()], color=color(row), label=row['name'],
                  marker=next(markers) if row['side'] else 'o', markersize=5 if row['side'] else 4,
                  linestyle=':' if row['side'] else '-')
    if rows:
        axis.set_xlabel('distance, tokens')
        axis.set_ylabel('named right, %')
        axis.set_ylim(-3, 103)
        if reach := local_reach(rows):
            axis.axvline(reach, color=color.side, linewidth=1, linestyle='--')
            axis.text(reach, 0.07, ' local reach', fontsize=8, color=color.side, transform=axis.get_xaxis_transform())
        legend(axis)
    return bool(rows)


def decode(axis, summary, color):
    rows = lines_of(summary, 'speed')
    batches = sorted({cell['batch'] for row in rows for cell in row['speed'] if 'tpot_ms' in cell})
    if not batches:
        return False
    for row in rows:
        cells = [cell for cell in row['speed'] if 'tpot_ms' in cell and cell['batch'] == batches[-1]]
        axis.plot([c['context'] for c in cells], [c['tpot_ms']['median'] for c in cells], color=color(row), label=row['name'],
                  marker='o', markersize=4)
    log_axes(axis)
    axis.set_xlabel('tokens held')
    axis.set_ylabel(f'ms per token, {batches[-1]} sequences at once')
    legend(axis)
    return True


def kv(axis, summary, color):
    rows = [row for row in summary['rows'] if not row['side']]
    for row in rows:
        at = row['kv']['at']
        axis.plot([int(n) for n in at], [a['bytes'] for a in at.values()], color=color(row), label=row['name'], marker='o',
                  markersize=4)
    log_axes(axis)
    axis.set_xlabel('tokens')
    axis.set_ylabel('KV bytes of one sequence')
    legend(axis)
    return bool(rows)


def log_axes(axis):
    axis.set_xscale('log', base=2)
    axis.set_yscale('log')
    axis.xaxis.set_major_formatter(lambda x, _: f'{x:,.0f}')


DRAWN = {'pareto': pareto, 'curves': curves, 'gaps': gaps, 'recovery': recovery, 'positions': positions, 'recall': recall,
         'decode': decode, 'kv': kv}
