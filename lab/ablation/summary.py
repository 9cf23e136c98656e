"""From measured runs to one document: means, spreads and paired differences with confidence intervals (results.json)."""
import math
import statistics
import warnings

from config.errors import UserError
from config.schema import MODEL
from kv.plan import plan_kv
from lab.ablation.results import read_json

# two-sided 95% quantiles of Student's t for 1, 2, ... 30 degrees of freedom; beyond, the normal one
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
        2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
NORMAL_95 = 1.960
LEARNED = 0.95  # a task at which the baseline does worse says nothing of the other rows
COMPARABLE = 'eval_iters', 'batch_size'  # evaluations while training are on the same windows where these and the seed agree


def mean_sd(values) -> dict:
    """Mean and sample standard deviation (None of a single value), and the values."""
    values = list(values)
    return {'mean': statistics.fmean(values), 'sd': statistics.stdev(values) if len(values) > 1 else None, 'each': values}


def paired_difference(ours: dict, others: dict) -> dict | None:
    """Mean of ours - others over the keys (seeds) that both have, with half the width of its 95% confidence interval (None
    where one pair is all there is). Runs of one seed saw the same batches in the same order, so pairs vary less than runs."""
    both = sorted(ours.keys() & others.keys())
    if not both:
        return None
    each = [ours[key] - others[key] for key in both]
    n = len(each)
    half = None
    if n > 1:
        quantile = T_95[n - 2] if n - 2 < len(T_95) else NORMAL_95
        half = quantile * statistics.stdev(each) / math.sqrt(n)
    return {'mean': statistics.fmean(each), 'half_95': half, 'seeds': both, 'each': each}


def mean_curve(curves: list[list]) -> dict:
    """Loss curves [[iteration, loss], ...] of several seeds as one: mean, lowest and highest at the iterations all have."""
    by_iteration = [{i: loss for i, loss in curve if loss is not None} for curve in curves]
    common = sorted(set.intersection(*(set(c) for c in by_iteration)))
    at = [[c[i] for c in by_iteration] for i in common]
    return {'iterations': common, 'mean': [statistics.fmean(x) for x in at], 'low': [min(x) for x in at],
            'high': [max(x) for x in at]}


def gap_curve(ours: dict, others: dict) -> list:
    """[[iteration, mean difference of the validation losses, lowest, highest], ...] over the seeds that both have, at the
    iterations at which all were evaluated: on the same windows."""
    both = [seed for seed in sorted(ours.keys() & others.keys())
            if all(ours[seed]['settings'][name] == others[seed]['settings'][name] for name in COMPARABLE)]
    runs = [run for seed in both for run in (ours[seed], others[seed])]
    curves = [{i: val for i, _, val in run['training']['evaluations'] if val is not None} for run in runs]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    found = []
    for i in common:
        each = [a[i] - b[i] for a, b in zip(curves[::2], curves[1::2])]
        found.append([i, statistics.fmean(each), min(each), max(each)])
    return found


def summarize(ladder, results, speed: dict | None, recall: dict | None, kv_of) -> dict:
    """Everything that the report shows. kv_of: row -> figures of its bytes."""
    measured = {row.name: {seed: found for seed in results.seeds(row) if (found := results.read(row, seed))}
                for row in ladder.rows.values()}
    rows = [summarize_row(ladder, results, row, measured, speed, recall) | {'kv': kv_of(row)} for row in ladder.rows.values()]
    if not recall:
        beside_baseline(rows, ladder.baseline)
    return {'name': ladder.s.name, 'pictures': ladder.s.pictures, 'base': ladder.s.base, 'first': ladder.first,
            'baseline': ladder.baseline, 'rows': rows,
            'facts': facts(ladder, measured), 'speed': speed, 'recall_ladder': ladder.s.recall}


def summarize_row(ladder, results, row, measured, speed, recall) -> dict:
    """One row, with what is missing told: `seeds_missing`, and `failed` by seed."""
    found, wanted = measured[row.name], ladder.seeds(row)
    failed = {seed: error for seed in wanted if seed not in found and (error := results.failed(row, seed))}
    config = ladder.config(row)
    out = {'name': row.name, 'slug': row.slug, 'side': row.side, 'above': row.above, 'changes': row.changes,
           'converted_from': row.converted_from, 'same_model': same_model(row),
           'kv_dtype': row.kv_dtype, 'seeds': sorted(found), 'seeds_missing': sorted(set(wanted) - set(found)),
           'failed': failed, 'n_layer': config.n_layer, 'T': config.block_size, 'W': config.window_size,
           'command': ladder.command(row, wanted[0])}
    if found:
        one = next(iter(found.values()))
        out |= {'params': one['params'], 'params_all': one['params_all'], 'learning_rate': one['settings']['learning_rate'],
                'tokens': one['training']['tokens'], 'iterations': one['training']['iterations'],
                'trained_as': one['trained_as'], 'curve': mean_curve([f['training']['curve'] for f in found.values()])}
    if found and 'recall' in one:
        out['recall'] = recall_of_row({seed: f['recall'] for seed, f in found.items()})
    elif found:
        losses = {seed: f['val_loss'] for seed, f in found.items()}
        out |= {'val_loss': mean_sd(losses.values()),
                'judged_through': sorted({f['kv_dtype'] for f in found.values()}),
                'val_loss_forward': mean_sd(f['val_loss_forward'] for f in found.values()),
                'cache_minus_forward_largest': max(f['cache_minus_forward_largest'] for f in found.values()),
                'bits_per_byte': mean_sd(f['bits_per_byte'] for f in found.values()),
                'loss_by_position': [statistics.fmean(x) for x in zip(*(f['loss_by_position'] for f in found.values()))],
                'evaluations': mean_curve([[[i, val] for i, _, val in f['training']['evaluations']] for f in found.values()])}
        for name, other in (('above', row.above), ('first', ladder.first), ('baseline', ladder.baseline)):
            if other and other != row.name:
                out[f'against_{name}'] = paired_difference(losses, {s: f['val_loss'] for s, f in measured[other].items()})
        out['gap'] = gap_curve(found, measured[ladder.baseline])
        if row.converted_from:
            out['recovery'] = {name: ends_at(measured[other], found) for name, other in (
                ('origin', row.converted_from), ('scratch', from_scratch(ladder, row))) if other}
    if speed:
        keys = {'train': speed['trains_as'][row.name]}
        out['speed'] = [figures_of(cell, keys.get(cell['kind'], speed['decodes_as'][row.name])) for cell in speed['cells']]
    if recall and row.name in recall:
        out['recall'] = recall[row.name]
    return out


def same_model(row) -> bool:
    """Whether the row differs from the one it departs from only in how it is trained: another optimizer, learning rate, origin
    of its weights."""
    return bool(row.above) and not row.changes.keys() & {
        *(key.name for key in MODEL), 'kv_dtype', 'weight_dtype', 'at_inference'}


def from_scratch(ladder, row) -> str:
    """The row above a converted one, if it has the same memory and is trained from the start; else ''."""
    above = ladder.rows[row.above]
    same = plan_kv(ladder.trained_config(above)) == plan_kv(ladder.trained_config(row))
    return above.name if same and not above.converted_from else ''


def ends_at(runs: dict, others: dict) -> dict | None:
    """The last loss while training of the seeds that both have: mean, iterations."""
    last = [runs[seed]['training']['evaluations'][-1:] for seed in sorted(runs.keys() & others.keys())]
    last = [(i, val) for each in last for i, _, val in each if val is not None]
    return {'mean': statistics.fmean(val for _, val in last), 'iterations': last[0][0]} if last else None


def recall_of_row(runs: dict) -> dict:
    """Accuracy by distance over the seeds. runs: seed -> recall."""
    one = next(iter(runs.values()))
    return {'accuracy': {distance: mean_sd(run['accuracy'][distance] for run in runs.values()) for distance in one['accuracy']},
            'local_reach': one['local_reach'], 'rows': one['rows'], 'seeds': list(runs)}


def beside_baseline(rows: list[dict], baseline: str) -> None:
    """Adds to each row's recall what the baseline's says of it: `learned`, the distances at which the others' count; `beyond`,
    those of them that local layers alone do not reach; `above_baseline`, the accuracy there, seed by seed, less the baseline's.
    """
    found = [row for row in rows if row.get('recall')]
    known = next((row['recall'] for row in found if row['name'] == baseline), None)
    reach = local_reach(found)
    learned = [d for d, each in known['accuracy'].items() if each['mean'] >= LEARNED] if known else []
    beyond = [d for d in learned if int(d) > reach > 0]

    def by_seed(recall):
        return {seed: statistics.fmean(recall['accuracy'][d]['each'][i] for d in beyond)
                for i, seed in enumerate(recall['seeds'])}
    for row in found:
        row['recall'] |= {'baseline': baseline, 'baseline_known': known is not None, 'learned': learned, 'beyond': beyond}
        if beyond and row['name'] != baseline:
            row['recall']['above_baseline'] = paired_difference(by_seed(row['recall']), by_seed(known))


def local_reach(rows: list[dict]) -> int:
    """How far back the local layers of the ladder's rows see at most, all together; 0 = there are none."""
    return max((row['recall']['local_reach'] for row in rows if row.get('recall') and not row['side']), default=0)


def recall_of(ladder, folder) -> dict | None:
    """row -> its recall, from the results of the ladder that `recall` names, which lie beside `folder`; None without
    any.
    """
    if not ladder.s.recall:
        return None
    path = folder.parent / ladder.s.recall / 'results.json'
    found = read_json(path)
    if found is None:
        warnings.warn(f'recall={ladder.s.recall!r}: {path} is not there; run that ladder first', stacklevel=2)
        return None
    recalls = {row['name']: row['recall'] for row in found['rows'] if 'recall' in row}
    if not all('baseline_known' in each for each in recalls.values()):
        raise UserError(f'{path} is of an older version: make it anew, with --report_only=True')
    return recalls


def figures_of(cell: dict, key: str) -> dict:
    """What a cell of the speed measurement says of one side; `errors`, if it failed, is that side's."""
    return {name: value[key] if isinstance(value, dict) else value for name, value in cell.items()
            if not isinstance(value, dict) or key in value}


def facts(ladder, measured) -> dict:
    """What the ladder's runs have in common (a set of several where they differ), which metrics mean nothing without."""
    ladders = [found for name, by_seed in measured.items() if not ladder.rows[name].side for found in by_seed.values()]
    runs = ladders or [found for by_seed in measured.values() for found in by_seed.values()]
    names = {'dataset': lambda r: r['settings']['dataset'], 'dtype': lambda r: r['dtype'],
             'B': lambda r: r['settings']['batch_size'] * r['settings']['gradient_accumulation_steps'],
             'T': lambda r: r['settings']['block_size'], 'iterations': lambda r: r['training']['iterations'],
             'tokens': lambda r: r['training']['tokens'], 'hardware': lambda r: r['hardware'], 'torch': lambda r: r['torch'],
             }
    if runs and 'windows' in runs[0]:
        names |= {'val_windows': lambda r: r['windows'], 'val_tokens': lambda r: r['tokens']}
    return {name: sorted({of(run) for run in runs}) for name, of in names.items()}
