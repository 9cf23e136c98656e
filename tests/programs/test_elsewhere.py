"""The commands of docs/interop.md, 'Take it elsewhere' (vllm and lm_eval: tests/vllm)."""
import importlib
import re
import shlex
import tomllib

import pytest
import torch

import interop.load
from interop import export
from interop.huggingface import read_json
from kv.models.config import read_config
from lab.benchmarks import table
from tests.helpers.elsewhere import ROOT, commands, train_in
from tests.programs.support import load

ELSEWHERE = ('pip', 'vllm', 'lm_eval')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    data = train_in(tmp_path, monkeypatch)
    for program in (export, interop.load):
        monkeypatch.setattr(program, 'DATA_ROOT', data)
    monkeypatch.setenv('HF_MODULES_CACHE', str(tmp_path / 'modules'))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'my.txt').write_text('Words of mine.\nAnd more of them.\n' * 10)
    return tmp_path


def test_the_commands(folder, capsys):
    ours = [command for command in commands('sh') if not command.startswith(ELSEWHERE)]
    assert len(ours) == 3
    for command in ours:
        python, m, module, *args = shlex.split(command)
        assert (python, m) == ('python', '-m')
        importlib.import_module(module).main(args)
    assert re.match(r'\d\.\d{4} bits per byte', capsys.readouterr().out.splitlines()[-1])
    before, after = (load(folder / name / 'ckpt.pt') for name in ('out-mqa-local', 'out-again'))
    assert all(torch.equal(x, after['model'][name]) for name, x in before['model'].items())
    [program] = commands('python')
    exec(program, {})
    assert capsys.readouterr().out.startswith('ROMEO')


def test_what_is_to_be_installed_is_an_extra():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    installs = [command for command in commands('sh') if command.startswith('pip')]
    asked = [re.fullmatch(r"pip install -e '\.\[(.+)\]'", command)[1] for command in installs]
    assert asked == ['export', 'vllm', 'lm-eval'] and set(asked) <= set(extras)


@pytest.mark.parametrize('read', [read_json, read_config, table.read])
def test_json_of_others_may_begin_with_a_byte_order_mark(tmp_path, read):
    """Windows' editors and PowerShell's > write one."""
    (tmp_path / 'x.json').write_text('{"mode": "serve"}', encoding='utf-8-sig')
    assert read(tmp_path / 'x.json') == {'mode': 'serve'}
