"""The pilot of config/ablate_pilot.py: each row and seed trains one trunk at a constant learning
rate, and cools down from it at 2, 8 and 20 tokens per parameter.

    python -m lab.scripts.pilot --rates                # the learning rates, at the smallest budget
    python -m lab.scripts.pilot --seeds=1,2,3 --jobs=2 # resumes where it was interrupted
    python -m lab.scripts.pilot --picture              # results/pilot_20/budgets.png alone

Each budget is a ladder in results/pilot_TOKENS. A longer one starts from the checkpoint that the
one before it wrote when its cooldown began.
"""
import argparse
import json
import shutil
from pathlib import Path

import ablate
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from training.plotting import label_line_ends, save, subplots

RESULTS = Path(ablate.__file__).with_name('results')
ITERATIONS = {2: 400, 8: 1600, 20: 4000}  # tokens per parameter: iterations of 4,096 tokens


def arguments(tokens: int) -> list[str]:
    n = ITERATIONS[tokens]
    return ['config/ablate_pilot.py', f'--name=pilot_{tokens}', '--pictures=False',
            *(f'--{name}={n}' for name in ('max_iters', 'lr_decay_iters', 'eval_interval')),
            f'--cooldown_iters={n // 5}']


def continue_trunks(tokens: int, longer: int, seeds: list[int]) -> None:
    """Begin the runs of a longer budget with the checkpoints from before the cooldown."""
    (_, short), (_, long) = (read_ladder(arguments(n), echo=False) for n in (tokens, longer))
    kept = f'ckpt_{ITERATIONS[tokens] * 4 // 5:07d}.pt'
    for name in short.s.rows:
        for seed in seeds:
            source = Results(short).out_dir(short.rows[name], seed)
            target = Results(long).out_dir(long.rows[name], seed)
            if not (target / 'ckpt.pt').exists():
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / 'metrics.jsonl', target)
                shutil.copy(source / kept, target / 'ckpt.pt')


def picture(names: list[str]) -> None:
    """Draw how each row's difference from the baseline moves with training."""
    paths = [RESULTS / f'pilot_{tokens}' / 'results.json' for tokens in ITERATIONS]
    budgets = [{row['name']: row for row in json.loads(path.read_text())['rows']}
               for path in paths]
    with subplots(figsize=(7.2, 4.4)) as (figure, axis):
        for k, name in enumerate(names[1:]):
            found = [rows[name]['against_baseline'] for rows in budgets]
            at = [tokens * 1.03 ** k for tokens in ITERATIONS]  # apart, to be legible
            axis.plot(at, [each['mean'] for each in found], color=f'C{k}', label=name)
            axis.errorbar(at, [each['mean'] for each in found], [each['half_95'] for each in found],
                          fmt='.', color=f'C{k}')
        axis.axhline(0, color='#8b949e', linewidth=1, label='_')
        axis.set_xscale('log')
        axis.set_xticks(list(ITERATIONS), list(ITERATIONS))
        axis.minorticks_off()
        axis.set_xlabel('tokens per parameter')
        axis.set_ylabel(f'nats per token above {names[0]}')
        label_line_ends(axis)
        save(figure, RESULTS / 'pilot_20' / 'budgets.png', metadata={'Software': None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--seeds', default='1,2,3')
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--rates', action='store_true', help='seed 1 at other learning rates')
    parser.add_argument('--picture', action='store_true', help='draw, train nothing')
    args = parser.parse_args()
    _, ladder = read_ladder(arguments(2), echo=False)
    if args.picture:
        return picture(list(ladder.s.rows))
    rows = ladder.s.side_rows if args.rates else ladder.s.rows
    seeds = '1' if args.rates else args.seeds
    for tokens, longer in zip(ITERATIONS, (*list(ITERATIONS)[1:], None)):
        ablate.main([*arguments(tokens), f'--only={",".join(rows)}', f'--seeds={seeds}',
                     f'--jobs={args.jobs}'])
        if args.rates:
            break
        if longer:
            continue_trunks(tokens, longer, [int(seed) for seed in seeds.split(',')])
    else:
        picture(list(rows))


if __name__ == '__main__':
    main()
