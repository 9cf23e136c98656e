"""What watching the KV cache costs a server: tokens per second of streams with cache events
(/nanokv/completions, which the page uses) against the same streams without (/v1/completions).

    python lab/scripts/page_cost.py out-mqa-local --save=results/page/demo.json
    python lab/scripts/page_cost.py config/train_gpt2_mqa_local.py --init_from=random \
        --save=results/page/gpt2.json

Further arguments are serve.py's. Each round runs every case once, in a server of its own process;
the client is in this one. `beside`: 8 ordinary streams while 64 others run, watched or not.
"""
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lab.benchmarks.setting import processor

ROUNDS, ROWS = 5, 80
PLAIN, WATCHED = '/v1/completions', '/nanokv/completions'


async def stream(port: int, path: str, tokens: int, seed: int) -> tuple[int, float]:
    """Send a request and read all of its answer. Returns its tokens and when it ended."""
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
    return int(usage), time.perf_counter()


async def rate(port: int, tokens: int, measured: list[str], beside: list[str]) -> float:
    """Tokens per second of the `measured` streams, from the start to the end of the last one. Those
    `beside` them have twice as many tokens, so that they end later."""
    start = time.perf_counter()
    tasks = [asyncio.create_task(stream(port, path, tokens, i)) for i, path in enumerate(measured)]
    others = [asyncio.create_task(stream(port, path, 2 * tokens, 1000 + i))
              for i, path in enumerate(beside)]
    done = await asyncio.gather(*tasks)
    await asyncio.gather(*others)
    return sum(n for n, _ in done) / (max(end for _, end in done) - start)


CASES = {
    **{f'{n} streams': lambda port, path, n=n, tokens=tokens: rate(port, tokens, [path] * n, [])
       for n, tokens in ((1, 1600), (16, 400), (64, 200))},
    '8 streams beside 64': lambda port, path: rate(port, 200, [PLAIN] * 8, [path] * 64),
}


def start_server(args: list[str]):
    """Start serve.py on a free port. Returns the process and the port, once it listens."""
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    server = subprocess.Popen([sys.executable, 'serve.py', *args, f'--port={port}',
                               f'--parallel={ROWS}', '--log_requests=False'], cwd=ROOT,
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
    rates = {name: {PLAIN: [], WATCHED: []} for name in CASES}
    try:
        for k in range(-1, ROUNDS):  # the first round is a warm-up
            for name, case in CASES.items():
                for path in (PLAIN, WATCHED)[::1 if k % 2 else -1]:
                    found = asyncio.run(case(port, path))
                    if k >= 0:
                        rates[name][path].append(found)
            print(f'round {k + 1} of {ROUNDS}', file=sys.stderr)
    finally:
        server.terminate()
        server.wait()
    cases = {name: {
        'plain_tokens_per_second': statistics.median(both[PLAIN]),
        'watched_tokens_per_second': statistics.median(both[WATCHED]),
        'ratio': statistics.median(b / a for a, b in zip(both[PLAIN], both[WATCHED])),
        'ratios': [round(b / a, 4) for a, b in zip(both[PLAIN], both[WATCHED])],
    } for name, both in rates.items()}
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
