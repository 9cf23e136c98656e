"""What programs write in folders that others made, and folders for one user alone."""
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.text.dialogue import Dialogue, Template
from lab.files import write_json
from training.log import RunLog
from training.plotting import save, subplots

ROOT = Path(__file__).resolve().parents[2]


def write_metrics(path):
    with RunLog(path.parent, 0, [], write=True, keep_old=False) as log:
        log.stepped(0, {}, loss=1.0, tokens_per_second=1.0)


def draw_figure(path):
    with subplots() as (figure, _):
        save(figure, path)


@pytest.mark.parametrize('name, write', [
    ('a.json', lambda path: write_json(path, {})),
    ('chat.json', lambda path: Dialogue(None, Template('{name}:{text}\n')).save(path)),
    ('metrics.jsonl', write_metrics), ('loss.png', draw_figure)])
@pytest.mark.parametrize('hidden', ['.', ''])
def test_no_link_is_followed(tmp_path, name, write, hidden):
    """Neither one with the file's name nor one with a name that this process may use meanwhile."""
    victim, folder = tmp_path / 'victim', tmp_path / 'out'
    victim.write_text('')
    folder.mkdir()
    for planted in (name, f'{hidden}{name}.{os.getpid()}.tmp'):
        (folder / planted).symlink_to(victim)
    write(folder / name)
    assert victim.read_text() == '' and (folder / name).read_bytes()
    assert not (folder / name).is_symlink()


@pytest.mark.parametrize('given', ['', 'relative', 'its own'])
def test_what_torch_compiles_is_kept_in_a_private_folder(tmp_path, given):
    """Not in /tmp, where another user may have put programs."""
    own = {'TORCHINDUCTOR_CACHE_DIR': 'mine'} if given == 'its own' else {}
    plain = {name: value for name, value in os.environ.items()
             if name != 'TORCHINDUCTOR_CACHE_DIR'}
    program = ('import os, configurator\n'
               "configurator.run_program(lambda: print(os.environ['TORCHINDUCTOR_CACHE_DIR']))")
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=tmp_path, check=True,
        env=plain | own | {'PYTHONPATH': str(ROOT), 'HOME': str(tmp_path / 'home'),
                           'XDG_CACHE_HOME': 'here' if given == 'relative' else ''})
    if own:
        assert done.stdout == 'mine\n'
    else:
        folder = tmp_path / 'home' / '.cache' / 'nanokv' / 'inductor'
        assert done.stdout == f'{folder}\n' and stat.S_IMODE(folder.stat().st_mode) == 0o700
