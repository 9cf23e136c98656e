"""What watching the KV cache costs a server: its CPU time per token for streams with cache events
(/nanokv/completions, which the page uses) against streams without (/v1/completions). Linux only.

    python lab/scripts/page_cost.py out-mqa-local > results/page/demo.json

Further arguments are serve.py's. The server has one torch thread: more of them spin while they
wait, which would count as CPU time.
"""
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from configurator import run_program
from lab.benchmarks.clock import alternate, paired
from lab.benchmarks.setting import processor
from lab.sessions import servers
from lab.sessions.client import Client

ROUNDS, ROWS = 5, 80
CASES = {  # name: streams, watched ones, tokens of each
    '1 stream': (1, 1, 2000), '1 of 16 streams': (16, 1, 500), '64 streams': (64, 64, 200)}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def microseconds(server, url: str, streams: int, watched: int, tokens: int) -> float:
    """CPU time of the server per token of `streams` at once, of which the first are watched."""
    def ask(seed):
        client = Client(url + ('/nanokv' if seed < watched else '/v1'))
        document = {'prompt': [seed % 50 + 1] * 20, 'max_tokens': tokens, 'seed': seed}
        return client.ask('completions', document).usage['completion_tokens']

    before = cpu_seconds(server.pid)
    with ThreadPoolExecutor(streams) as pool:
        done = sum(pool.map(ask, range(streams)))
    return round(1e6 * (cpu_seconds(server.pid) - before) / done, 1)


def main():
    port, cases = servers.free_port(), {}
    url = f'http://127.0.0.1:{port}'
    command = ['env', 'OMP_NUM_THREADS=1', sys.executable, str(ROOT / 'serve.py'), *sys.argv[1:],
               f'--port={port}', f'--parallel={ROWS}', '--log_requests=False']
    with servers.running(command, url) as server:
        for name, (streams, watched, tokens) in CASES.items():
            times = alternate({side: partial(microseconds, server, url, streams, n, tokens)
                               for side, n in (('plain', 0), ('watched', watched))}, ROUNDS, name)
            cases[name] = {f'{side}_microseconds_per_token': each for side, each in times.items()}
            cases[name]['ratio'] = paired(times['watched'], times['plain'])['median']
    print(json.dumps({'arguments': sys.argv[1:], 'processor': processor(), 'rows': ROWS,
                      'rounds': ROUNDS, 'cases': cases}, indent=1))


if __name__ == '__main__':
    run_program(main)
