"""A summary (lab/ablation/summary.py) as tables, which the terminal, report.md and report.html all show."""
import csv
import io

from config.sizes import nice_bytes
from lab.ablation.summary import LEARNED, local_reach
from lab.tables import Table as Grid

MISSING = '-'


def label(row: dict) -> str:
    """The name of a row; of a side row, also what it departs from, and its iterations where it names them."""
    steps = f"; {row['changes']['max_iters']:,} iterations" if 'max_iters' in row['changes'] else ''
    return f"{row['name']} (from {row['above']}{steps})" if row['side'] else row['name']


def plus_minus(found: dict | None, form: str = '.4f') -> str:
    """'+0.0123 ±0.0045': a paired difference and its 95% confidence interval. Of one pair '+0.0123 (n=1)', of two both
    differences, '+0.0123, +0.0150 (n=2)': with one degree of freedom the interval's width is mostly chance."""
    if not found:
        return MISSING

    def signed(x):
        text = format(x, '+z' + form)
        return text if float(text) else text.lstrip('+')
    if len(found['each']) < 3:
        return f"{', '.join(map(signed, found['each']))} (n={len(found['each'])})"
    return f"{signed(found['mean'])} ±{format(found['half_95'], form)}"


INTERVAL = "±: 95% confidence interval of the paired difference (Student's t, n-1 degrees of freedom)"


def verdict(found: dict) -> str:
    """What a paired difference of losses can tell, in words."""
    n, mean, each = len(found['each']), found['mean'], found['each']
    if n < 3:
        return 'too few seeds for an interval'
    if abs(mean) > found['half_95']:
        return 'the interval excludes zero'
    signs = {x > 0 for x in each} if all(each) else {True, False}
    alike = f"; all {n} differences are {'positive' if each[0] > 0 else 'negative'} (sign test: p = {0.5 ** (n - 1):.2g})"
    return 'not distinguishable' + alike * (len(signs) == 1)


def in_short(summary: dict) -> list[str]:
    """Three sentences on the ladder: what its last row saves, what that costs, and which steps the seeds can tell apart."""
    ladder = [row for row in summary['rows'] if not row['side'] and 'val_loss' in row]
    if not ladder or ladder[-1]['name'] == summary['baseline']:
        return []
    last, baseline = ladder[-1], summary['baseline']
    told = [f"{last['name'].lstrip('+ ')!r}, the last row of the ladder, holds {last['kv']['smaller']:.1f} times fewer KV "
            f"bytes at T={last['kv']['T']:,} than vanilla GPT-2 in bfloat16."]
    if found := last.get('against_baseline'):
        told.append(f"Its validation loss is {last['val_loss']['mean']:.4f}, {plus_minus(found)} against "
                    f"{baseline.lstrip('+ ')!r}: {verdict(found)}.")
    steps = {row['name']: row['against_above'] for row in ladder
             if row.get('against_above') and len(row['against_above']['each']) > 2}
    if not steps:
        return [*told, 'No step down the ladder has the three seeds that an interval needs.']
    apart = [f"{name.lstrip('+ ')!r} ({'higher' if found['mean'] > 0 else 'lower'} loss)" for name, found in steps.items()
             if abs(found['mean']) > found['half_95']]
    told.append(f"Of the {len(steps)} steps down the ladder, {len(apart)} {'has' if len(apart) == 1 else 'have'} "
                'an interval that excludes zero' + f": {', '.join(apart)}" * bool(apart) + '.')
    return told


def caveats(summary: dict) -> list[str]:
    """What the losses of this ladder cannot tell."""
    contrasts = {(row['name'], row[key]['mean']) for row in summary['rows'] for key in row
                 if key.startswith('against_') and row[key] and len(row[key]['each']) > 2}
    lines = [f'{len(contrasts)} intervals are shown, not corrected for their number: about one in twenty excludes zero where '
             'there is no difference. They cover the seeds, not the choice of validation text.'] * (len(contrasts) > 1)
    baseline = next((row for row in summary['rows'] if row['name'] == summary['baseline']), {})
    start = flat_from(baseline.get('loss_by_position', ()))
    if 0 < start <= len(baseline.get('loss_by_position', ())) // 4:
        lines.append(f"The baseline's loss hardly depends on the position beyond {start} tokens: on this text the loss cannot "
                     "show what memory beyond them costs.")
    return lines


def flat_from(losses) -> int:
    """The position from which the means of 16 losses each stay within 0.05 nats of the mean of the second half; 0 if the
    losses are too few to tell."""
    blocks = [sum(losses[i:i + 16]) / 16 for i in range(0, len(losses) - 15, 16)]
    if len(blocks) < 4:
        return 0
    level = sum(blocks[len(blocks) // 2:]) / (len(blocks) - len(blocks) // 2)
    return 16 * max((i + 1 for i, x in enumerate(blocks) if abs(x - level) > 0.05), default=0)


def mean_sd(found: dict | None, form: str = '.4f') -> str:
    """'1.7718 (0.0029)': mean and standard deviation."""
    if not found:
        return MISSING
    return format(found['mean'], form) + (f" ({format(found['sd'], form)})" if found['sd'] is not None else '')


def shortcomings(summary: dict) -> list[str]:
    """What keeps the ladder from being whole: a line for each failure, and one for all that is not trained yet."""
    lines = [f"{row['name']}: failed with seed {seed}: {error}" for row in summary['rows']
             for seed, error in row['failed'].items()]
    waiting = {row['name']: [seed for seed in row['seeds_missing'] if seed not in row['failed']] for row in summary['rows']}
    named = [f"{name} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})" for name, seeds in waiting.items() if seeds]
    for row in summary['rows']:
        for cell in row.get('speed') or []:
            if 'errors' in cell and (cell['kind'] == 'train' or not (row['side'] and row['same_model'])):
                at = f"{cell['context']:,} tokens, batch {cell['batch']}" if cell['context'] else 'its batch'
                lines.append(f"{row['name']}: not timed ({cell['kind']}, {at}): {cell['errors']}")
    return lines + ([f"not trained yet: {'; '.join(named)}"] if named else [])


def headline(summary: dict, side: bool = False) -> Grid:
    """Each row of the ladder in a line: size, what it remembers, how well it predicts. side: the side rows instead."""
    others = {'baseline': summary['baseline']} if side else {'first': summary['first'], 'baseline': summary['baseline']}
    others = dict(list(others.items())[:len(set(others.values()))])
    name, above = ('Alternatives', 'against that') if side else ('The ladder', 'against above')
    grid = Grid(f'{name}: validation loss in nats per token, mean over seeds (sd); differences are paired by seed; '
                f"{INTERVAL}; KV bytes at T={summary['rows'][0]['kv']['T']:,}",
                ('row', 'val loss', 'KV bytes/token', 'smaller', above, *(f'against {name}' for name in others.values()),
                 'bits/byte', 'parameters', 'seeds'), left=('row',))
    for row in (row for row in summary['rows'] if row['side'] == side):
        kv = row['kv']
        grid.rows.append((label(row), mean_sd(row.get('val_loss')), f"{kv['bytes_per_token']:,.0f}", f"{kv['smaller']:.1f}x",
                          *(plus_minus(row.get(f'against_{name}')) for name in ('above', *others)),
                          f"{row['bits_per_byte']['mean']:.3f}" if 'bits_per_byte' in row else MISSING,
                          f"{row['params']:,}" if 'params' in row else MISSING,
                          str(len(row['seeds'])) if not row['failed'] else f"{len(row['seeds'])}, failed {len(row['failed'])}"))
    return grid


def as_csv(summary: dict) -> str:
    """The main table as numbers, a line for each row, side rows too. Cells without a number are empty."""
    file = io.StringIO()
    pairs = [key for key in ('above', 'first', 'baseline') if any(row.get(f'against_{key}') for row in summary['rows'])]
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(['row', 'above', 'side', 'seeds', 'val_loss', 'val_loss_sd', 'bits_per_byte',
                     'kv_bytes_per_token', 'smaller', 'parameters',
                     *(f'against_{key}{more}' for key in pairs for more in ('', '_half_95'))])
    for row in summary['rows']:
        loss, cells = row.get('val_loss') or {}, []
        for found in (row.get(f'against_{key}') or {} for key in pairs):
            cells += [found.get('mean'), found.get('half_95') if len(found.get('each', ())) > 2 else None]
        writer.writerow([row['name'], row['above'], int(row['side']), len(row['seeds']), loss.get('mean'), loss.get('sd'),
                         (row.get('bits_per_byte') or {}).get('mean'), row['kv']['bytes_per_token'], row['kv']['smaller'],
                         row.get('params'), *cells])
    return file.getvalue()


def short(summary: dict) -> Grid:
    """The headline of the headline, without side rows: README has it."""
    T = summary['rows'][0]['kv']['T']
    grid = Grid('', ('row', f'KV bytes at T={T:,}', 'smaller', 'validation loss', f"against {summary['baseline']}"),
                left=('row',))
    for row in summary['rows']:
        if not row['side']:
            kv = row['kv']
            grid.rows.append((row['name'], f"{kv['bytes_per_token'] * T:,.0f}", f"{kv['smaller']:.1f}x",
                              mean_sd(row.get('val_loss')), plus_minus(row.get('against_baseline'))))
    return grid


def models(summary: dict) -> list[dict]:
    """The rows without side rows that are another one's model, trained in another way."""
    return [row for row in summary['rows'] if not (row['side'] and row['same_model'])]


def bytes_held(summary: dict) -> Grid:
    """KV bytes of one sequence by its length, and how many fit into a gigabyte."""
    lengths = list(summary['rows'][0]['kv']['at'])
    grid = Grid('KV cache: bytes of one sequence by its length, and sequences to a GB (10^9 bytes) at the longest; allocated',
                ('row', 'stored as', *(f'T={int(n):,}' for n in lengths), 'sequences/GB'), left=('row', 'stored as'))
    for row in models(summary):
        at = row['kv']['at']
        grid.rows.append((label(row), row['kv']['dtype'], *(nice_bytes(at[n]['bytes']) for n in lengths),
                          f"{at[lengths[-1]]['sequences_per_GB']:,}"))
    return grid


def weights_and_prefill(summary: dict) -> Grid:
    """Bytes of the weights, and FLOPs of a prompt for each of its tokens, by its length."""
    lengths = list(summary['rows'][0]['kv']['at'])
    grid = Grid('Weights: bytes (in int8 without scales). Prefill: MFLOPs for each token of a prompt, by its length, to '
                "the logits of the last; counted from the plan",
                ('row', 'weights in', 'bytes', *(f'prefill T={int(n):,}' for n in lengths)), left=('row', 'weights in'))
    for row in models(summary):
        weights, at = row['kv']['weights'], row['kv']['at']
        grid.rows.append((label(row), weights['dtype'], nice_bytes(weights['bytes']),
                          *(f"{at[n]['prefill_flops'] / int(n) / 1e6:,.2f}" for n in lengths)))
    return grid


def where(speed: dict) -> str:
    """On what it was measured."""
    shape = ''.join(f', {name}={value}' for name, value in speed['shape'].items())
    return (f"{speed['device']}, {speed['processor']}, {speed['threads']} threads, {speed['dtype']}, "
            f"torch {speed['torch']}{shape}")


def speeds(summary: dict) -> Grid | None:
    """Decoding and prefill."""
    cells = [cell for cell in (summary['speed'] or {}).get('cells', []) if cell['kind'] != 'train']
    if not cells:
        return None
    heads = [f"{'TTFT' if cell['kind'] == 'prefill' else 'TPOT'} {cell['context']:,}"
             + (f" B={cell['batch']}" if cell['kind'] == 'decode' else '') for cell in cells]
    grid = Grid('Speed: time to first token (TTFT, by length of the prompt) and per output token (TPOT, by tokens held and '
                f"sequences at once) in ms, median; random weights; {where(summary['speed'])}",
                ('row', *heads), left=('row',))
    for row in models(summary):
        by = {(cell['kind'], cell['context'], cell['batch']): cell for cell in row.get('speed') or []}
        found = [by.get((cell['kind'], cell['context'], cell['batch'])) for cell in cells]
        times = [c and (c.get('tpot_ms') or c.get('ttft_ms')) for c in found]
        grid.rows.append((label(row), *(milliseconds(x['median']) if x else MISSING for x in times)))
    return grid


def milliseconds(x: float) -> str:
    """'0.31', '25.5'."""
    return f'{x:.2f}' if x < 10 else f'{x:,.1f}'


def training(summary: dict) -> Grid | None:
    """Training steps."""
    cells = [cell for cell in (summary['speed'] or {}).get('cells', []) if cell['kind'] == 'train']
    if not cells:
        return None
    grid = Grid('Training: tokens/s, median, of single batches with an update each, not compiled; activations kept for the '
                f"backward pass, and the most memory in a step, MB (predicted); {where(summary['speed'])}",
                ('row', 'tokens/s', 'activations', 'peak'), left=('row',))
    trains_as = summary['speed']['trains_as']
    for row in summary['rows']:
        if row['side'] and trains_as[row['name']] == trains_as[row['above']]:
            continue
        cell = next((c for c in row.get('speed') or [] if c['kind'] == 'train'), None)
        figures = [MISSING] * 3 if not cell or 'memory' not in cell else [f"{cell['tokens_per_second']['median']:,.0f}",
                                                  f"{cell['memory']['activations'] / 1e6:,.0f}",
                                                  f"{cell['memory']['peak'] / 1e6:,.0f}"]
        grid.rows.append((label(row), *figures))
    return grid


def recalls(summary: dict) -> Grid | None:
    """Accuracy by distance; where the baseline learns the task and local layers alone cannot, also beside the baseline's."""
    found = [row for row in summary['rows'] if row.get('recall')]
    if not found:
        return None
    one, reach = found[0]['recall'], local_reach(found)
    distances, beyond = list(one['accuracy']), (f"beyond {reach:,}, less {one['baseline']}",) * bool(one['beyond'])
    of = f" (ladder {summary['recall_ladder']!r})" * bool(summary['recall_ladder'])
    useless = f"; at distances marked * {one['baseline']} names less than {LEARNED:.0%} right" \
              f"{'' if one['baseline_known'] else ' or is not measured yet'}, and they tell nothing"
    grid = Grid(f'Recall{of}: tokens named right from so many positions back, %, mean over seeds (sd); differences in points, '
                f'paired by seed; {INTERVAL}; local layers alone reach {reach:,}'
                + useless * (one['learned'] != distances),
                ('row', *(f"{int(d):,} back{'' if d in one['learned'] else '*'}" for d in distances), *beyond, 'seeds'),
                left=('row',))
    for row in found:
        accuracy = [times_100(row['recall']['accuracy'][d], ('mean', 'sd')) for d in distances]
        above = times_100(row['recall'].get('above_baseline'), ('mean', 'half_95'))
        grid.rows.append((label(row), *(mean_sd(a, '.1f') for a in accuracy), *(plus_minus(above, '.1f') for _ in beyond),
                          str(len(row['recall']['seeds']))))
    return grid


def times_100(found: dict | None, names: tuple) -> dict | None:
    """Shares as percent."""
    return found and {name: None if found[name] is None else 100 * found[name] for name in names} | {
        'each': [100 * x for x in found['each']]}


def grids(summary: dict) -> list[Grid]:
    """All tables that there is something for."""
    text = any('val_loss' in row for row in summary['rows']) or not any(row.get('recall') for row in summary['rows'])
    made = [headline(summary), headline(summary, side=True)] if text else []
    made += [recalls(summary), bytes_held(summary), weights_and_prefill(summary), speeds(summary), training(summary)]
    return [grid for grid in made if grid and grid.rows]


def explanation(summary: dict) -> str:
    """What the figures of the tables are, in a paragraph."""
    counted = 'bfloat16'
    through = sorted({name for row in summary['rows'] if row['kv']['dtype'] == counted
                      for name in row.get('judged_through', ())} - {counted})
    return ('Made by ablate.py from the JSON files here. A row is one change from the row above it, side rows (from '
            '...) from the one they name. KV bytes count bfloat16 where a row names no storage of its own'
            + f" (the losses of these rows were computed through a cache in {' or '.join(through)})" * bool(through)
            + ", and are compared with vanilla GPT-2 in bfloat16; they were allocated, and equal the plan's arithmetic.")


def changed(row: dict) -> str:
    """'pos_embedding=rope': what a row changes."""
    return ', '.join(f'{name}={value!r}' for name, value in row['changes'].items()) or 'as the base config'


def facts_line(summary: dict) -> str:
    """Data, size of the runs, hardware and versions in one line."""
    f = summary['facts']

    def each(name, form='{}'):
        return ' or '.join(form.format(x) for x in f[name])
    if not f['dataset']:
        return 'Nothing was measured yet.'
    return (f"{each('dataset')}, {each('iterations', '{:,}')} iterations of B={each('B')} x T={each('T')} "
            f"({each('tokens', '{:,}')} tokens), {each('dtype')}, {each('hardware')}, torch {each('torch')}"
            + (f"; validation on {each('val_windows', '{:,}')} windows ({each('val_tokens', '{:,}')} tokens), through the "
               'cache.' if 'val_windows' in f else '.'))
