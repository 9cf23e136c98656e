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
import contextlib
import json
import shlex
import sys
from pathlib import Path

import torch

import configurator
from config.errors import UserError
from config.sizes import parse_bytes
from kv.console import output
from kv.plan import plan_kv
from lab.benchmarks.setting import check_target, numbers, processor, shape_of
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
IDS = {'return_token_ids': True, 'ignore_eos': True}
# what makes servers say token ids, and go on to the length that was asked for
FIELDS = {'nanokv': IDS, 'vllm': IDS, 'llama.cpp': {'verbose': True, 'ignore_eos': True}}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog='python -m lab.sessions', description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest='command', required=True)
    one = commands.add_parser('make', help='write a trace')
    one.add_argument('preset', choices=PRESETS)
    one.add_argument('--seed', type=int, default=1)
    one.add_argument('--set', action='append', type=change, default=[], metavar='KEY=VALUE',
                     help='change a value of the preset (lab/sessions/presets.py)')
    one.add_argument('--save', required=True, help='the file')
    one.set_defaults(run=run_make)

    one = commands.add_parser('replay', help='against a server')
    one.add_argument('trace')
    one.add_argument('--users', type=int, default=0,
                     help='at once, without pauses; 0 = the times of the trace')
    one.add_argument('--rate', type=float, default=1.0, help='how much faster than the trace (1)')
    one.add_argument('--prompts', choices=('ids', 'text'), default='ids',
                     help='ids: token ids that continue with those of replies; text: chat')
    one.add_argument('--records', help='a file (JSON lines) for the records of all requests')
    add_server(one, run_replay)

    add_server(commands.add_parser('stall', help='a long prompt beside streams'), run_stall)
    one = commands.add_parser('soak', help='an hour with clients that vanish')
    one.add_argument('--minutes', type=float, default=60.0, help='60')
    add_server(one, run_soak)

    one = commands.add_parser('simulate', help='replay on the prefix cache, without a model')
    one.add_argument('traces', nargs='+')
    one.add_argument('--config', default=CONFIG, help=f'of the model ({CONFIG})')
    one.add_argument('--shares', default='50,25', help='of all bytes, in percent (50,25)')
    one.add_argument('--save', default='', help='a JSON file for the results')
    one.set_defaults(run=run_simulate)
    return top


def add_server(one, run) -> None:
    one.set_defaults(run=run)
    add, where = one.add_argument, one.add_mutually_exclusive_group(required=True)
    where.add_argument('--url', help='a server with the interface of OpenAI; its key: '
                                     'OPENAI_API_KEY')
    where.add_argument('--start', choices=servers.SERVERS, help='start one with random weights')
    add('--model', default='', help='of the server (the first that it names)')
    add('--ids', default='1000:30000', type=span, help='range of the ids in prompts (1000:30000)')
    add('--fields', type=json.loads, help='of every request, as JSON ('
        f'with token ids: {json.dumps(IDS)})')
    add('--save', default='', help='a JSON file for the result')
    own = one.add_argument_group('with --start')
    own.add_argument('--program', default='', help="vllm: its Python (.venv-vllm/bin/python); "
                                                   'llama.cpp: its llama-server')
    own.add_argument('--kv', default='64MB', help='KV cache, in use and kept (64MB)')
    own.add_argument('--more', default='', help='further arguments of the server')


def change(text: str) -> tuple:
    """'edit=0.2' -> ('edit', 0.2)"""
    key, _, value = text.partition('=')
    return key, json.loads(value)


def span(text: str) -> tuple[int, int]:
    """'1000:30000' -> (1000, 30000)"""
    low, high = map(int, text.split(':'))
    return low, high


def run_make(args):
    check_target(args.save)
    trace = make(args.preset, args.seed, **dict(args.set))
    trace.write(args.save)
    print(f'{args.save}: {trace.n_requests} requests of {len(trace.sessions)} sessions, at most '
          f'{trace.longest:,} tokens')


@contextlib.contextmanager
def server(args, longest: int):
    """Yield (URL of the server that the arguments name, its process or None, facts about it).
    longest: tokens of a conversation."""
    check_target(args.save)
    if args.url:
        yield args.url, None, {'processor': processor()}
        return
    kv = parse_bytes(args.kv, 'kv')
    with servers.started(args.start, args.program, longest, kv, shlex.split(args.more)) as found:
        yield *found, {'processor': processor(), 'server': args.start, 'kv': kv,
                       'config': servers.CONFIG, 'more': args.more}


def request_fields(args) -> dict:
    return FIELDS[args.start or 'vllm'] if args.fields is None else args.fields


def conclude(args, document: dict, table: Table) -> None:
    table.print(output())
    if args.save:
        write_json(args.save, document)
    print(json.dumps(document))


def run_replay(args):
    if args.users < 0 or args.rate <= 0 or args.users and args.rate != 1:
        raise UserError(f'users={args.users}, rate={args.rate:g}: users must be at least 0, the '
                        'rate more than 0, and with users there is no rate')
    trace = Trace.read(args.trace)
    if args.prompts == 'text':
        prompts = TextPrompts(trace, args.fields or {})
    else:
        prompts = TokenPrompts(trace, args.ids, request_fields(args))
    with server(args, trace.longest) as (url, process, facts):
        found = Replay(trace, Client(url, name=args.model), prompts, args.users, args.rate)
        try:
            document = found.run() | facts
        finally:  # after Ctrl-C, too
            if args.records:
                lines = (json.dumps(record) + '\n' for record in found.records)
                Path(args.records).write_text(''.join(lines), encoding='utf-8')
        if process:
            document['resident'] = servers.resident(process)
    conclude(args, document, replay_table(document))
    if document['failed']:
        sys.exit(1)


def run_stall(args):
    longest = max(stall.LONG + 2, stall.PROMPT + stall.TOKENS)
    with server(args, longest) as (url, _, facts):
        client = Client(url, name=args.model)
        found = stall.measure(client, request_fields(args), args.ids) | facts
    title = (f"A prompt of {found['long']:,} tokens beside {found['streams']} streams: the 99th "
             f"percentile of gaps is {found['p99_over_median']:.1f} times the median before it")
    conclude(args, found, percentile_table(title, found, {
        'gaps before': 'before_s', 'gaps during': 'during_s', 'first token, long': 'long_ttft_s',
        'first token, short after it': 'short_ttft_s'}))


def run_soak(args):
    """Exit status 2 if a request fails, memory grows or a text differs."""
    with server(args, LONGEST) as (url, process, facts):
        client = soak.Vanishing(url, args.model)
        found = soak.run(client, process, args.minutes, request_fields(args), args.ids) | facts
    if args.start == 'nanokv' and not args.more:  # the same weights
        found |= soak.compare(client.replies, LONGEST)
    columns = ('requests', 'failed', 'vanished', 'growth', 'computed', 'unavoidable', 'compared',
               'equal')
    row = tuple(str(found.get(key, '-')) for key in columns)
    conclude(args, found, Table(f"{found['minutes']:.0f} minutes", columns, [row]))
    soak.check(found)


def percentile_table(title: str, found: dict, names: dict) -> Table:
    """names: those of the rows, with their keys in `found` (in seconds)."""
    rows = [(name, *(f'{1000 * x:.1f}' for x in found[key].values()))
            for name, key in names.items() if found[key]]
    return Table(title, ('ms', '50%', '95%', '99%', 'most'), rows, left=('ms',))


def replay_table(found: dict) -> Table:
    parts = [f"{found['trace']}: {found['ended']} of {found['requests']} requests in "
             f"{found['seconds']:.0f} s, {found['failed']} failed, refused {found['refused']} "
             f"times, {found['tokens_per_second']:.1f} tokens/s"]
    if found['computed'] is None:
        parts.append('how many prompt tokens it computed is not known: it reports no '
                     'usage.prompt_tokens_details.cached_tokens')
    else:
        parts.append(f"{found['prompt_tokens']:,} prompt tokens, {found['computed']:,} computed, "
                     f"{found['unavoidable']:,} unavoidable ({found['over_unavoidable']:.2f})")
    if found['reply_tokens'] < 0.99 * found['asked_tokens']:
        parts.append(f"replies have {found['reply_tokens']:,} of the {found['asked_tokens']:,} "
                     'tokens asked for: --fields should make the server ignore ends of text')
    return percentile_table('\n'.join(parts + found['errors']), found, {
        'first token': 'ttft_s', 'each further token': 'tpot_s', 'gaps': 'gap_s'})


def run_simulate(args):
    torch.set_num_threads(1)  # the copies are small
    s = configurator.parse('bench', [args.config], echo=False)
    plan = plan_kv(shape_of(s, 256))
    shares, found = numbers('shares', args.shares), []
    for path in args.traces:
        each = simulate(Trace.read(path), plan, shares)
        found.append(each)
        title = f"{each['trace']}: {each['unavoidable']:,} unavoidable tokens"
        Table.of(title, each['cells'], {
            'bytes, %': '{share}', 'MB': lambda cell: f"{cell['most_nbytes'] / 1e6:.1f}",
            'computed': '{computed:,}', 'over unavoidable': '{over_unavoidable:.2f}',
            'evicted blocks': '{evicted:,}'}).print(output())
    if args.save:
        write_json(args.save, {'config': Path(args.config).name, 'traces': found})


def main(argv=None):
    args = parser().parse_args(argv)
    args.run(args)


if __name__ == '__main__':
    configurator.run_program(main)
