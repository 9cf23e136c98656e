"""The tables and sentences of a report, from a summary (lab/ablation/summary.py). They are the same
on the terminal and in report.md."""
import csv
import io
import statistics

from config.sizes import nice_bytes
from lab.ablation.cells import INTERVAL, MISSING, label, mean_sd, plus_minus, smaller
from lab.ablation.recall_tables import identifiers, lookup_distances, lookups, recalls
from lab.ablation.stats import enough, seeds_needed
from lab.ablation.summary import COMPARED
from lab.tables import Table


def is_model(row: dict) -> bool:
    """False for a side row that only trains the model of another row differently."""
    return not (row['side'] and row['same_model'])


def models(summary: dict) -> list[dict]:
    return list(filter(is_model, summary['rows']))


def certain(difference: dict) -> bool:
    return abs(difference['mean']) > difference['half_95']


def verdict(difference: dict) -> str:
    """Describe in words what a paired difference of losses shows."""
    each = difference['each']
    if not enough(difference):
        return 'too few seeds for an interval'
    if certain(difference):
        stands = ', for all rows together too (Holm)' if difference.get('stands') else ''
        return f'the interval excludes zero{stands}'
    if min(each) <= 0 <= max(each):
        return 'not distinguishable'
    return (f"not distinguishable; all {len(each)} differences are "
            f"{'positive' if min(each) > 0 else 'negative'} "
            f'(sign test: p = {0.5 ** (len(each) - 1):.2g})')


def starred(difference: dict | None) -> str:
    return plus_minus(difference) + '*' * bool(difference and difference.get('stands'))


def title(summary: dict) -> str:
    return f"{summary['name']}: what each saving costs and buys"


def in_short(summary: dict) -> list[str]:
    """Three sentences: what the ladder's last row saves, what that costs, and which steps the
    seeds can tell apart."""
    ladder = [row for row in summary['rows'] if not row['side'] and 'val_loss' in row]
    if not ladder or ladder[-1]['name'] == summary['baseline']:
        return []
    last, kv = ladder[-1], ladder[-1]['kv']
    lines = [f"{last['name']!r}, the last row of the ladder, holds {kv['smaller']:.1f} times "
             f"fewer KV bytes at T={kv['T']:,} than vanilla GPT-2 in bfloat16."]
    if difference := last.get('against_baseline'):
        lines.append(f"Its validation loss is {last['val_loss']['mean']:.4f}; the difference from "
                     f"{summary['baseline']!r} is {plus_minus(difference)}: {verdict(difference)}.")
    steps = {row['name']: row['against_above'] for row in ladder
             if enough(row.get('against_above'))}
    if not steps:
        return [*lines, 'No step down the ladder has the three seeds that an interval needs.']
    apart = [f"{name!r} ({'higher' if step['mean'] > 0 else 'lower'} loss)"
             for name, step in steps.items() if certain(step)]
    have = 'has' if len(apart) == 1 else 'have'
    names = f": {', '.join(apart)}" if apart else ''
    return [*lines, f'Of the {len(steps)} steps down the ladder, {len(apart)} {have} an interval '
                    f'that excludes zero{names}.']


def caveats(summary: dict) -> list[str]:
    """Return sentences on what the losses of this ladder do not show."""
    lines = []
    known = {(row['name'], row[key]['mean']): row[key] for row in summary['rows']
             for key in COMPARED if enough(row.get(key))}
    if len(known) > 1:
        lines.append(f'{len(known)} intervals are shown, each by itself: about one in twenty '
                     'excludes zero where there is no difference. Differences marked * are '
                     'significant at 5% for all rows together that have three seeds and are '
                     'compared with the same kind of row (Holm 1979).')
    if known:
        lines.append('Intervals cover the variation between seeds, not the choice of validation '
                     'text.')
    halves = [each['evaluation_half_95'] for each in known.values()
              if each.get('evaluation_half_95') is not None]
    if halves:
        lines.append(f'Other windows of the same text would move {len(halves)} of these '
                     f'{len(known)} differences by at most ±{max(halves):.4f} (95%, paired '
                     'bootstrap over windows).')
    baseline = next(row for row in summary['rows'] if row['name'] == summary['baseline'])
    losses = baseline.get('loss_by_position', ())
    start = flat_from(losses)
    if 0 < start <= len(losses) // 4:
        lines.append(f"The baseline's loss hardly depends on the position beyond {start} tokens: "
                     'on this text the loss cannot show the cost of forgetting older tokens.')
    return lines


def flat_from(losses) -> int:
    """Return the position after which all means of 16 losses are within 0.05 nats of the mean of
    the second half; 0 for fewer than 64 losses."""
    blocks = [statistics.fmean(losses[i:i + 16]) for i in range(0, len(losses) - 15, 16)]
    if len(blocks) < 4:
        return 0
    level = statistics.fmean(blocks[len(blocks) // 2:])
    return 16 * max((i + 1 for i, x in enumerate(blocks) if abs(x - level) > 0.05), default=0)


def shortcomings(summary: dict) -> list[str]:
    """One line for each failed run and each failed measurement, and one for all runs that have not
    been trained yet."""
    lines = [f"{row['name']}: failed with seed {seed}: {error}" for row in summary['rows']
             for seed, error in row['failed'].items()]
    for row in summary['rows']:
        for cell in row.get('speed') or []:
            if 'errors' in cell and (cell['kind'] == 'train' or is_model(row)):
                at = f"{cell['context']:,} tokens, batch {cell['batch']}" if cell['context'] \
                    else 'its batch'
                lines.append(f"{row['name']}: not timed ({cell['kind']}, {at}): {cell['errors']}")
    waiting = []
    for row in summary['rows']:
        if seeds := [str(seed) for seed in row['seeds_missing'] if seed not in row['failed']]:
            plural = 's' if len(seeds) > 1 else ''
            waiting.append(f"{row['name']} (seed{plural} {', '.join(seeds)})")
    return lines + ([f"not trained yet: {'; '.join(waiting)}"] if waiting else [])


def notes(summary: dict) -> list[str]:
    """The paragraphs below the tables."""
    through = sorted({name for row in summary['rows'] if row['kv']['dtype'] == 'bfloat16'
                      for name in row.get('judged_through', ())} - {'bfloat16'})
    note = (' (the losses of these rows were computed through a cache in '
            f"{' or '.join(through)})") if through else ''
    explanation = (
        'Written by ablate.py from the files in this folder. A row is one change from the '
        'row above it, a side row (from ...) from the row that it names. KV bytes assume '
        f'bfloat16 where a row does not set its storage{note}, and are compared with vanilla '
        "GPT-2 in bfloat16; the caches were allocated, and their sizes equal the plan's "
        'arithmetic.')
    return [facts_line(summary), explanation]


def changed(row: dict) -> str:
    changes = [f'{name}={value!r}' for name, value in row['changes'].items()]
    return ', '.join(changes) or 'as the base config'


def facts_line(summary: dict) -> str:
    """Data, size of the runs, hardware and versions in one line."""
    facts = summary['facts']
    if not facts['dataset']:
        return 'Nothing was measured yet.'

    def each(name, form=''):
        return ' or '.join(format(x, form) for x in facts[name])
    line = (f"{each('dataset')}, {each('iterations', ',')} iterations of B={each('B')} x "
            f"T={each('T')} ({each('tokens', ',')} tokens), {each('dtype')}, {each('hardware')}, "
            f"torch {each('torch')}")
    if 'val_windows' in facts:
        line += (f"; validation on {each('val_windows', ',')} windows "
                 f"({each('val_tokens', ',')} tokens), through the cache")
    return line + '.'


def grids(summary: dict) -> list[Table]:
    """Return all tables that have rows."""
    rows = summary['rows']
    tables = [lookups(summary), lookup_distances(summary), recalls(summary), identifiers(summary),
              bytes_held(summary), weights_and_prefill(summary), speeds(summary), training(summary)]
    tasks = any(row.get('recall') or row.get('lookup') for row in rows)
    if any('val_loss' in row for row in rows) or not tasks:
        tables = [headline(summary), headline(summary, side=True), *tables]
    return [table for table in tables if table and table.rows]


def headline(summary: dict, side: bool = False) -> Table:
    """Losses, KV bytes and sizes of the ladder's rows, or of the side rows."""
    others = ['baseline'] if side else ['first', 'baseline']
    if not side and summary['first'] == summary['baseline']:
        others = ['first']
    name, above = ('Alternatives', 'against that') if side else ('The ladder', 'against above')
    T = summary['rows'][0]['kv']['T']
    against = (f'against {summary[other]}' for other in others)
    table = Table(f'{name}: validation loss in nats per token, mean over seeds (sd); differences '
                  f'are paired by seed; {INTERVAL}; KV bytes at T={T:,}',
                  ('row', 'val loss', 'KV bytes/token', 'smaller', above, *against, 'bits/byte',
                   'parameters', 'seeds'), left=('row',))
    for row in summary['rows']:
        if row['side'] != side:
            continue
        failed = f", failed {len(row['failed'])}" if row['failed'] else ''
        differences = (row.get(f'against_{key}') for key in ('above', *others))
        table.rows.append((
            label(row), mean_sd(row.get('val_loss')), f"{row['kv']['bytes_per_token']:,.0f}",
            smaller(row), *map(starred, differences),
            f"{row['bits_per_byte']['mean']:.3f}" if 'bits_per_byte' in row else MISSING,
            f"{row['params']:,}" if 'params' in row else MISSING, f"{len(row['seeds'])}{failed}"))
    return table


def as_csv(summary: dict) -> str:
    """The main table in full precision, side rows included. Missing numbers are empty cells."""
    pairs = [key for key in COMPARED if any(row.get(key) for row in summary['rows'])]
    looked_up = next((list(row['lookup']['accuracy']) for row in summary['rows']
                      if row.get('lookup')), [])
    records = []
    for row in summary['rows']:
        loss, bits = row.get('val_loss') or {}, row.get('bits_per_byte') or {}
        record = {'row': row['name'], 'above': row['above'], 'side': int(row['side']),
                  'seeds': len(row['seeds']), 'val_loss': loss.get('mean'),
                  'val_loss_sd': loss.get('sd'), 'bits_per_byte': bits.get('mean'),
                  'kv_bytes_per_token': row['kv']['bytes_per_token'],
                  'smaller': row['kv']['smaller'], 'parameters': row.get('params')}
        for key in pairs:
            found = row.get(key) or {'mean': None, 'each': ()}
            record[key] = found['mean']
            known = enough(found)
            for part in ('half_95', 'evaluation_half_95', 'p', 'stands'):
                record[f'{key}_{part}'] = found.get(part) if known else None
            record[f'{key}_seeds_for_0.01'] = (
                seeds_needed(statistics.stdev(found['each']), 0.01) if known else None)
        if looked_up:
            found = row.get('lookup') or {'accuracy': {}, 'facts': (), 'kv_bytes': None}
            record |= {f'right_of_{n}': found['accuracy'].get(n, {}).get('mean')
                       for n in looked_up}
            record |= {'kv_bytes': found['kv_bytes'],
                       'facts': statistics.fmean(found['facts']) if found['facts'] else None}
        records.append(record)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def short(summary: dict) -> Table:
    """The main columns of the ladder's rows, as shown in the README."""
    T = summary['rows'][0]['kv']['T']
    table = Table('', ('row', f'KV bytes at T={T:,}', 'smaller', 'validation loss',
                       f"against {summary['baseline']}"), left=('row',))
    for row in summary['rows']:
        if not row['side']:
            table.rows.append((row['name'], f"{row['kv']['bytes_per_token'] * T:,.0f}",
                               smaller(row), mean_sd(row.get('val_loss')),
                               plus_minus(row.get('against_baseline'))))
    return table


def bytes_held(summary: dict) -> Table:
    """KV bytes of one sequence by length."""
    lengths = list(summary['rows'][0]['kv']['at'])
    heads = ('row', 'stored as', *(f'T={int(n):,}' for n in lengths), 'sequences/GB')
    table = Table('KV cache: bytes allocated for one sequence, by its length, and sequences per '
                  'GB (10^9 bytes) at the largest length', heads, left=heads[:2])
    for row in models(summary):
        at = row['kv']['at']
        table.rows.append((label(row), row['kv']['dtype'],
                           *(nice_bytes(at[n]['bytes']) for n in lengths),
                           f"{at[lengths[-1]]['sequences_per_GB']:,}"))
    return table


def weights_and_prefill(summary: dict) -> Table:
    """Bytes of the weights, and FLOPs of a prompt by length."""
    lengths = list(summary['rows'][0]['kv']['at'])
    heads = ('row', 'weights in', 'bytes', *(f'prefill T={int(n):,}' for n in lengths))
    table = Table('Weights: bytes (int8: without scales). Prefill: MFLOPs per token of a prompt, '
                  'by its length, up to the logits of its last token; computed from the plan',
                  heads, left=heads[:2])
    for row in models(summary):
        weights, at = row['kv']['weights'], row['kv']['at']
        mflops = (at[n]['prefill_flops'] / int(n) / 1e6 for n in lengths)
        table.rows.append((label(row), weights['dtype'], nice_bytes(weights['bytes']),
                           *(f'{x:,.2f}' for x in mflops)))
    return table


def where(speed: dict) -> str:
    shape = ''.join(f', {name}={value}' for name, value in speed['shape'].items())
    threads = 'thread' if speed['threads'] == 1 else 'threads'
    return (f"{speed['device']}, {speed['processor']}, {speed['threads']} {threads}, "
            f"{speed['dtype']}, torch {speed['torch']}{shape}")


def speeds(summary: dict) -> Table | None:
    """Decoding and prefill."""
    speed = summary['speed'] or {'cells': []}
    heads = {}
    for cell in speed['cells']:
        names = {'prefill': f"TTFT {cell['context']:,}",
                 'decode': f"TPOT {cell['context']:,} B={cell['batch']}"}
        if cell['kind'] in names:
            heads[place(cell)] = names[cell['kind']]
    if not heads:
        return None
    table = Table('Speed: time to first token (TTFT, by prompt length) and per output token '
                  '(TPOT, by cached tokens and batch size) in ms, median; random weights; '
                  + where(speed), ('row', *heads.values()), left=('row',))
    for row in models(summary):
        cells = dict.fromkeys(heads, MISSING)
        for cell in row.get('speed') or []:
            if times := cell.get('tpot_ms') or cell.get('ttft_ms'):
                x = times['median']
                cells[place(cell)] = f'{x:.2f}' if x < 10 else f'{x:,.1f}'
        table.rows.append((label(row), *cells.values()))
    return table


def place(cell: dict) -> tuple:
    return cell['kind'], cell['context'], cell['batch']


def training(summary: dict) -> Table | None:
    """Training steps. Side rows with the same training step as the row above are omitted."""
    speed = summary['speed'] or {'cells': []}
    if not any(cell['kind'] == 'train' for cell in speed['cells']):
        return None
    table = Table('Training: tokens/s, median, of single batches with an update each, not '
                  'compiled; activations kept for the backward pass, and peak memory of a step, '
                  f'in MB (predicted); {where(speed)}',
                  ('row', 'tokens/s', 'activations', 'peak'), left=('row',))
    trains_as = speed['trains_as']
    for row in summary['rows']:
        if row['side'] and trains_as[row['name']] == trains_as[row['above']]:
            continue
        cells = [MISSING] * 3
        for cell in row.get('speed') or []:
            if 'memory' in cell:
                megabytes = [cell['memory'][name] / 1e6 for name in ('activations', 'peak')]
                cells = [f'{x:,.0f}' for x in (cell['tokens_per_second']['median'], *megabytes)]
        table.rows.append((label(row), *cells))
    return table
