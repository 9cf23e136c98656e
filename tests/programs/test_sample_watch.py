"""sample.py --watch=True, in a pseudo terminal and elsewhere. Frames: engine/test_watch.py."""
import os
import re
import subprocess
import sys

import pytest

from config.errors import UserError
from config.gpt_config import GPTConfig
from tests.programs.support import FULL_STACK, LAUNCH, ROOT, VANILLA, flags, run_sample
from tests.programs.test_sample import RULE, samples_in, texts

pty = pytest.importorskip('pty')
ESCAPE = re.compile(r'\x1b\[[0-9;?]*[A-Za-z]')
INTERRUPTED = ('import engine.requests.stopping as e\nplain = e.SampleText.add\n'
               'def add(self, token):\n'
               '    if self.n_tokens == 7: raise KeyboardInterrupt\n'
               '    return plain(self, token)\n'
               'e.SampleText.add = add\n')


def watched(data_root, *args, before=''):
    """Exit status and output of sample.py in a terminal of 80 x 24."""
    env = dict(os.environ, TERM='xterm', COLUMNS='80', LINES='24', PYTHONIOENCODING='utf-8')
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, '-c', before + LAUNCH.format('sample'), str(data_root), *args,
         '--watch=True', '--native=False'], cwd=ROOT, env=env, stdin=theirs, stdout=theirs,
        stderr=theirs)
    os.close(theirs)
    out = b''
    try:
        while piece := os.read(ours, 65536):
            out += piece
    except OSError:  # the terminal is closed
        pass
    os.close(ours)
    return program.wait(), out.decode().replace('\r\n', '\n')


@pytest.mark.parametrize('config', [VANILLA, FULL_STACK], ids=['vanilla', 'full stack'])
def test_in_a_terminal_lanes_are_drawn_and_each_text_is_printed(capsys, data_root, config):
    """40 tokens are more than vanilla's block_size: the rest is recomputed."""
    shape = {name: value for name, value in config.items() if hasattr(GPTConfig, name)}
    settings = dict(shape, init_from='random', dataset='tiny', start='ab', max_new_tokens=40,
                    num_samples=2, device='cpu')
    plain = samples_in(run_sample(capsys, **settings, native=False, report=False))
    status, out = watched(data_root, *flags(settings), '--parallel=2')
    visible = ESCAPE.sub('', out)
    totals = 'tokens/s' + r';\s+past\s+block_size:\s+recomputed' * (config is VANILLA)
    assert status == 0 and len(plain) == 2
    for text in plain:
        assert re.search(totals + re.escape(f'\n{text}\n{RULE}\n'), visible)
    assert out.rindex('\x1b[?25h') > out.rindex('\x1b[?25l')  # the cursor is back
    assert 'KV cache, as allocated for 1 x ' in visible.rpartition(RULE)[2]


def test_ctrl_c_leaves_the_text_so_far(data_root, trained):
    args = flags(dict(out_dir=trained['full'], start='ab', temperature=0, device='cpu'))
    status, out = watched(data_root, *args, before=INTERRUPTED)
    assert status == 130
    _, _, end = out.rpartition('\x1b[?25h')
    assert re.fullmatch(r'ab[ a-j\n]{7}\ninterrupted\n', ESCAPE.sub('', end))


def test_elsewhere_a_note_and_the_same_text(capsys, trained):
    plain = texts(capsys, trained['full'], num_samples=2)
    out = run_sample(capsys, out_dir=trained['full'], num_samples=2, watch=True, report=False)
    note = [line for line in out.splitlines() if line.startswith('Note: watch=True')]
    assert len(note) == 1 and '\x1b' not in out
    assert out.endswith(note[0] + '\n' + ''.join(f'{text}\n{RULE}\n' for text in plain))


def test_many_prompts_are_refused(capsys, tmp_path):
    with pytest.raises(UserError, match="watch=True draws one sample .* prompts='p.txt' are many"):
        run_sample(capsys, prompts='p.txt', watch=True)
