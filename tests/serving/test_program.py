"""serve.py: its settings, its API keys, and its process, ended by a signal."""
import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from starlette.testclient import TestClient

import serve
from common.errors import UserError
from serving.server import bind
from tests.programs.support import LAUNCH, ROOT, TINY, flags, make_tiny

NAMES = ('dataset', 'device', 'n_layer', 'n_head', 'n_embd', 'block_size')
SETTINGS = {name: TINY[name] for name in NAMES} | dict(
    init_from='random', user='a', reply_as='b', turn='{name}c{text}d', port=0)


@pytest.fixture
def data_root(tmp_path, monkeypatch):
    make_tiny(tmp_path)
    monkeypatch.setattr('interop.load.DATA_ROOT', tmp_path)
    return tmp_path


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130),
                                            pytest.param(signal.SIGTERM, -signal.SIGTERM,
                                                         marks=pytest.mark.slow)])
def test_it_serves_until_a_signal(data_root, number, status):
    program = subprocess.Popen([sys.executable, '-c', LAUNCH.format('serve'), str(data_root),
                                *flags(SETTINGS)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT,
                                                                signal.default_int_handler))
    try:
        url = next(found[0] for line in program.stdout
                   if (found := re.search(r'http://127\.0\.0\.1:\d+/v1', line)))
        document = json.dumps(dict(prompt='abc', max_tokens=3)).encode()
        asked = urllib.request.Request(url + '/completions', document,
                                       {'Content-Type': 'application/json'})
        answer = json.load(urllib.request.urlopen(asked, timeout=60))
        assert answer['usage']['completion_tokens'] == 3 and answer['model'] == 'random'
        program.send_signal(number)
        printed, errors = program.communicate(timeout=60)
        assert 'POST /v1/completions 200: 3 prompt tokens (0 cached), 3 completion' in printed
        assert program.returncode == status and errors.strip() in ('', 'interrupted'), errors
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize('settings, named', [
    (dict(parallel=0), 'parallel=0'), (dict(max_new_tokens=0), 'max_new_tokens=0'),
    (dict(max_waiting=-1), 'max_waiting=-1'),
    (dict(cors='localhost:3000'), "cors='localhost:3000'"), (dict(cors='http://a/'), "'http://a/'"),
    (dict(timeout=0.0), 'timeout=0.0'), (dict(grace=-1.0), 'grace=-1.0'),
    (dict(max_body='lots'), 'max_body='),
    (dict(port=70000), 'port=70000'), (dict(host='no such host'), "host='no such host'"),
    (dict(turn='x'), "turn='x'"), (dict(max_seq_len=17), 'block_size=16'),
    (dict(kv_budget='1'), 'kv_budget=1'), (dict(prefix_budget='x'), 'prefix_budget'),
    (dict(api_key_file='/nowhere/keys'), 'api_key_file')], ids=lambda x: str(x)[:30])
def test_wrong_settings(data_root, settings, named, monkeypatch):
    monkeypatch.delenv('NANOKV_API_KEY', raising=False)
    with pytest.raises(UserError) as caught:
        serve.main(flags(SETTINGS | settings))
    assert named in str(caught.value)


@pytest.mark.parametrize('settings, logs, page', [
    ({}, True, True), (dict(log_requests=False), False, True), (dict(page=False), True, False)])
def test_the_log_and_the_page_can_be_switched_off(data_root, monkeypatch, capsys, settings, logs,
                                                  page):
    made = []

    def run(server, sockets):
        made.append(server)
        server.worker.drain(0)
        sockets[0].close()
    monkeypatch.setattr('serving.server.Server.run', run)
    serve.main(flags(SETTINGS | settings))
    TestClient(made[0].config.app).get('/none')
    assert (' GET /none 404' in capsys.readouterr().out) == logs
    assert ('a chat page' in made[0].greeting) == page
    paths = {route.path for route in made[0].config.app.routes}
    watched = {f'/nanokv/{name}' for name in ('plan', 'completions', 'chat/completions')}
    assert paths & {'/', *watched} == ({'/', *watched} if page else set())


def test_a_port_that_is_taken():
    with bind('127.0.0.1', 0) as sock:
        sock.listen()
        with pytest.raises(UserError, match='cannot listen there'):
            bind('127.0.0.1', sock.getsockname()[1])


def test_keys_come_from_a_file_or_the_environment(tmp_path):
    path = tmp_path / 'keys'
    path.write_text(' one \n\ntwo\n')
    assert serve.read_keys(str(path), {'NANOKV_API_KEY': 'x'}) == ['one', 'two']
    assert serve.read_keys('', {'NANOKV_API_KEY': 'x'}) == ['x'] and serve.read_keys('', {}) == []
    path.write_text('\n')
    for given in ((str(path), {}), ('', {'NANOKV_API_KEY': ''}), ('', {'NANOKV_API_KEY': ' '})):
        with pytest.raises(UserError, match='no key in it|set, and empty'):
            serve.read_keys(*given)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'serving.app', None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, 'serving.app')
    monkeypatch.setitem(sys.modules, 'starlette.applications', None)
    message = re.escape("starlette.applications: pip install -e '.[serve]'")
    with pytest.raises(UserError, match=message):
        serve.main(flags(SETTINGS))
