"""Results of the GPU check: wrong kernels are detected, parts can be rehearsed, tables."""
import json
import os
import subprocess
import sys

import pytest
import torch

from attention.backends import INTERPRETING
from config.errors import UserError
from lab.scripts import gpu_check
from lab.scripts.gpu import summary
from lab.scripts.gpu.cells import PARTS
from lab.scripts.gpu.supervise import ROOT

CELLS = {part: [cell for stage in stages() for cell in stage.cells]
         for part, stages in PARTS.items() if stages}


# -- what a cell measured --------------------------------------------------------------------------

needs_interpreter = pytest.mark.skipif(not INTERPRETING, reason="needs Triton's interpreter")


@needs_interpreter
def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch):
    decode = pytest.importorskip('attention.kernels.decode')
    from attention.backends import triton_enabled
    from lab.scripts.gpu.measure import Machine, run_cell
    right, machine = decode.stored_attention, Machine('cpu')
    args = dict(layout='ring', kv_dtype='int8')
    spoils = [(lambda y: y * 1.01, 'wrong'),
              (lambda y: y.index_fill(0, torch.tensor([3]), torch.nan), 'wrong'),
              (lambda y: 1 / 0, 'failed')]
    with triton_enabled(True):
        assert run_cell('attention/ring/int8', args, machine)['status'] == 'ok'
        for spoil, status in spoils:
            monkeypatch.setattr(decode, 'stored_attention',
                                lambda *args, spoil=spoil, **how: spoil(right(*args, **how)))
            assert run_cell('attention/ring/int8', args, machine)['status'] == status


def test_rows_are_judged_one_by_one():
    """The mean over many values is small, so an error in it must not be divided by the larger mean
    of a row with few values."""
    from lab.scripts.gpu.measure import judged
    exact = torch.tensor([[2.0, 1.0], [0.02, 0.01], [0.0, 0.0]]).double()
    assert judged(exact.float(), exact, 0.1)['error'] < 1e-6
    for row, by in ((1, 1.3), (1, 0.0), (0, 1.3)):
        found = exact.clone()
        found[row] *= by
        assert judged(found, exact, 0.1)['error'] > 0.29
    found = exact.clone()
    found[2, 0] = 1e-6
    assert judged(found, exact, 0.1)['error'] > 1
    found[2, 0] = torch.nan
    assert judged(found, exact, 0.1)['error'] > 1


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize('part, only', [('first', ''), ('tune', 'paged'), ('train', 'b16'),
                                        ('sizes', ''), ('programs', ''),
                                        ('train-more', 'recompute,sdpa')])
def test_a_rehearsal(part, only, tmp_path):
    pytest.importorskip('triton')
    command = ['bash', 'lab/scripts/gpu_check.sh', f'--part={part}', '--rehearse=True',
               f'--only={only}', f'--out={tmp_path}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {'PYTHON': sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary.read(tmp_path / 'cells.jsonl')[1]
    assert [record['cell'] for record in found if record['status'] != 'ok'] == []
    texts = only.split(',')
    chosen = [cell for cell in CELLS[part] if any(text in cell.name for text in texts)]
    assert len(found) == len(chosen)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'cells.jsonl', 'README.md', 'detail.tar.gz'}
    assert len(done.stdout.rpartition('GPU check: ')[2].splitlines()) <= summary.LINES


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a GPU')
def test_without_a_gpu(tmp_path):
    with pytest.raises(UserError, match='no CUDA device'):
        gpu_check.main(['--part=tests', f'--out={tmp_path}'])


# -- tables ----------------------------------------------------------------------------------------

def records_of_all_kinds():
    timed = {'part': 'first', 'cell': 'bench/decode/b1', 'status': 'ok', 'limit': 74e-6,
             'share': 0.2, 'work': '249 MB read', 'measured_seconds': 370e-6}
    wrong = {'part': 'first', 'cell': 'captured/int8', 'status': 'wrong', 'error': 0.3,
             'allowed': 0.05, 'why': 'error 3.00e-01, allowed 5.00e-02'}
    tests = [{'part': 'tests', 'cell': f'tests/a.py::test_{k}', 'status': 'failed',
              'why': f'call: long\nE   assert {k}'} for k in range(60)]
    tests += [{'part': 'tests', 'cell': 'tests/a.py::test_good', 'status': 'ok'}]
    profile = {'part': 'first', 'cell': 'profile/decode', 'status': 'ok',
               'table': 'kernel  us\n_split  9'}
    return [timed, wrong, *tests, profile]


def test_the_page_and_a_merge(tmp_path):
    later = [{'part': 'first', 'cell': 'captured/int8', 'status': 'ok'},
             {'part': 'first', 'cell': 'bench/decode/b1', 'status': 'not run',
              'why': 'the time was up'}]
    for name, records in (('a', records_of_all_kinds()), ('b', later)):
        (tmp_path / name).mkdir()
        documents = [{'run': name, 'facts': {'device': f'GPU {name}'}}, *records]
        lines = [json.dumps(document) + '\n' for document in documents]
        (tmp_path / name / 'cells.jsonl').write_text(''.join(lines))
    (tmp_path / 'a' / 'cells.jsonl').open('a').write('{"part": "first", "cell": "cut sho')
    gpu_check.main(['--merge', str(tmp_path / 'b' / 'cells.jsonl'), f"--out={tmp_path / 'a'}"])
    page = (tmp_path / 'a' / 'README.md').read_text()
    assert '- device GPU a' in page and '- device GPU b' in page
    # the newest record is used
    assert '| captured/int8 | ok |' in page and '| captured/int8 | wrong |' not in page
    assert '370.0 us, limit 74.0 us: 20%' in page and '_split  9' in page
    assert 'tests/a.py::test_good' not in page
