"""Summarise the measured runs of a ladder in one document (results.json): means, standard
deviations, and differences paired by seed with their confidence intervals."""
import operator
import statistics

from common.settings import MODEL
from kv.cache import KVCache
from kv.plan import LOCAL, plan_kv
from lab.ablation.stats import enough, holm, mean_sd, paired_difference
from lab.benchmarks.setting import numbers

LEARNED = 0.95  # rows are compared at distances where the baseline's recall is at least this
COMPARED = 'against_above', 'against_first', 'against_baseline'
REFERENCE = 'bfloat16'  # the storage assumed for 'auto'; vanilla GPT-2 is always counted with it
GIGABYTE = 10 ** 9
INFERENCE_KEYS = {*MODEL, 'kv_dtype', 'weight_dtype', 'at_inference'}


def summarize(ladder, results) -> dict:
    """Return the document that the report is made from."""
    measured = {}
    for row in ladder.rows.values():
        runs = {seed: results.read(row, seed) for seed in results.seeds(row)}
        measured[row.name] = {seed: run for seed, run in runs.items() if run}
    rows = [summarize_row(ladder, results, row, measured) | {'kv': kv_bytes(ladder, row)}
            for row in ladder.rows.values()]
    compare_identifiers(ladder, rows)
    for name in COMPARED:
        correct_for_number([row[name] for row in rows if row.get(name)])
    compare_recall(rows, ladder.baseline)
    return {'name': ladder.s.name, 'pictures': ladder.s.pictures, 'base': ladder.s.base,
            'first': ladder.first, 'baseline': ladder.baseline, 'rows': rows,
            'facts': facts(ladder, measured)}


def summarize_row(ladder, results, row, measured: dict) -> dict:
    """Summarise one row. `seeds_missing`: seeds without a result."""
    runs, wanted = measured[row.name], ladder.seeds(row)
    missing = sorted(set(wanted) - set(runs))
    entry = {
        'name': row.name, 'side': row.side, 'above': row.above,
        'changes': row.changes,
        # only the training differs, such as the optimizer or the learning rate
        'same_model': bool(row.above) and not row.changes.keys() & INFERENCE_KEYS,
        'kv_dtype': row.kv_dtype, 'seeds': sorted(runs), 'seeds_missing': missing,
        'command': ladder.command(row, wanted[0])}
    if not runs:
        return entry
    first = next(iter(runs.values()))
    entry |= {'params': first['params'], 'trained_as': first['trained_as']}
    task = next((name for name in ('lookup', 'recall') if name in first), None)
    if not task:
        return entry | losses_of_row(ladder, row, measured)
    found = [run[task] for run in runs.values()]
    accuracy = {n: mean_sd(each['accuracy'][n] for each in found) for n in found[0]['accuracy']}
    same = {key: found[0][key] for key in ('kv_bytes', 'rows', 'gap', 'n_values', 'local_reach')
            if key in found[0]}
    by_seed = {key: [each[key] for each in found]
               for key in ('facts', 'bytes_per_fact') if key in found[0]} or {'seeds': list(runs)}
    return entry | {task: same | by_seed | {'accuracy': accuracy}}


def kv_bytes(ladder, row) -> dict:
    """KV bytes of one sequence at each length of `contexts` and at block_size, as allocated and as
    planned, which must be equal; and those of vanilla GPT-2 in the first row's shape."""
    config = ladder.config(row)
    plan, T = plan_kv(config), config.block_size
    dtype = REFERENCE if row.kv_dtype == 'auto' else row.kv_dtype
    vanilla = plan_kv(ladder.config(ladder.rows[ladder.first])).vanilla()
    at = {}
    for n in sorted({*numbers('contexts', ladder.s.contexts), T}):
        allocated, planned = KVCache(plan, 1, n, dtype).nbytes, plan.nbytes(1, n, dtype)
        if allocated != planned:
            raise RuntimeError(f'row {row.name!r}: a cache of {n} tokens takes {allocated} bytes, '
                               f'the plan says {planned}')
        at[n] = {'bytes': allocated, 'vanilla_bytes': vanilla.nbytes(1, n, REFERENCE),
                 'sequences_per_GB': GIGABYTE // allocated}
    return {'dtype': dtype, 'T': T, 'bytes_per_token': at[T]['bytes'] / T, 'at': at,
            'smaller': at[T]['vanilla_bytes'] / at[T]['bytes']}


def losses_of_row(ladder, row, measured: dict) -> dict:
    """The row's losses, and their differences from the row above, the first and the baseline."""
    def each(key, name=row.name):
        return {seed: run[key] for seed, run in measured[name].items()}
    entry = {key: mean_sd(each(key).values())
             for key in ('val_loss', 'val_loss_forward', 'bits_per_byte')}
    entry['cache_minus_forward_largest'] = max(each('cache_minus_forward_largest').values())
    compared = {'above': row.above, 'first': ladder.first, 'baseline': ladder.baseline}
    for name, other in compared.items():
        if other and other != row.name:
            entry[f'against_{name}'] = paired_difference(each('val_loss'), each('val_loss', other))
    if all('identifiers' in run for run in measured[row.name].values()):
        found = list(each('identifiers').values())
        entry['identifiers'] = {
            'count': {key: n['count'] for key, n in found[0].items()},
            'nats': {key: mean_sd(one[key]['nats'] for one in found) for key in found[0]},
            'seeds': list(measured[row.name])}
    return entry


def compare_identifiers(ladder, rows: list[dict]) -> None:
    """Add what remains of the gain from long memory: `beyond`, the distances that no row's local
    layers reach together (a name is predicted from the token before it), the loss there, and the
    share `kept` of what the baseline gains there over the first row that has local layers alone
    (paired by seed; None without such rows). `alone` marks that row; `above_baseline` has the
    paired difference from the baseline at each distance."""
    rows = {row['name']: row for row in rows if row.get('identifiers')}
    plans = {name: plan_kv(ladder.config(ladder.rows[name])) for name in rows}
    reach = max((plan.local_reach for plan in plans.values()), default=0)
    for row in rows.values():
        found = row['identifiers']
        found['beyond'] = [key for key in found['count']
                           if key.isdigit() and int(key) > reach + 1 > 1]
        weights = [found['count'][key] for key in found['beyond']]
        each = zip(*(found['nats'][key]['each'] for key in found['beyond']))
        found['nats_beyond'] = {seed: sum(map(operator.mul, losses, weights)) / sum(weights)
                                for seed, losses in zip(found['seeds'], each)}
    without = next((name for name, plan in plans.items() if name != ladder.baseline
                    and all(layer.kind == LOCAL for layer in plan.layers)), None)
    low, high = (rows.get(name, {}).get('identifiers', {}).get('nats_beyond', {})
                 for name in (ladder.baseline, without))
    for row in rows.values():
        ours = row['identifiers']['nats_beyond']
        both = [seed for seed in ours if seed in low and high.get(seed) not in (None, low[seed])]
        row['identifiers']['kept'] = mean_sd(
            (high[seed] - ours[seed]) / (high[seed] - low[seed]) for seed in both) if both else None
        row['identifiers'] |= {'alone': row['name'] == without, 'above_baseline': {}}
        if ladder.baseline in rows and row['name'] != ladder.baseline:
            others = nats_by_seed(rows[ladder.baseline]['identifiers'])
            row['identifiers']['above_baseline'] = {  # without those that have no seed in common
                key: found for key, each in nats_by_seed(row['identifiers']).items()
                if key in others and (found := paired_difference(each, others[key]))}


def nats_by_seed(identifiers: dict) -> dict:
    return {key: dict(zip(identifiers['seeds'], each['each']))
            for key, each in identifiers['nats'].items()}


def correct_for_number(differences: list[dict]) -> None:
    """Add `stands` to the differences of one column that have an interval: whether they are
    significant at 5% for all of them together."""
    found = dict(enumerate(filter(enough, differences)))
    standing = holm({k: each['p'] for k, each in found.items()})
    for k, each in found.items():
        each['stands'] = k in standing


def compare_recall(rows: list[dict], baseline: str) -> None:
    """Compare each row's recall with the baseline's. Adds `learned`, the distances that the
    baseline has learned; `beyond`, those that local layers cannot reach; `above_baseline`, the
    paired difference of the mean accuracy at the distances in `beyond`."""
    rows = [row for row in rows if row.get('recall')]
    known = next((row['recall'] for row in rows if row['name'] == baseline), None)
    reach = local_reach(rows)
    accuracy = known['accuracy'] if known else {}
    learned = [distance for distance, each in accuracy.items() if each['mean'] >= LEARNED]
    beyond = [distance for distance in learned if int(distance) > reach > 0]

    def by_seed(recall):
        return {seed: statistics.fmean(recall['accuracy'][d]['each'][i] for d in beyond)
                for i, seed in enumerate(recall['seeds'])}
    for row in rows:
        recall = row['recall']
        recall |= {'baseline': baseline, 'learned': learned, 'beyond': beyond}
        if beyond and row['name'] != baseline:
            recall['above_baseline'] = paired_difference(by_seed(recall), by_seed(known))


def local_reach(rows: list[dict]) -> int:
    """Return the largest distance that local layers of any row can bridge; 0 without any."""
    return max((row['recall']['local_reach'] for row in rows
                if row.get('recall') and not row['side']), default=0)


def facts(ladder, measured: dict) -> dict:
    """The data, size and hardware of the ladder's runs: for each fact a sorted list of its values.
    Side rows count only if nothing else was measured."""
    main = [run for name, runs in measured.items() if not ladder.rows[name].side
            for run in runs.values()]
    runs = main or [run for runs in measured.values() for run in runs.values()]
    names = ['dataset', 'dtype', 'B', 'T', 'iterations', 'tokens', 'hardware', 'torch']
    if runs and 'windows' in runs[0]:
        names += ['val_windows', 'val_tokens']
    values = []
    for run in runs:
        s = run['settings']
        values.append(s | run | run['training'] | {
            'B': s['batch_size'] * s['gradient_accumulation_steps'], 'T': s['block_size'],
            'val_windows': run.get('windows'), 'val_tokens': run.get('tokens')})
    return {name: sorted({each[name] for each in values}) for name in names}
