"""The tables of the recall and look-up tasks, and of identifiers in source code."""
from lab.ablation.cells import INTERVAL, MISSING, label, listed, mean_sd, plus_minus
from lab.ablation.lookup import RECALLED, SOLVED
from lab.ablation.summary import LEARNED, local_reach
from lab.tables import Table


def lookups(summary: dict) -> Table | None:
    """Accuracy by number of facts; how many facts a row recalls, and their price in bytes."""
    rows = [row for row in summary['rows'] if row.get('lookup')]
    if not rows:
        return None
    first = rows[0]['lookup']
    title = (f'Looking up facts by content: right answers by number of facts, %, mean over seeds '
             f'(sd); chance is {100 / first["n_values"]:.1f}. Facts: the most of which '
             f'{RECALLED:.0%} are recalled, by seed. Solved: first checkpoint with {SOLVED:.0%} '
             'over all numbers of facts, by seed. KV bytes: as allocated for T tokens')
    heads = [f'{int(n):,} facts' for n in first['accuracy']]
    table = Table(title, ('row', *heads, 'facts', 'KV bytes', 'bytes a fact', 'solved at step'),
                  left=('row',))
    for row in rows:
        found = row['lookup']
        cells = [mean_sd(found['accuracy'][n], '.1f', scale=100) for n in first['accuracy']]
        prices = [f'{x:,.0f}' for x in found['bytes_per_fact'] if x is not None]
        table.rows.append((label(row), *cells, listed(found['facts']), f"{found['kv_bytes']:,}",
                           listed(prices), listed(found['solved_at'])))
    return table


def lookup_distances(summary: dict) -> Table | None:
    """Accuracy by distance, over all numbers of facts."""
    rows = [row for row in summary['rows'] if row.get('lookup')]
    if not rows:
        return None
    bins = rows[0]['lookup']['by_distance']
    table = Table('Looking up facts by content: right answers by positions from the question back '
                  'to its fact, over all numbers of facts, %, mean over seeds (sd)',
                  ('row', *(f'{int(low)} to {2 * int(low) - 1}' for low in bins)), left=('row',))
    for row in rows:
        found = row['lookup']['by_distance']
        table.rows.append((label(row), *(mean_sd(found[low], '.1f', scale=100) for low in bins)))
    return table


def recalls(summary: dict) -> Table | None:
    """Accuracy by distance. If the baseline has learned the task and local layers cannot solve it
    by themselves, also the difference from the baseline."""
    rows = [row for row in summary['rows'] if row.get('recall')]
    if not rows:
        return None
    first, reach = rows[0]['recall'], local_reach(rows)
    baseline, distances = first['baseline'], list(first['accuracy'])
    ladder = f" (ladder {summary['recall_ladder']!r})" if summary['recall_ladder'] else ''
    title = (f'Recall{ladder}: accuracy at naming the token that many positions back, %, mean over '
             f'seeds (sd); differences in points, paired by seed; {INTERVAL}; local layers alone '
             f'reach {reach:,}')
    if first['learned'] != distances:
        unknown = '' if first['baseline_known'] else ' or is not measured yet'
        title += (f'; at distances marked * {baseline} names less than {LEARNED:.0%} right{unknown}'
                  ', and they do not distinguish the rows')
    heads = [f"{int(d):,} back{'' if d in first['learned'] else '*'}" for d in distances]
    if first['beyond']:
        heads.append(f'beyond {reach:,}, less {baseline}')
    table = Table(title, ('row', *heads, 'seeds'), left=('row',))
    for row in rows:
        recall = row['recall']
        cells = [mean_sd(recall['accuracy'][d], '.1f', scale=100) for d in distances]
        if first['beyond']:
            cells.append(plus_minus(recall.get('above_baseline'), '.1f', scale=100))
        table.rows.append((label(row), *cells, str(len(recall['seeds']))))
    return table


def identifiers(summary: dict) -> Table | None:
    """Loss of identifiers by the distance to their last use."""
    rows = [row for row in summary['rows'] if row.get('identifiers')]
    if not rows:
        return None
    first = rows[0]['identifiers']
    heads = [f'{key}: {n:,}' if key == 'new' else f'{key} to {2 * int(key) - 1}: {n:,}'
             for key, n in first['count'].items()]
    title = ('Identifiers: nats of all tokens of one, by the tokens since its last use (new: none '
             'in the window) and their number; mean over seeds (sd)')
    if any(row['identifiers']['kept'] for row in rows):
        title += (f"; kept: of what {summary['baseline']} gains over local layers alone from "
                  f"{first['beyond'][0]} tokens on")
    table = Table(title, ('row', *heads, 'kept'), left=('row',))
    for row in rows:
        found = row['identifiers']
        cells = [mean_sd(found['nats'].get(key), '.3f') for key in first['count']]
        table.rows.append((label(row), *cells, mean_sd(found['kept'], '.0f', scale=100) + ' %'
                           if found['kept'] else MISSING))
    return table
