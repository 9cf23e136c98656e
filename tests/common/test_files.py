"""What programs write in folders that others made, and folders for one user alone."""
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.files import write_json
from engine.text.dialogue import Dialogue, Template
from training.loop.log import RunLog
from training.plot.figures import save, subplots

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


@pytest.mark.parametrize('given', ['', 'relative', 'its own', 'open to others'])
def test_what_torch_compiles_is_kept_in_a_private_folder(tmp_path, given):
    """Not in /tmp, where another user may have put programs."""
    folder = tmp_path / 'home' / '.cache' / 'nanokv' / 'inductor'
    if given == 'open to others':
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    own = {'TORCHINDUCTOR_CACHE_DIR': 'mine'} if given == 'its own' else {}
    plain = {name: value for name, value in os.environ.items()
             if name not in ('TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR')}
    program = ('import os, configurator\nos.umask(0)\nconfigurator.run_program('
               "lambda: print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'), "
               "os.environ.get('TRITON_CACHE_DIR')))")
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=tmp_path, check=True,
        env=plain | own | {'PYTHONPATH': str(ROOT), 'HOME': str(tmp_path / 'home'),
                           'XDG_CACHE_HOME': 'here' if given == 'relative' else ''})
    used, triton = done.stdout.split()
    if given == 'open to others':
        assert not Path(used).exists() and triton == f'{used}/triton'
        assert done.stderr == ('Note: what is compiled is not kept in '
                               f'{folder} (other users can change {folder}: chmod go-w)\n')
        return
    assert used == ('mine' if own else str(folder)) and triton == f'{folder}/triton'
    made = (folder, *folder.parents[:3])  # down from the home folder
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 4
    assert done.stderr == ''
