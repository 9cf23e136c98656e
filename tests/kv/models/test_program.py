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


def test_the_program(tmp_path, capsys):
    main([write(tmp_path / 'model', GEMMA_3), '--max_seq_len=32768', '--budget=80GB',
          '--like=nanokv', '--page_size=32', '--step_tokens=512', '--json=True'])
    *lines, last = capsys.readouterr().out.splitlines()
    found, text = json.loads(last), ' '.join(' '.join(lines).split())
    assert found == account(GEMMA_3, max_seq_len=32768, budget=80 * 10 ** 9, like='nanokv',
                            page_size=32, step_tokens=512)
    assert '5 11 17 23 29' in text and f"{found['bytes']:,}" in text
    assert "with nanoKV's plan" in text and '34x smaller' in text
    assert 'has the defaults of transformers' in text


def test_shared_caches_are_shown(tmp_path, capsys):
    main([write(tmp_path / 'model', FAMILIES['gemma3n_text'] | dict(model_type='gemma3n_text'))])
    assert '3, read by 4' in ' '.join(capsys.readouterr().out.split())


def test_only_our_own_lines(tmp_path):
    """Packages of others print their warnings elsewhere."""
    odd = dict(attention_types=[[['global', 'local'], 1]], num_layers=2, torch_dtype='float16',
               rope_scaling=dict(type='linear', factor=2.0, odd=1))
    done = subprocess.run([sys.executable, '-m', 'kv', write(
        tmp_path / 'model', odd | dict(model_type='gpt_neo'))], cwd=ROOT, capture_output=True,
        text=True)
    assert (done.returncode, done.stderr) == (0, '') and done.stdout.startswith('gpt_neo: 2 layers')


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
def test_mistakes(argv, message, tmp_path):
    model = write(tmp_path / 'model', LLAMA)
    with pytest.raises(UserError, match=message):
        main([model if arg == 'MODEL' else arg for arg in argv])


def test_a_name_on_the_hub(tmp_path, monkeypatch):
    """`owner/name` is looked up; without a connection, or the model, the hub's words are shown."""
    import huggingface_hub

    def not_there(url, timeout):
        raise ConnectionError('no connection')
    path = Path(write(tmp_path / 'model', LLAMA)) / 'config.json'
    monkeypatch.setattr(huggingface_hub, 'hf_hub_download',
                        lambda name, file, **_: {('some/llama', 'config.json'): path}[name, file])
    monkeypatch.setattr(huggingface_hub, 'get_hf_file_metadata', not_there)
    assert read_config('some/llama') == LLAMA
    with pytest.raises(UserError, match="'some/other': no such folder, and the hub's config.json.*"
                                        'no connection'):
        read_config('some/other')
