"""README's commands for `vllm serve` and `lm_eval`. Needs their environment: make test-vllm."""
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from interop import evaluate, export
from tests.helpers.elsewhere import ROOT, commands, train_in

pytest.importorskip('vllm', reason='make test-vllm has an environment with vLLM')
BIN = Path(sys.executable).parent
OFFLINE = {'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'VLLM_CPU_KVCACHE_SPACE': '1',
           'PATH': f"{BIN}:{os.environ['PATH']}"}
# the program looks up the version of 'vllm', which fails if the package is vllm-cpu
VLLM = ('import importlib.metadata as m; plain = m.version; '
        'm.version = lambda name: plain("vllm-cpu") + "+cpu" if name == "vllm" else plain(name); '
        'from vllm.entrypoints.cli.main import main; main()')
TEXT = 'Words of mine.\nAnd more of them.\n' * 10


@pytest.fixture
def folder(tmp_path, monkeypatch):
    data = train_in(tmp_path, monkeypatch)
    export.export(tmp_path / 'out-mqa-local' / 'ckpt.pt', tmp_path / 'my-model', data_root=data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(program: str) -> list[str]:
    [found] = [shlex.split(line) for line in commands('sh') if line.startswith(program + ' ')]
    return found


def environment(folder):
    ours = dict(os.environ)
    ours.pop('TRITON_INTERPRET', None)  # set by tests/conftest.py
    return ours | OFFLINE | {'HF_HOME': str(folder / 'hf')}


def answer(url: str, body: dict | None = None):
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None,
                                     {'Content-Type': 'application/json'})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read() or 'null')


def test_served(folder):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{s.getsockname()[1]}'
    with open(folder / 'log', 'w') as log:
        server = subprocess.Popen([sys.executable, '-c', VLLM, *command('vllm')[1:], '--port',
                                   url.rpartition(':')[2],
                                   '--dtype=float32', '--enforce-eager'], stdout=log, stderr=log,
                                  env=environment(folder))
    try:
        for _ in range(240):
            try:
                answer(url + '/health')
                break
            except OSError:
                assert server.poll() is None, (folder / 'log').read_text()
                time.sleep(1)
        asked = {'model': 'my-model', 'prompt': 'ROMEO', 'max_tokens': 20, 'temperature': 0}
        text = answer(url + '/v1/completions', asked)['choices'][0]['text']
    finally:
        server.terminate()
        server.wait(60)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained('my-model', trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained('my-model', trust_remote_code=True)
    ids = model.generate(**tokenizer('ROMEO', return_tensors='pt'), max_new_tokens=20,
                         do_sample=False)[0, 5:]
    assert text == tokenizer.decode(ids) and len(text) == 20


def test_judged_as_by_ours(folder, monkeypatch, capsys):
    """README's task needs a network; docs/interop.md's, on a file in windows of 64, replaces it."""
    [task] = re.findall(r'^```yaml\n(.*?)^```', (ROOT / 'docs' / 'interop.md').read_text(),
                        re.M | re.S)
    (folder / 'own_text.yaml').write_text(task)
    (folder / 'texts.jsonl').write_text(json.dumps({'text': TEXT}))
    program = command('lm_eval')
    at = program.index('--tasks')
    program[at + 1] = 'own_text'
    # a character tokenizer has no beginning-of-text token
    program[program.index('--model_args') + 1] += ',prefix_token_id=0'
    done = subprocess.run([*program, '--include_path', '.', '--device', 'cpu', '--output_path',
                           'found.json'],
                          env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.rglob('found*.json')
    found = json.loads(path.read_text())['results']['own_text']['bits_per_byte,none']
    (folder / 'text.txt').write_text('\n' + TEXT)
    monkeypatch.setattr('interop.load.DATA_ROOT', folder / 'data')
    evaluate.main(['--init_from=my-model', '--text=text.txt', '--context=64', '--stride=64',
                   '--json=True', '--device=cpu'])
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == pytest.approx(ours['bits_per_byte'], rel=1e-5)
