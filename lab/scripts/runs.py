"""Measurements that take long, a run at a time: finished ones are kept as JSON and not repeated, the table is made from all."""
import argparse
import json

import torch


def run_all(module, kind: str, default, argv=None) -> None:
    """The command line of a script (`module` is its namespace) that has RESULTS, RUNS (name -> settings), run(name, seed)
    -> dict and table(rows) -> Markdown. `kind` is what it calls a run; `default` the names run when none are given.
    """
    parser = argparse.ArgumentParser(description=module['__doc__'], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f'--{kind}', nargs='+', default=list(default), choices=module['RUNS'], metavar='NAME', dest='names',
                        help=f"default: {' '.join(default)}; there are {', '.join(module['RUNS'])}")
    parser.add_argument('--seeds', nargs='+', default=module['SEEDS'], type=int, metavar='SEED',
                        help=f"default: {' '.join(map(str, module['SEEDS']))}")
    parser.add_argument('--table', action='store_true', help='only remake the table from the JSON files')
    args = parser.parse_args(argv)
    results = module['RESULTS']
    results.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in args.names if not args.table else []:
            path = results / f'{name}-seed{seed}.json'
            if not path.exists():
                path.write_text(json.dumps(module['run'](name, seed), indent=1) + '\n')
    rows = [json.loads(path.read_text()) for path in sorted(results.glob('*-seed*.json'))]
    if rows:
        (results / 'README.md').write_text(module['table'](rows))


@torch.inference_mode()
def whole_split_loss(model, tokens, block_size, batch_size=16) -> float:
    """Mean loss in nats per token over a whole split, in windows that do not overlap (a last partial one left out)."""
    starts, total = range(0, len(tokens) - block_size, block_size), 0.0
    for first in range(0, len(starts), batch_size):
        some = starts[first:first + batch_size]
        rows = torch.stack([torch.from_numpy(tokens[i:i + block_size + 1].astype('int64')) for i in some])
        total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(some)
    return total / len(starts)
