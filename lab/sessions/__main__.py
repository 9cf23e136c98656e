"""Conversations as a benchmark: make traces, and replay them against a server, or on the prefix
cache alone.

    python -m lab.sessions make chat --save=chat.jsonl            # the committed one
    python -m lab.sessions make chat --seed=2 --set edit=0.2 --set sessions=10 --save=mine.jsonl
    python -m lab.sessions replay mine.jsonl --url=http://127.0.0.1:8000/v1
    python -m lab.sessions replay lab/sessions/traces/chat.jsonl --start=nanokv --kv=64MB --rate=4
    python -m lab.sessions simulate lab/sessions/traces/*.jsonl   # two minutes, no model

Presets: chat, agent, editing, forking. lab/sessions/README.md says what they are.
"""
import argparse
import ast
import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import parse_bytes
from kv.plan import plan_kv
from lab.benchmarks.setting import numbers, processor, write_json
from lab.sessions import servers
from lab.sessions.client import Client
from lab.sessions.presets import PRESETS, make
from lab.sessions.replay import Replay, TextPrompts, TokenPrompts
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
    add_replay(commands.add_parser('replay', help='against a server'))
    one = commands.add_parser('simulate', help='replay on the prefix cache, without a model')
    one.add_argument('traces', nargs='+')
    one.add_argument('--config', default=CONFIG, help=f'of the model ({CONFIG})')
    one.add_argument('--kv_dtype', default='int8', help='int8')
    one.add_argument('--page_size', type=int, default=64, help='positions per block (64)')
    one.add_argument('--shares', default='50,25', help='of all bytes, in percent (50,25)')
    one.add_argument('--save', default='', help='a JSON file for the results')
    one.add_argument('--json', action='store_true', help='end with one line of JSON')
    return top


def add_replay(one) -> None:
    add = one.add_argument
    add('trace')
    where = one.add_mutually_exclusive_group(required=True)
    where.add_argument('--url', help='a server with the interface of OpenAI; its key: '
                                     'OPENAI_API_KEY')
    where.add_argument('--start', choices=servers.SERVERS, help='start one with random weights')
    add('--users', type=int, default=0, help='at once, without pauses; 0 = the times of the trace')
    add('--rate', type=float, default=1.0, help='how much faster than in the trace (1)')
    add('--prompts', choices=('ids', 'text'), default='ids',
        help='ids: prompts are token ids and continue with the ids of replies; text: chat')
    add('--ids', default='1000:30000', help='range of the token ids in prompts (1000:30000)')
    add('--fields', default='', help='of every request, as JSON ('
        f'with --prompts=ids: {json.dumps(servers.FIELDS["vllm"])})')
    add('--timeout', type=float, default=600.0, help='seconds for a request (600)')
    add('--records', default='', help='a file (JSON lines) for the records of all requests; a '
        'replay that was interrupted goes on from it')
    add('--save', default='', help='a JSON file for the result')
    own = one.add_argument_group('with --start')
    own.add_argument('--program', default='', help="vllm: its Python (.venv-vllm/bin/python); "
                                                   'llama.cpp: its llama-server')
    own.add_argument('--config', default='config/sessions.py', help='of the model (%(default)s)')
    own.add_argument('--kv', default='64MB', help='KV cache, in use and kept (64MB)')
    own.add_argument('--more', default='', help='further arguments of the server')


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


def run_make(args):
    trace = make(args.preset, args.seed, **changes(args.set))
    trace.write(args.save)
    print(f'{args.save}: {trace.n_requests} requests of {len(trace.sessions)} sessions, at most '
          f'{trace.longest:,} tokens')


def run_replay(args):
    trace = Trace.read(args.trace)
    if args.users < 0 or args.rate <= 0 or args.timeout <= 0:
        raise UserError(f'users={args.users}, rate={args.rate:g}, timeout={args.timeout:g}: must '
                        'be at least 0, and above 0')
    prompts, facts = prompts_of(args, trace), {'processor': processor()}
    with contextlib.ExitStack() as stack:
        url, process = args.url, None
        if args.start:
            kv = parse_bytes(args.kv, 'kv')
            url, process = stack.enter_context(servers.started(
                args.start, args.program, args.config, trace.longest, kv, shlex.split(args.more)))
            facts |= {'server': args.start, 'kv': kv, 'config': args.config, 'more': args.more}
        client = Client(url, os.environ.get('OPENAI_API_KEY', ''), args.timeout)
        found = Replay(trace, client, prompts, args.users, args.rate, args.records)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(trace.name, total=trace.n_requests)
            document = found.run(lambda records: bar.update(task, completed=len(records)))
        if process:
            facts['resident'] = servers.resident(process)
    document |= facts
    replay_table(document).print(Console())
    if args.save:
        write_json(args.save, document)
    print(json.dumps(document))
    if document['failed']:
        sys.exit(1)


def prompts_of(args, trace):
    fields = servers.FIELDS[args.start or 'vllm'] if args.prompts == 'ids' else {}
    try:
        if args.fields:
            fields = dict(json.loads(args.fields))
        low, high = map(int, args.ids.split(':'))
    except (ValueError, TypeError) as e:
        raise UserError(f'fields={args.fields!r}, ids={args.ids!r}: must be a JSON object, and '
                        f'two numbers as 0:256: {e}') from e
    if not 0 <= low < high:
        raise UserError(f'ids={args.ids!r}: the second must be larger')
    if args.prompts == 'text':
        return TextPrompts(trace, fields)
    return TokenPrompts(trace, (low, high), fields)


def replay_table(found: dict) -> Table:
    title = (f"{found['trace']}: {found['ended']} of {found['requests']} requests in "
             f"{found['seconds']:.0f} s, {found['failed']} failed, refused {found['refused']} "
             f"times, {found['tokens_per_second']:.1f} tokens/s")
    if found['computed'] is not None:
        title += (f"; {found['prompt_tokens']:,} prompt tokens, {found['computed']:,} computed, "
                  f"{found['unavoidable']:,} unavoidable ({found['over_unavoidable']:.2f})")
    for error in found['errors']:
        title += f'\n{error}'
    rows = [(name, *(f'{1000 * x:.1f}' for x in found[key].values())) for name, key in (
        ('first token', 'ttft_s'), ('each further token', 'tpot_s'), ('gaps', 'gap_s'))
        if found[key]]
    return Table(title, ('ms', '50%', '95%', '99%', 'most'), rows, left=('ms',))


def run_simulate(args):
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


def main(argv=None):
    args = parser().parse_args(argv)
    {'make': run_make, 'replay': run_replay, 'simulate': run_simulate}[args.command](args)


if __name__ == '__main__':
    configurator.run_program(main)
