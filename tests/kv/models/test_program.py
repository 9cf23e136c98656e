"""`python -m kv` of other people's models."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from config.errors import UserError
from kv import account
from kv.__main__ import main
from kv.models.config import read_config
from tests.helpers.hf_families import FAMILIES
from tests.kv.models.test_account import GEMMA_3, LLAMA, ROOT


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize('name', ['', '/config.json'])
def test_the_program(name, tmp_path, capsys):
    main([write(tmp_path / 'model', GEMMA_3) + name, '--max_seq_len=32768', '--budget=80GB',
          '--like=nanokv', '--json=True'])
    *lines, last = capsys.readouterr().out.splitlines()
    found, text = json.loads(last), ' '.join(' '.join(lines).split())
    assert found == account(GEMMA_3, max_seq_len=32768, budget=80 * 10 ** 9, like='nanokv')
    assert '5 11 17 23 29' in text and f"{found['bytes']:,}" in text
    assert "with nanoKV's plan" in text and '34x smaller' in text


def test_shared_caches_are_shown(tmp_path, capsys):
    main([write(tmp_path / 'model', FAMILIES['gemma3n_text'] | dict(model_type='gemma3n_text'))])
    assert '3, read by 4' in ' '.join(capsys.readouterr().out.split())


def test_defaults_that_are_filled_in_are_shown(tmp_path, capsys):
    for i, (config, filled) in enumerate((
            (dict(model_type='llama', num_attention_heads=32),
             {'head_dim': 128, 'num_hidden_layers': 32}),
            (dict(model_type='gpt2', n_embd=64, num_attention_heads=4), {'num_hidden_layers': 12}),
            (dict(nanokv=dict(n_layer=2)), {'n_embd': 768, 'n_head': 12}))):
        main([write(tmp_path / str(i), config), '--json=True'])
        *lines, last = capsys.readouterr().out.splitlines()
        found = json.loads(last)['filled']
        assert found.items() >= filled.items()
        assert not found.keys() & {'n_embd', *config} - {*filled}
        [line] = [line for line in lines if line.startswith('Note: the config does not have')]
        assert all(f'{name}={value}' in line for name, value in found.items())


def test_settings_of_vllm(tmp_path, capsys):
    main([write(tmp_path / 'model', GEMMA_3), '--page_size=32', '--step_tokens=512', '--json=True'])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found['engines'] == account(GEMMA_3, page_size=32, step_tokens=512)['engines']


@pytest.mark.parametrize('config, message', [
    ('{', 'cannot be read'), ('[]', 'holds list, not an object'), ({}, 'model_type=None')])
def test_damaged_files_are_one_line(config, message, tmp_path):
    done = subprocess.run([sys.executable, '-m', 'kv', write(tmp_path / 'model', config)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1


@pytest.mark.parametrize('argv, message', [
    (['nowhere/config.json'], 'no such folder or config.json'),
    (['MODEL', '--n_head=3'], 'is in its config'), (['MODEL', '--svg=x.svg'], 'is in its config'),
    (['MODEL', 'MODEL'], 'one model at a time'), (['--like=nanokv'], 'models of Hugging Face'),
    (['config/train_gpt2.py', '--page_size=32'], 'models of Hugging Face'),
    (['config/train_gpt2x'], 'did you mean config/train_gpt2.py'),
    (['config/x.json'], 'no such folder'),
    (['--svg', 'no/where.svg', 'config/train_gpt2.py'], 'cannot be written')])
def test_mistakes(argv, message, tmp_path, monkeypatch):
    model = write(tmp_path / 'model', LLAMA)
    with pytest.raises(UserError, match=message):
        main([model if arg == 'MODEL' else arg for arg in argv])


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    """`owner/name` is looked up; without a connection, or the model, the hub's words are shown."""
    import huggingface_hub
    path = Path(write(tmp_path / 'model', LLAMA)) / 'config.json'
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download',
                        lambda name, file: {('some/llama', 'config.json'): path}[name, file])
    assert read_config('some/llama') == LLAMA
    with pytest.raises(UserError, match="'some/other': no such folder, and the hub's config.json"):
        read_config('some/other')
