"""Measurements that take long, a run at a time: finished ones are kept as JSON and not repeated, the table is made from all."""
import argparse
import json


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
