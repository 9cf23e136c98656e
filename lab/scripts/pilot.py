"""The pilot of config/ablate_pilot.py: each row and seed trains one trunk at a constant learning
rate, and cools down from it at 2, 8 and 20 tokens per parameter.

    python -m lab.scripts.pilot --rates                # the learning rates, at the smallest budget
    python -m lab.scripts.pilot --seeds=1,2,3 --jobs=2 # resumes where it was interrupted

Each budget is a ladder in results/pilot_TOKENS. A longer one starts from the checkpoint that the
one before it wrote when its cooldown began.
"""
import argparse
import shutil

import ablate
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--seeds', default='1,2,3')
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--rates', action='store_true', help='seed 1 at other learning rates')
    args = parser.parse_args()
    _, ladder = read_ladder(arguments(2), echo=False)
    rows = ladder.s.side_rows if args.rates else ladder.s.rows
    seeds = '1' if args.rates else args.seeds
    for tokens, longer in zip(ITERATIONS, (*list(ITERATIONS)[1:], None)):
        ablate.main([*arguments(tokens), f'--only={",".join(rows)}', f'--seeds={seeds}',
                     f'--jobs={args.jobs}'])
        if args.rates:
            break
        if longer:
            continue_trunks(tokens, longer, [int(seed) for seed in seeds.split(',')])


if __name__ == '__main__':
    main()
