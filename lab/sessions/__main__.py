"""Conversations as a benchmark: make traces, and replay them on the prefix cache.

    python -m lab.sessions make chat --save=chat.jsonl            # the committed one
    python -m lab.sessions make chat --seed=2 --set edit=0.2 --set sessions=10 --save=mine.jsonl
    python -m lab.sessions simulate lab/sessions/traces/*.jsonl   # seconds each, no model
    python -m lab.sessions simulate mine.jsonl --config=config/train_mqa_local.py --shares=50,10

Presets: chat, agent, editing, forking. lab/sessions/README.md says what they are.
"""
import argparse
import ast
import json
from pathlib import Path

import torch
from rich.console import Console

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from kv.plan import plan_kv
from lab.benchmarks.setting import numbers, write_json
from lab.sessions.presets import PRESETS, make
from lab.sessions.simulate import simulate
from lab.sessions.trace import Trace
from lab.tables import Table

CONFIG = 'config/train_gpt2_mqa_local.py'


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog='python -m lab.sessions', description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest='command', required=True)
    one = commands.add_parser('make', help='write a trace')
    one.add_argument('preset', choices=PRESETS)
    one.add_argument('--seed', type=int, default=1)
    one.add_argument('--set', action='append', default=[], metavar='KEY=VALUE',
                     help='change a value of the preset (lab/sessions/presets.py)')
    one.add_argument('--save', required=True, help='the file')
    one = commands.add_parser('simulate', help='replay on the prefix cache, without a model')
    one.add_argument('traces', nargs='+')
    one.add_argument('--config', default=CONFIG, help=f'of the model ({CONFIG})')
    one.add_argument('--kv_dtype', default='int8', help='int8')
    one.add_argument('--page_size', type=int, default=64, help='positions per block (64)')
    one.add_argument('--shares', default='50,25', help='of all bytes, in percent (50,25)')
    one.add_argument('--save', default='', help='a JSON file for the results')
    one.add_argument('--json', action='store_true', help='end with one line of JSON')
    return top


def changes(given: list[str]) -> dict:
    """['edit=0.2'] -> {'edit': 0.2}. Raises UserError for anything else."""
    found, known = {}, vars(next(iter(PRESETS.values())))
    for text in given:
        key, _, value = text.partition('=')
        if key not in known:
            raise UserError(f'--set {text}: a preset has {", ".join(known)}')
        try:
            found[key] = type(known[key])(ast.literal_eval(value))
        except (ValueError, SyntaxError, TypeError):
            kind = type(known[key]).__name__
            raise UserError(f'--set {text}: {key} is of type {kind}') from None
    return found


def show(found: dict) -> Table:
    title = (f"{found['trace']}: {found['requests']} requests of {found['sessions']} sessions, "
             f"{found['prompt_tokens']:,} prompt tokens, {found['unavoidable']:,} of them "
             f"unavoidable; K/V in {found['kv_dtype']}")
    columns = 'bytes, %', 'MB', 'computed', 'over unavoidable', 'evicted blocks'
    return Table(title, columns, [(
        str(cell['share']), f"{cell['most_nbytes'] / 1e6:.1f}", f"{cell['computed']:,}",
        f"{cell['over_unavoidable']:.2f}", f"{cell['evicted']:,}") for cell in found['cells']])


def main(argv=None):
    args = parser().parse_args(argv)
    if args.command == 'make':
        trace = make(args.preset, args.seed, **changes(args.set))
        trace.write(args.save)
        return print(f'{args.save}: {trace.n_requests} requests of {len(trace.sessions)} sessions, '
                     f'at most {trace.longest:,} tokens')
    torch.set_num_threads(1)  # the copies are small
    traces = [Trace.read(path) for path in args.traces]
    s = configurator.parse('bench', [args.config], echo=False)
    shape = {key.name: getattr(s, key.name) for key in MODEL}
    plan = plan_kv(GPTConfig(vocab_size=256, **shape))
    found = []
    for trace in traces:
        found.append(simulate(trace, plan, args.kv_dtype, args.page_size,
                              numbers('shares', args.shares)))
        show(found[-1]).print(Console())
    document = {'config': Path(args.config).name, 'traces': found}
    if args.save:
        write_json(args.save, document)
    if args.json:
        print(json.dumps(document))


if __name__ == '__main__':
    configurator.run_program(main)
