"""How conversations continue in Mooncake's published trace: a source of lab/sessions/presets.py.

    git clone https://github.com/kvcache-ai/Mooncake       # FAST25-release/traces (Apache 2.0)
    python lab/scripts/mooncake_shares.py FOLDER/conversation_trace.jsonl

Its requests have a time, lengths, and a hash for each 512 tokens of the prompt, chained, so that
equal hashes mean equal prefixes. A request that shares blocks with an earlier one repeats it,
continues it (all of its complete blocks are shared), or differs from it somewhere inside. All share
the first block: those that share no other begin a conversation. Writes
results/sessions/mooncake.json.
"""
import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np

from config.errors import UserError
from configurator import run_program
from lab.benchmarks.setting import write_json

BLOCK = 512
RESULT = ROOT / 'results' / 'sessions' / 'mooncake.json'


def classify(rows: list[dict]) -> tuple[Counter, list, list]:
    """How many requests there are of each kind; of those that continue one, seconds since it, and
    tokens by which the prompt is longer."""
    kinds, pauses, growth, with_prefix = Counter(), [], [], {}
    for row in rows:
        prefixes = [tuple(row['hash_ids'][:n + 1]) for n in range(len(row['hash_ids']))]
        shared = next((n for n in range(len(prefixes), 0, -1) if prefixes[n - 1] in with_prefix), 0)
        earlier = with_prefix[prefixes[shared - 1]] if shared else []
        same = [each for each in earlier if each['hash_ids'] == row['hash_ids']
                and each['input_length'] == row['input_length']]
        whole = [each for each in earlier if each['input_length'] // BLOCK <= shared]
        if shared <= 1:
            kinds['new'] += 1
        elif same:
            kinds['repeated'] += 1
        elif whole:
            kinds['continued'] += 1
            pauses.append((row['timestamp'] - whole[-1]['timestamp']) / 1000)
            growth.append(row['input_length'] - whole[-1]['input_length'])
        else:
            kinds['different inside'] += 1
        for prefix in prefixes:
            with_prefix.setdefault(prefix, []).append(row)
    return kinds, pauses, growth


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('trace', type=Path)
    parser.add_argument('--save', type=Path, default=RESULT)
    args = parser.parse_args(argv)
    try:
        rows = [json.loads(line) for line in args.trace.read_text(encoding='utf-8').splitlines()]
        kinds, pauses, growth = classify(rows)
        arrivals = np.diff([row['timestamp'] for row in rows])
        replies = [row['output_length'] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f'{args.trace} is not a trace of this format: {e!r}') from e
    percentiles = (10, 50, 90)
    document = {'trace': args.trace.name, 'requests': len(rows), 'percentiles': percentiles,
                'seconds': (rows[-1]['timestamp'] - rows[0]['timestamp']) / 1000,
                'shares': {kind: n / len(rows) for kind, n in sorted(kinds.items())},
                **{name: np.percentile(values, percentiles).tolist() for name, values in (
                    ('pause_s', pauses), ('growth', growth), ('reply', replies))},
                'arrival_variation': float(arrivals.std() / arrivals.mean())}
    args.save.parent.mkdir(parents=True, exist_ok=True)
    write_json(str(args.save), document)
    print(json.dumps(document))


if __name__ == '__main__':
    run_program(main)
