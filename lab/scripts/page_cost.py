"""What watching the KV cache costs a server: its CPU time per token for streams with cache events
(/nanokv/completions, which the page uses) against streams without (/v1/completions). Linux only.

    python lab/scripts/page_cost.py out-mqa-local --save=results/page/demo.json
    python lab/scripts/page_cost.py config/train_gpt2_mqa_local.py --init_from=random \
        --save=results/page/gpt2.json

Further arguments are serve.py's. The server is a process of its own, with one torch thread: more of
them spin while they wait, which would count as CPU time.
"""
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.benchmarks.setting import processor

ROUNDS, ROWS = 5, 80
PLAIN, WATCHED = '/v1/completions', '/nanokv/completions'


async def stream(port: int, path: str, tokens: int, seed: int) -> int:
    """Send a request and read all of its answer. Returns the number of its tokens."""
    reader, writer = await asyncio.open_connection('127.0.0.1', port, limit=2 ** 24)
    body = json.dumps({'prompt': [seed % 50 + 1] * 20, 'max_tokens': tokens, 'stream': True,
                       'seed': seed, 'stream_options': {'include_usage': True}})
    writer.write(f'POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: '
                 f'application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}'.encode())
    answer = await reader.read(-1)
    writer.close()
    usage = answer.rpartition(b'"completion_tokens": ')[2].split(b',')[0]
    if not answer.startswith(b'HTTP/1.1 200') or b'[DONE]' not in answer:
        raise SystemExit(f'error: {path} answered {answer[:300]!r}')
    return int(usage)


async def run(port: int, paths: list[str], tokens: int) -> int:
    """Run the streams at once. Returns the number of their tokens."""
    return sum(await asyncio.gather(*(stream(port, path, tokens, i)
                                      for i, path in enumerate(paths))))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


CASES = {  # name: streams, watched ones, tokens of each
    '1 stream': (1, 1, 2000), '1 of 16 streams': (16, 1, 500), '64 streams': (64, 64, 200)}


def start_server(args: list[str]):
    """Start serve.py on a free port. Returns the process and the port, once it listens."""
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    env = os.environ | {'OMP_NUM_THREADS': '1'}
    server = subprocess.Popen([sys.executable, 'serve.py', *args, f'--port={port}',
                               f'--parallel={ROWS}', '--log_requests=False'], cwd=ROOT, env=env,
                              stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if line.startswith('Serving'):
            return server, port
    raise SystemExit(f'error: serve.py ended with status {server.wait()}')


def main(argv: list[str]) -> None:
    saved = [arg.partition('=')[2] for arg in argv if arg.startswith('--save=')]
    args = [arg for arg in argv if not arg.startswith('--save=')]
    if not args or args[0] in ('-h', '--help'):
        raise SystemExit(__doc__.strip())
    server, port = start_server(args)
    spent = {name: {False: [], True: []} for name in CASES}
    try:
        for k in range(-1, ROUNDS):  # the first round is a warm-up
            for name, (n, watched, tokens) in CASES.items():
                for is_watched in (False, True)[::1 if k % 2 else -1]:
                    m = watched * is_watched
                    before = cpu_seconds(server.pid)
                    done = asyncio.run(run(port, [WATCHED] * m + [PLAIN] * (n - m), tokens))
                    if k >= 0:
                        found = (cpu_seconds(server.pid) - before) / done
                        spent[name][is_watched].append(found * 1e6)
            print(f'round {k + 1} of {ROUNDS}', file=sys.stderr)
    finally:
        server.terminate()
        server.wait()
    cases = {name: {
        'plain_microseconds_per_token': [round(x, 1) for x in both[False]],
        'watched_microseconds_per_token': [round(x, 1) for x in both[True]],
        'ratio': statistics.median(b / a for a, b in zip(both[False], both[True])),
    } for name, both in spent.items()}
    document = json.dumps({'arguments': args, 'processor': processor(), 'rows': ROWS,
                           'rounds': ROUNDS, 'cases': cases}, indent=1)
    for path in saved:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(document + '\n', encoding='utf-8')
    print(document)


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit('interrupted') from None
