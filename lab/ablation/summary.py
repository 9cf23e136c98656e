"""Summarise the measured runs of a ladder in one document (results.json): means, standard
deviations, and differences paired by seed with their confidence intervals."""
import operator
import statistics

from config.schema import MODEL
from kv.plan import LOCAL, plan_kv
from lab.ablation.results import read_json
from lab.ablation.stats import enough, evaluation_half, holm, mean_sd, paired_difference

LEARNED = 0.95  # rows are compared at distances where the baseline's recall is at least this
COMPARED = 'against_above', 'against_first', 'against_baseline'
INFERENCE_KEYS = {*(key.name for key in MODEL), 'kv_dtype', 'weight_dtype', 'at_inference'}


def summarize(ladder, results, speed: dict | None, recall: dict | None, kv_of) -> dict:
    """Return the document that all reports are made from.

    speed: as returned by cost.Speed.measure. recall: as returned by recall_of.
    kv_of: row -> its bytes (cost.kv_bytes).
    """
    measured = {}
    for row in ladder.rows.values():
        runs = {seed: results.read(row, seed) for seed in results.seeds(row)}
        measured[row.name] = {seed: run for seed, run in runs.items() if run}
    rows = []
    for row in ladder.rows.values():
        entry = summarize_row(ladder, results, row, measured)
        if recall and row.name in recall['recall']:
            entry['recall'] = recall['recall'][row.name]
        rows.append(entry | {'kv': kv_of(row)})
    compare_identifiers(ladder, rows)
    for name in COMPARED:
        correct_for_number([row[name] for row in rows if row.get(name)])
    if not recall:
        compare_recall(rows, ladder.baseline)
    return {'name': ladder.s.name, 'pictures': ladder.s.pictures, 'base': ladder.s.base,
            'first': ladder.first, 'baseline': ladder.baseline, 'rows': rows,
            'facts': facts(ladder, measured), 'speed': speed, 'recall_ladder': ladder.s.recall,
            'lookup_rows': recall['lookup'] if recall else []}


def summarize_row(ladder, results, row, measured: dict) -> dict:
    """Summarise one row. `seeds_missing`: seeds without a result."""
    runs, wanted = measured[row.name], ladder.seeds(row)
    missing = sorted(set(wanted) - set(runs))
    config = ladder.config(row)
    entry = {
        'name': row.name, 'slug': row.slug, 'side': row.side, 'above': row.above,
        'changes': row.changes, 'converted_from': row.converted_from,
        # only the training differs: optimizer, learning rate or initial weights
        'same_model': bool(row.above) and not row.changes.keys() & INFERENCE_KEYS,
        'kv_dtype': row.kv_dtype, 'seeds': sorted(runs), 'seeds_missing': missing,
        'n_layer': config.n_layer, 'T': config.block_size, 'W': config.window_size,
        'command': ladder.command(row, wanted[0])}
    if not runs:
        return entry
    first = next(iter(runs.values()))
    entry |= {'params': first['params'], 'params_all': first['params_all'],
              'learning_rate': first['settings']['learning_rate'],
              'tokens': first['training']['tokens'],
              'iterations': first['training']['iterations'], 'trained_as': first['trained_as']}
    if 'lookup' in first:
        return entry | {'lookup': lookup_of_row([run['lookup'] for run in runs.values()])}
    if 'recall' not in first:
        return entry | losses_of_row(ladder, row, measured)
    accuracy = {distance: mean_sd(run['recall']['accuracy'][distance] for run in runs.values())
                for distance in first['recall']['accuracy']}
    reach, n_rows = first['recall']['local_reach'], first['recall']['rows']
    return entry | {'recall': {'accuracy': accuracy, 'local_reach': reach, 'rows': n_rows,
                               'seeds': list(runs)}}


def lookup_of_row(runs: list[dict]) -> dict:
    """Summarise `lookup.lookup` over the seeds."""
    first = runs[0]
    each = {key: [run[key] for run in runs] for key in ('facts', 'bytes_per_fact')}
    means = {key: {n: mean_sd(run[key][n] for run in runs) for n in first[key]}
             for key in ('accuracy', 'by_distance')}
    same = {key: first[key] for key in ('kv_bytes', 'rows', 'gap', 'n_values', 'local_reach')}
    return same | each | means


def losses_of_row(ladder, row, measured: dict) -> dict:
    """The row's losses, and their differences from the row above, the first and the baseline."""
    runs = measured[row.name]

    def each(name):
        return [run[name] for run in runs.values()]
    by_position = zip(*each('loss_by_position'))
    entry = {'val_loss': mean_sd(each('val_loss')),
             'loss_by_position': [statistics.fmean(losses) for losses in by_position],
             'val_loss_forward': mean_sd(each('val_loss_forward')),
             'cache_minus_forward_largest': max(each('cache_minus_forward_largest')),
             'bits_per_byte': mean_sd(each('bits_per_byte'))}
    compared = {'above': row.above, 'first': ladder.first, 'baseline': ladder.baseline}
    for name, other in compared.items():
        if other and other != row.name:
            entry[f'against_{name}'] = difference(runs, measured[other])
    if all('identifiers' in run for run in runs.values()):
        entry['identifiers'] = identifiers_of_row(runs)
    return entry


def identifiers_of_row(runs: dict) -> dict:
    """Summarise `identifiers.loss_by_distance` over the seeds."""
    found = [run['identifiers'] for run in runs.values()]
    return {'count': {key: each['count'] for key, each in found[0].items()},
            'nats': {key: mean_sd(each[key]['nats'] for each in found) for key in found[0]},
            'seeds': list(runs)}


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


def difference(ours: dict, others: dict) -> dict | None:
    """The paired difference of two rows' losses, and the part of its uncertainty that comes from
    the choice of validation text (None where a run has no losses by window)."""
    losses = ({seed: run['val_loss'] for seed, run in runs.items()} for runs in (ours, others))
    found = paired_difference(*losses)
    if found:
        windows = [[runs[seed].get('loss_by_window') for seed in found['seeds']]
                   for runs in (ours, others)]
        known = all(each is not None for row in windows for each in row)
        found['evaluation_half_95'] = evaluation_half(*windows) if known else None
    return found


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
    """Return the largest distance that the stacked local layers of any row can bridge; 0 without
    local layers."""
    return max((row['recall']['local_reach'] for row in rows
                if row.get('recall') and not row['side']), default=0)


def recall_of(ladder, folder) -> dict | None:
    """Return what the ladders in the setting `recall` found, from the folders next to `folder`:
    `recall`, the recall by name of the row, and `lookup`, rows of a ladder of the look-up task.
    None without such results."""
    rows = []
    for name in filter(None, ladder.s.recall.split(',')):
        document = read_json(folder.parent / name.strip() / 'results.json')
        rows += document['rows'] if document else []
    return {'recall': {row['name']: row['recall'] for row in rows if 'recall' in row},
            'lookup': [{key: row[key] for key in ('name', 'side', 'lookup')} for row in rows
                       if 'lookup' in row]} if rows else None


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
