"""What one training for several plans costs: the rows of config/ablate_elastic.py, paired by seed.

    python lab/scripts/elastic.py results/elastic_NAME    # prints a table; writes elastic.png there

Reads results.json of the folder, which ablate.py wrote, and streaming.jsonl if there is one
(lab/scripts/streaming.py).
"""
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.ablation.stats import paired_difference  # noqa: E402
from lab.tables import Table  # noqa: E402
from training.plot.figures import COLOURS, plain_log_ticks, save, subplots  # noqa: E402

# ends of rows' names: what the picture says, and how it is drawn
SINKS = 'window with sinks'
KINDS = {'alone': ('trained alone', 'o-'), 'elastic': ('one elastic model', 's-'),
         'elastic of 2 passes': ('the same, each sequence under two plans', 'v-'),
         'elastic (not trained for)': ('the same, plans it was not trained for', '^'),
         'base cut to it': ('the base, cut without training', 'x--'),
         'rounded': ('the base, rounded to int8 and int4', 'D'),
         SINKS: ('the base, a window with sinks (StreamingLLM)', '+--')}
ELASTIC = 'elastic', 'elastic of 2 passes'
ZOOM = 0.13  # nats
OTHERS = {'base alone': 'base, alone', 'elastic': 'base, elastic',
          'elastic of 2 passes': 'base, elastic of 2 passes',
          'base in int8': 'base in int8, rounded', 'base in int4': 'base in int4, rounded'}


def plans(folder: Path) -> dict:
    """{plan: {kind: (KV bytes a token, {seed: nats})}}, from the largest to the smallest."""
    rows = json.loads((folder / 'results.json').read_text('utf-8'))['rows']
    found = {}
    for row in rows:
        plan, _, kind = OTHERS.get(row['name'], row['name']).rpartition(', ')
        if kind in KINDS and 'val_loss' in row:
            losses = dict(zip(row['seeds'], row['val_loss']['each']))
            found.setdefault(plan, {})[kind] = row['kv']['bytes_per_token'], losses
    file = folder / 'streaming.jsonl'
    for line in map(json.loads, file.read_text('utf-8').splitlines() if file.is_file() else ()):
        if line['held'] < line['T']:
            kinds = found.setdefault(f"{line['sinks']} sinks + {line['held'] - line['sinks']}", {})
            _, losses = kinds.setdefault(SINKS, (line['bytes_per_token'], {}))
            losses[line['seed']] = line['val_loss']
    return dict(sorted(found.items(), key=lambda item: -next(iter(item[1].values()))[0]))


def mean(losses: dict) -> float:
    return sum(losses.values()) / len(losses)


def table(found: dict) -> Table:
    rows = []
    for plan, kinds in found.items():
        nbytes = next(iter(kinds.values()))[0]
        losses = [f'{mean(kinds[kind][1]):.4f}' if kind in kinds else '-' for kind in KINDS]
        rows.append([plan, f'{nbytes:,.0f}', *losses, *(price(kinds, kind) for kind in ELASTIC)])
    return Table('Validation loss, nats per token',
                 ['plan', 'KV bytes/token', *KINDS, *(f'{kind} minus alone' for kind in ELASTIC)],
                 rows)


def price(kinds: dict, kind: str) -> str:
    if not {'alone', kind} <= kinds.keys():
        return '-'
    pair = paired_difference(kinds[kind][1], kinds['alone'][1])
    half = '' if pair['half_95'] is None else f" ±{pair['half_95']:.4f}"
    return f"{pair['mean']:+.4f}{half}"


def draw(found: dict, path: Path) -> None:
    """Above all of it, below what lies within ZOOM nats of the lowest loss."""
    with subplots(nrows=2, figsize=(7.2, 6.4), sharex=True, height_ratios=(1, 2)) as drawn:
        (figure, axes), lowest = drawn, math.inf
        for (kind, (label, style)), color in zip(KINDS.items(), COLOURS):
            points = [(kinds[kind][0], mean(kinds[kind][1])) for kinds in found.values()
                      if kind in kinds]
            for axis in axes if points else ():
                axis.plot(*zip(*points), style, color=color, label=label)
            lowest = min([lowest, *(loss for _, loss in points)])
        axes[1].set(xscale='log', xlabel='KV bytes per token (bfloat16)',
                    ylabel='validation loss, nats per token', ylim=(lowest - 0.01, lowest + ZOOM))
        plain_log_ticks(axes[1].xaxis, *axes[1].get_xlim(), subs=(1, 3))
        axes[1].legend(loc='upper left')
        save(figure, path, metadata={'Software': None})


if __name__ == '__main__':
    where = Path(sys.argv[1])
    print(table(plans(where)).markdown())
    draw(plans(where), where / 'elastic.png')
