"""The tables of a report, from a summary (lab/ablation/summary.py). They are the same on the
terminal and in report.md."""
from collections import Counter

from common.sizes import nice_bytes
from lab.ablation.lookup import RECALLED
from lab.ablation.stats import enough
from lab.ablation.summary import LEARNED, local_reach
from lab.tables import Table

MISSING = '-'
INTERVAL = ("±: 95% confidence interval of the paired difference "
            "(Student's t, n-1 degrees of freedom); with fewer than three seeds (n), the "
            'difference of each')


def label(row: dict) -> str:
    """The row's name; for a side row also the row it is based on and its own max_iters."""
    if not row['side']:
        return row['name']
    changes = row['changes']
    steps = f"; {changes['max_iters']:,} iterations" if 'max_iters' in changes else ''
    return f"{row['name']} (from {row['above']}{steps})"


def plus_minus(difference: dict | None, form: str = '.4f', scale: float = 1) -> str:
    """'+0.0123 ±0.0045': a paired difference and its 95% confidence interval. With fewer than three
    pairs, the differences themselves, '+0.0123, +0.0150 (n=2)': with one degree of freedom the
    width of the interval is mostly chance."""
    def signed(x):
        text = format(scale * x, '+z' + form)
        return text if float(text) else text.lstrip('+')
    if not difference:
        return MISSING
    each = difference['each']
    if not enough(difference):
        return f"{', '.join(map(signed, each))} (n={len(each)})"
    return f"{signed(difference['mean'])} ±{format(scale * difference['half_95'], form)}"


def mean_sd(values: dict | None, form: str = '.4f', scale: float = 1) -> str:
    """'1.7718 (0.0029)': mean and, with three values or more, standard deviation."""
    if not values:
        return MISSING
    text = format(scale * values['mean'], form)
    return f"{text} ({format(scale * values['sd'], form)})" if enough(values) else text


def listed(values) -> str:
    """Each value once with its count, in order: '64 (x4), 32'."""
    counts = Counter(values).items()
    return ', '.join(f'{value} (x{n})' if n > 1 else f'{value}' for value, n in counts) or MISSING


def models(summary: dict) -> list[dict]:
    """The rows, except for side rows that only train the model of another row differently."""
    return [row for row in summary['rows'] if not (row['side'] and row['same_model'])]


def grids(summary: dict) -> list[Table]:
    """Return all tables that have rows."""
    having = {key: [row for row in summary['rows'] if row.get(key)]
              for key in ('val_loss', 'lookup', 'recall', 'identifiers')}
    tables = []
    if having['val_loss'] or not (having['lookup'] or having['recall']):
        tables += [headline(summary), headline(summary, side=True)]
    if having['lookup']:
        tables.append(lookups(having['lookup']))
    if having['recall']:
        tables.append(recalls(having['recall']))
    if having['identifiers']:
        tables.append(identifiers(summary, having['identifiers']))
    tables.append(bytes_held(summary))
    return [table for table in tables if table.rows]


def with_names(title: str, rows: list[dict], columns: dict, left=()) -> Table:
    """A table whose first column names the rows. columns: heading -> function of a row -> text."""
    return Table.of(title, rows, {'row': label} | columns, left)


def headline(summary: dict, side: bool = False) -> Table:
    others = ['baseline'] if side else ['first', 'baseline']  # the two may be one column
    name, above = ('Alternatives', 'against that') if side else ('The ladder', 'against above')

    def against(key):
        def starred(row):
            found = row.get(f'against_{key}')
            star = '*' if found and found.get('stands') else ''
            return plus_minus(found) + star
        return starred

    title = (f'{name}: validation loss in nats per token, mean over seeds (sd); differences are '
             f"paired by seed; {INTERVAL}; KV bytes at T={summary['rows'][0]['kv']['T']:,}")
    return with_names(title, [row for row in summary['rows'] if row['side'] == side], {
        'val loss': lambda row: mean_sd(row.get('val_loss')),
        'KV bytes/token': lambda row: f"{row['kv']['bytes_per_token']:,.0f}",
        'smaller': lambda row: f"{row['kv']['smaller']:.1f}x",
        above: against('above'),
        **{f'against {summary[other]}': against(other) for other in others},
        'bits/byte': lambda row: (f"{row['bits_per_byte']['mean']:.3f}" if 'bits_per_byte' in row
                                  else MISSING),
        'parameters': lambda row: f"{row['params']:,}" if 'params' in row else MISSING,
        'seeds': lambda row: str(len(row['seeds']))})


def bytes_held(summary: dict) -> Table:
    def held(n):
        return lambda row: nice_bytes(row['kv']['at'][n]['bytes'])
    lengths = list(summary['rows'][0]['kv']['at'])
    return with_names(
        'KV cache: bytes allocated for one sequence, by its length, and sequences per GB (10^9 '
        'bytes) at the largest length', models(summary), {
            'stored as': lambda row: row['kv']['dtype'],
            **{f'T={int(n):,}': held(n) for n in lengths},
            'sequences/GB': lambda row: f"{row['kv']['at'][lengths[-1]]['sequences_per_GB']:,}"},
        left=('row', 'stored as'))


def shares(task: str, heads: dict) -> dict:
    """Columns of shares of right answers, in %. heads: heading -> number of facts or distance."""
    def share(at):
        return lambda row: mean_sd(row[task]['accuracy'][at], '.1f', scale=100)
    return {head: share(at) for head, at in heads.items()}


def lookups(rows: list[dict]) -> Table:
    """Accuracy by number of facts; how many facts a row recalls, and their price in bytes."""
    first = rows[0]['lookup']
    title = (f'Looking up facts by content: right answers by number of facts, %, mean over seeds '
             f'(sd); chance is {100 / first["n_values"]:.1f}. Facts: the most of which '
             f'{RECALLED:.0%} are recalled, by seed. KV bytes: as allocated for T tokens')
    return with_names(title, rows, {
        **shares('lookup', {f'{int(n):,} facts': n for n in first['accuracy']}),
        'facts': lambda row: listed(row['lookup']['facts']),
        'KV bytes': lambda row: f"{row['lookup']['kv_bytes']:,}",
        'bytes a fact': lambda row: listed(f'{x:,.0f}' for x in row['lookup']['bytes_per_fact']
                                           if x is not None)})


def recalls(rows: list[dict]) -> Table:
    """Accuracy by distance. If the baseline has learned the task and local layers cannot solve it
    by themselves, also the difference from the baseline."""
    first, reach = rows[0]['recall'], local_reach(rows)
    baseline, distances = first['baseline'], list(first['accuracy'])
    title = ('Recall: accuracy at naming the token that many positions back, %, mean over '
             f'seeds (sd); differences in points, paired by seed; {INTERVAL}; local layers alone '
             f'reach {reach:,}')
    if first['learned'] != distances:
        title += (f'; at distances marked * {baseline} names less than {LEARNED:.0%} right, and '
                  'they do not distinguish the rows')
    columns = shares('recall', {
        f"{int(d):,} back{'' if d in first['learned'] else '*'}": d for d in distances})
    if first['beyond']:
        columns[f'beyond {reach:,}, less {baseline}'] = lambda row: plus_minus(
            row['recall'].get('above_baseline'), '.1f', scale=100)
    columns['seeds'] = lambda row: str(len(row['recall']['seeds']))
    return with_names(title, rows, columns)


def identifiers(summary: dict, rows: list[dict]) -> Table:
    first = rows[0]['identifiers']
    title = ('Identifiers: nats of all tokens of one, by the tokens since its last use (new: none '
             'in the window) and their number; mean over seeds (sd)')
    if any(row['identifiers']['kept'] for row in rows):
        title += (f"; kept: of what {summary['baseline']} gains over local layers alone from "
                  f"{first['beyond'][0]} tokens on")

    def nats(key):
        return lambda row: mean_sd(row['identifiers']['nats'].get(key), '.3f')

    def kept(row):
        share = row['identifiers']['kept']
        return mean_sd(share, '.0f', scale=100) + ' %' if share else MISSING
    heads = {key: key if key == 'new' else f'{key} to {2 * int(key) - 1}' for key in first['count']}
    columns = {f"{heads[key]}: {n:,}": nats(key) for key, n in first['count'].items()}
    return with_names(title, rows, columns | {'kept': kept})
