"""Servers that are started: their commands, and processes that end."""
import sys
import time

import pytest
import torch

from config.errors import UserError
from lab.sessions import servers, soak, stall
from lab.sessions.client import Answer, Client, Failed
from tests.helpers.sessions import Fake

ANSWERS = '''
import http.server, json, subprocess, sys
child = "x = bytearray(200_000_000); print(flush=True); input()"
PIPE = subprocess.PIPE
child = subprocess.Popen([sys.executable, "-c", child], stdin=PIPE, stdout=PIPE)
child.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
'''


def start(monkeypatch, code):
    monkeypatch.setenv('OPENAI_API_KEY', 'k')
    monkeypatch.setattr(servers, 'START_S', 20.0)
    monkeypatch.setattr(servers, 'build', lambda *args, **kinds: None)
    monkeypatch.setitem(servers.SERVERS, 'nanokv', (lambda program, model, folder, port, *_: [
        sys.executable, '-c', code, str(port)], ''))
    return servers.started('nanokv', '', 10, 10 ** 6, [])


def test_a_server_runs_until_the_end_of_its_block_or_its_own(monkeypatch):
    with start(monkeypatch, ANSWERS) as (url, process):
        assert Client(url).model() == 'tiny'
        assert process.poll() is None
        assert servers.resident(process) > 200_000_000  # with its children
    assert process.poll() is not None
    with pytest.raises(Failed):
        Client(url).model()
    with pytest.raises(UserError, match='does not answer: .*no such thing'):  # its output
        with start(monkeypatch, 'raise SystemExit("no such thing")'):
            pass


def test_rows_of_nanokv_have_what_they_can_use_and_at_most_a_quarter(monkeypatch, tmp_path):
    monkeypatch.setattr(servers, 'export', lambda model, folder: None)
    with torch.device('meta'):
        model = servers.build(64)
    for kv in (2 * 10 ** 6, 10 ** 9):
        command = servers.nanokv('', model, tmp_path, 1, 64, kv)
        rows, prefixes = (int(each.partition('=')[2]) for each in command if '_budget=' in each)
        assert rows + prefixes == kv
        assert rows == min(kv // 4, model.plan.nbytes(16, 64, 'float32'))


@pytest.mark.parametrize('mb, rows', [(64, 1), (1_000, 6)])
def test_what_llama_cpp_may_use(mb, rows, monkeypatch, tmp_path, longest=4096):
    pytest.importorskip('gguf')
    monkeypatch.setattr(servers, 'write_gguf', lambda *args: None)
    monkeypatch.setattr(servers, 'BPETokenizer', lambda: None)
    with torch.device('meta'):
        model, ours = servers.build(longest, vanilla=True), servers.build(longest)
    command = servers.llama('', model, tmp_path, 1, longest, mb * 10 ** 6)
    options = dict(zip(command, command[1:]))
    assert int(options['--parallel']) == rows
    cells = int(options['--ctx-size'])
    assert cells // rows >= longest and cells % (256 * rows) == 0
    nbytes = model.plan.nbytes(1, 1, 'float16') * cells + int(options['--cache-ram']) * 2 ** 20
    assert nbytes <= max(mb * 10 ** 6, model.plan.nbytes(1, 4096, 'float16'))
    assert nbytes > 0.9 * mb * 10 ** 6
    assert model.plan == model.plan.vanilla() and model.config.bias
    for name in ('n_layer', 'n_head', 'n_embd', 'vocab_size', 'block_size'):
        assert getattr(ours.config, name) == getattr(model.config, name)


# -- stalls ----------------------------------------------------------------------------------------

class Stalling(Fake):
    """A token each 5 ms, or 20 ms while the long prompt is computed, which takes 0.4 seconds; the
    second token comes half a second after the first."""
    busy = False

    def ask(self, path, document, most_parts=0, answer=None):
        if len(document['prompt']) > stall.PROMPT:
            self.busy = True
            time.sleep(0.4)
            self.busy = False
        answer.stamps.append(time.perf_counter())
        for k in range(document['max_tokens'] - 1):
            time.sleep(0.5 if k == 0 else 0.02 if self.busy else 0.005)
            answer.stamps.append(time.perf_counter())
        return answer


def test_gaps_before_and_during_a_long_prompt(monkeypatch):
    monkeypatch.setattr(stall, 'TOKENS', 250)
    monkeypatch.setattr(stall, 'BEFORE_S', 0.3)
    found = stall.measure(Stalling(), {}, (0, 10), 100, 1)
    assert 0.005 <= found['before_s']['p50'] < 0.02 <= found['during_s']['p50'] < 0.1
    assert found['before_s']['max'] < 0.4  # not from the beginning of the streams
    assert found['p99_over_median'] == found['during_s']['p99'] / found['before_s']['p50']
    for part in ('before', 'during'):  # of a stream
        gaps, means = found[f'{part}_s'], found[f'tpot_{part}_s']
        assert 0.005 <= means['p50'] <= means['max'] <= gaps['max']
    assert found['tpot_during_s']['p50'] > 2 * found['tpot_before_s']['p50']
    assert found['long_ttft_s']['p50'] >= 0.4 > found['short_ttft_s']['p50']
    monkeypatch.setattr(stall, 'TOKENS', 70)
    with pytest.raises(UserError, match='ended before the long prompt'):
        stall.measure(Stalling(), {}, (0, 10), 100, 1)


# -- the soak --------------------------------------------------------------------------------------

def test_clients_that_vanish_ask_again(monkeypatch):
    fake, parts = Fake(), []

    def ask(self, path, document, most_parts=0, answer=None):
        parts.append(most_parts)
        return fake.ask(path, document, most_parts, answer)
    monkeypatch.setattr(Client, 'ask', ask)
    client = soak.Vanishing('http://127.0.0.1:1')
    for k in range(400):
        given = Answer(1.0)
        document = {'prompt': [k // 256, k % 256], 'max_tokens': 5}
        assert client.ask('completions', document, 0, given) is given and len(given.tokens) == 5
    assert len(client.replies) == 400
    assert 20 < client.num_vanished < 65
    assert len(fake.asked) == 400 + client.num_vanished
    during = [n for n in parts if n]
    assert 0 < len(during) < client.num_vanished and set(during) <= set(range(1, 6))

    monkeypatch.setattr(fake, 'say', lambda answer, document: answer.tokens.append(1))
    with pytest.raises(Failed, match='1 of 5 tokens'):
        client.ask('completions', {'prompt': [1], 'max_tokens': 5})


def test_memory_that_grows_and_requests_that_fail_are_errors():
    settled = [(600, 100), (800, 105), (900, 101)]
    assert soak.growth([(0, 50), (599, 90), *settled]) == pytest.approx(0.05)
    assert soak.growth([(600, 100), (700, 99)]) == 0 and soak.growth([(599, 90)]) is None
    soak.check({'failed': 0, 'growth': 0.019})
    soak.check({'failed': 0, 'growth': None})
    with pytest.raises(UserError, match='memory grew by 2.1%'):
        soak.check({'failed': 0, 'growth': 0.021})
    with pytest.raises(UserError, match='3 requests failed: boom'):
        soak.check({'failed': 3, 'errors': ['boom'], 'growth': 0.0})
