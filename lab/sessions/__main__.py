"""Replay conversations against a server that runs, and print how fast it was and what it computed.

    python -m lab.sessions lab/sessions/traces/chat.jsonl --url=http://127.0.0.1:8000/v1 --users=16
    python -m lab.sessions lab/sessions/traces/chat.jsonl --url=... --rate=4

The last line is JSON. lab/sessions/README.md says what the traces are.
"""
import json
import sys

from common.errors import UserError
from configurator import run_program
from data.making.script import Arguments
from kv.console import output
from lab.benchmarks.setting import processor
from lab.sessions.client import Client
from lab.sessions.replay import Replay
from lab.sessions.trace import Trace
from lab.tables import Table

# what makes nanoKV and vLLM say token ids, and go on to the length that was asked for
FIELDS = '{"return_token_ids": true, "ignore_eos": true}'


def table(found: dict) -> Table:
    lines = ['{trace}: {ended} of {requests} requests in {seconds:.0f} s, {failed} failed, refused '
             '{refused} times, {tokens_per_second:.1f} tokens/s']
    if found['computed'] is None:
        lines.append('how many prompt tokens it computed is not known: it reports no '
                     'usage.prompt_tokens_details.cached_tokens')
    else:
        lines.append('{prompt_tokens:,} prompt tokens, {computed:,} computed, {unavoidable:,} '
                     'unavoidable ({over_unavoidable:.2f})')
    if found['reply_tokens'] < 0.99 * found['asked_tokens']:
        lines.append('replies have {reply_tokens:,} of the {asked_tokens:,} tokens asked for: '
                     '--fields should make the server ignore ends of text')
    rows = [(name, *(f'{1000 * x:.1f}' for x in found[key].values())) for name, key in (
        ('first token', 'ttft_s'), ('each further token', 'tpot_s'), ('gaps', 'gap_s'))]
    title = '\n'.join([line.format_map(found) for line in lines] + found['errors'])
    return Table(title, ('ms', '50%', '95%', '99%', 'most'), [row for row in rows if row[1:]])


def main(argv=None):
    parser = Arguments(__doc__, prog='python -m lab.sessions')
    add = parser.add_argument
    add('trace')
    add('--url', required=True, help="a server with OpenAI's interface; its key: OPENAI_API_KEY")
    add('--users', type=int, default=0, help='at once, without pauses; 0 = the times of the trace')
    add('--rate', type=float, default=1.0, help='how much faster than the trace (1)')
    add('--ids', nargs=2, type=int, default=(1_000, 30_000), metavar=('LOW', 'HIGH'),
        help='range of the ids in prompts (1000 30000)')
    add('--fields', type=json.loads, default=FIELDS,
        help=f'of every request, as JSON, such as the model if the server has several ({FIELDS})')
    args = parser.parse_args(argv)
    if args.users < 0 or args.rate <= 0 or args.users and args.rate != 1:
        raise UserError(f'users={args.users}, rate={args.rate:g}: users must be at least 0, the '
                        'rate more than 0, and with users there is no rate')
    document = Replay(Trace.read(args.trace), Client(args.url), args.ids, args.fields, args.users,
                      args.rate).run()
    table(document).print(output())
    print(json.dumps(document | {'processor': processor()}))
    if document['failed']:
        sys.exit(1)


if __name__ == '__main__':
    run_program(main)
