"""Conversations as a benchmark: make traces, and replay them against a server, or on the prefix
cache alone.

    python -m lab.sessions make chat --save=chat.jsonl            # the committed one
    python -m lab.sessions make chat --seed=2 --set edit=0.2 --set sessions=10 --save=mine.jsonl
    python -m lab.sessions replay mine.jsonl --url=http://127.0.0.1:8000/v1
    python -m lab.sessions replay lab/sessions/traces/chat.jsonl --start=nanokv --kv=64MB --rate=4
    python -m lab.sessions stall --url=http://127.0.0.1:8000/v1   # a long prompt beside streams
    python -m lab.sessions soak --start=nanokv                    # an hour, clients that vanish
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
from kv.console import output
from kv.plan import plan_kv
from lab.benchmarks.setting import check_target, numbers, processor
from lab.files import write_json
from lab.sessions import servers, soak, stall
from lab.sessions.client import Client
from lab.sessions.presets import PRESETS, make
from lab.sessions.replay import Replay, TextPrompts, TokenPrompts
from lab.sessions.simulate import simulate
from lab.sessions.trace import Trace
from lab.tables import Table

CONFIG = 'config/train_gpt2_mqa_local.py'
LONGEST = max(preset.longest for preset in PRESETS.values())


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
    add_stall(commands.add_parser('stall', help='what a long prompt does to the streams of others'))
    add_soak(commands.add_parser('soak', help='an hour with clients that vanish'))
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
    add('--users', type=int, default=0, help='at once, without pauses; 0 = the times of the trace')
    add('--rate', type=float, default=1.0, help='how much faster than in the trace (1)')
    add('--prompts', choices=('ids', 'text'), default='ids',
        help='ids: prompts are token ids and continue with the ids of replies; text: chat')
    add('--records', default='', help='a file (JSON lines) for the records of all requests')
    add_server(one)


def add_stall(one) -> None:
    one.add_argument('--long', type=int, default=8_192, help='tokens of the long prompt (8,192)')
    one.add_argument('--repeats', type=int, default=5, help='5')
    one.set_defaults(prompts='ids')
    add_server(one)


def add_soak(one) -> None:
    one.add_argument('--minutes', type=float, default=60.0, help='60')
    one.add_argument('--seed', type=int, default=1)
    one.set_defaults(prompts='ids')
    add_server(one)


def add_server(one) -> None:
    add = one.add_argument
    where = one.add_mutually_exclusive_group(required=True)
    where.add_argument('--url', help='a server with the interface of OpenAI; its key: '
                                     'OPENAI_API_KEY')
    where.add_argument('--start', choices=servers.SERVERS, help='start one with random weights')
    add('--model', default='', help='of the server (the first that it names)')
    add('--ids', default='1000:30000', help='range of the token ids in prompts (1000:30000)')
    add('--fields', default='', help='of every request, as JSON ('
        f'with token ids: {json.dumps(servers.FIELDS["vllm"])})')
    add('--timeout', type=float, default=600.0, help='seconds for a request (600)')
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
    check_target(args.save)
    trace = make(args.preset, args.seed, **changes(args.set))
    if not trace.sessions:
        raise UserError('sessions=0: must be at least 1')
    trace.write(args.save)
    print(f'{args.save}: {trace.n_requests} requests of {len(trace.sessions)} sessions, at most '
          f'{trace.longest:,} tokens')


@contextlib.contextmanager
def server(args, longest: int):
    """Yield (a client of the server that the arguments name, facts about it, its process or None);
    longest: tokens of a conversation."""
    if args.timeout <= 0:
        raise UserError(f'timeout={args.timeout:g}: must be above 0')
    check_target(args.save)
    url, process, facts = args.url, None, {'processor': processor()}
    with contextlib.ExitStack() as stack:
        if args.start:
            kv = parse_bytes(args.kv, 'kv')
            url, process = stack.enter_context(servers.started(
                args.start, args.program, args.config, longest, kv, shlex.split(args.more)))
            facts |= {'server': args.start, 'kv': kv, 'config': args.config, 'more': args.more}
        yield client_of(args, url), facts, process


def client_of(args, url, kind=Client, *more):
    return kind(url, os.environ.get('OPENAI_API_KEY', ''), args.timeout, args.model, *more)


def bar(total: int, title: str):
    """A context with a progress bar on stderr, if that is a terminal; a function that sets it."""
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task(title, total=total)
    return progress, lambda n: progress.update(task, completed=n)


def conclude(args, document: dict, table: Table) -> None:
    table.print(output())
    if args.save:
        write_json(args.save, document)
    print(json.dumps(document))


def run_replay(args):
    trace = Trace.read(args.trace)
    if args.users < 0:
        raise UserError(f'users={args.users}: must be at least 0')
    if args.rate <= 0 or args.users and args.rate != 1:
        raise UserError(f'rate={args.rate:g}: must be above 0, and is not used with --users')
    fields, ids = request_fields(args)
    prompts = (TextPrompts(trace, fields) if args.prompts == 'text'
               else TokenPrompts(trace, ids, fields))
    with server(args, trace.longest) as (client, facts, process):
        found = Replay(trace, client, prompts, args.users, args.rate)
        progress, show = bar(trace.n_requests, trace.name)
        with progress:
            try:
                document = found.run(lambda records: show(len(records))) | facts
            finally:
                if args.records:
                    lines = (json.dumps(record) + '\n' for record in found.records)
                    Path(args.records).write_text(''.join(lines), encoding='utf-8')
        if process:
            document['resident'] = servers.resident(process)
    conclude(args, document, replay_table(document))
    if document['failed']:
        sys.exit(1)


def run_stall(args):
    if args.long < 1 or args.repeats < 1:
        raise UserError(f'long={args.long}, repeats={args.repeats}: must be at least 1')
    fields, ids = request_fields(args)
    with server(args, max(args.long + 2, stall.PROMPT + stall.TOKENS)) as (client, facts, _):
        progress, show = bar(args.repeats, 'prompts')
        with progress:
            found = stall.measure(client, fields, ids, args.long, args.repeats, show) | facts
    title = (f"A prompt of {found['long']:,} tokens beside {found['streams']} streams: the 99th "
             f"percentile of gaps is {found['p99_over_median']:.1f} times the median before it")
    conclude(args, found, percentile_table(title, found, {
        'gaps before': 'before_s', 'gaps during': 'during_s', 'first token, long': 'long_ttft_s',
        'first token, short after it': 'short_ttft_s'}))


def run_soak(args):
    """Exit status 2 if a request fails, memory grows or a text differs."""
    fields, ids = request_fields(args)
    with server(args, LONGEST) as (client, facts, process):
        client = client_of(args, client.url, soak.Vanishing, args.seed)
        progress, show = bar(round(60 * args.minutes), 'seconds')
        with progress:
            found = soak.run(client, process, args.minutes, fields, ids, show) | facts
    if args.start == 'nanokv' and not args.more:  # the same weights
        progress, show = bar(len(client.sample), 'texts')
        with progress:
            found |= soak.compare(client.sample, args.config, LONGEST, show)
    title = (f"{found['minutes']:.0f} minutes: {found['requests']} requests, {found['failed']} "
             f"failed, {found['vanished']} clients vanished")
    if found['growth'] is not None:
        title += f", memory grew by {100 * found['growth']:.1f}% after ten minutes"
    columns = 'computed', 'unavoidable', 'compared', 'equal'
    row = tuple(str(found.get(key, '-')) for key in columns)
    conclude(args, found, Table(title, columns, [row]))
    soak.check(found)


def request_fields(args) -> tuple[dict, tuple[int, int]]:
    """The fields of all requests, and the range of token ids in prompts."""
    fields = servers.FIELDS[args.start or 'vllm'] if args.prompts == 'ids' else {}
    try:
        if args.fields:
            fields = dict(json.loads(args.fields))
    except (ValueError, TypeError) as e:
        raise UserError(f'fields={args.fields!r}: must be a JSON object: {e}') from e
    try:
        low, high = map(int, args.ids.split(':'))
    except ValueError as e:
        raise UserError(f'ids={args.ids!r}: must be two numbers, as 0:256') from e
    if not 0 <= low < high:
        raise UserError(f'ids={args.ids!r}: the second must be larger')
    return fields, (low, high)


def percentile_table(title: str, found: dict, names: dict) -> Table:
    """names: those of the rows, with their keys in `found` (in seconds)."""
    rows = [(name, *(f'{1000 * x:.1f}' for x in found[key].values()))
            for name, key in names.items() if found[key]]
    return Table(title, ('ms', '50%', '95%', '99%', 'most'), rows, left=('ms',))


def replay_table(found: dict) -> Table:
    title = (f"{found['trace']}: {found['ended']} of {found['requests']} requests in "
             f"{found['seconds']:.0f} s, {found['failed']} failed, refused {found['refused']} "
             f"times, {found['tokens_per_second']:.1f} tokens/s")
    if found['ended'] and found['computed'] is None:
        title += ('; how many prompt tokens it computed is not known, as it reports no '
                  'usage.prompt_tokens_details.cached_tokens')
    if found['reply_tokens'] < 0.99 * found['asked_tokens']:
        title += (f"; replies have {found['reply_tokens']:,} of the {found['asked_tokens']:,} "
                  'tokens asked for (--fields should hold what makes the server ignore ends of '
                  'text)')
    if found['computed'] is not None:
        title += (f"; {found['prompt_tokens']:,} prompt tokens, {found['computed']:,} computed, "
                  f"{found['unavoidable']:,} unavoidable ({found['over_unavoidable']:.2f})")
    for error in found['errors']:
        title += f'\n{error}'
    return percentile_table(title, found, {
        'first token': 'ttft_s', 'each further token': 'tpot_s', 'gaps': 'gap_s'})


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
        show(found[-1]).print(output())
    document = {'config': Path(args.config).name, 'traces': found}
    if args.save:
        write_json(args.save, document)
    if args.json:
        print(json.dumps(document))


def main(argv=None):
    args = parser().parse_args(argv)
    commands = {'make': run_make, 'replay': run_replay, 'stall': run_stall, 'soak': run_soak,
                'simulate': run_simulate}
    commands[args.command](args)


if __name__ == '__main__':
    configurator.run_program(main)
