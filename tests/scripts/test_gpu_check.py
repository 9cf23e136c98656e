"""The GPU check, as far as a machine without one can tell: what it would run, and that nothing is lost whatever happens."""
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import configurator
from attention.kernels import INTERPRETING
from scripts import gpu_check
from scripts.gpu import run_tests, summary, supervise
from scripts.gpu.cells import PARTS, Cell
from scripts.gpu.supervise import ROOT, Records, Supervisor

CELLS = {part: [cell for stage in stages() for cell in stage.cells] for part, stages in PARTS.items() if stages}


# -- what it would run ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('cell', [cell for part in CELLS.values() for cell in part if cell.name.startswith('bench/')],
                         ids=lambda cell: cell.name)
def test_bench_understands_its_commands(cell, monkeypatch):
    monkeypatch.chdir(ROOT)
    s = configurator.parse('bench', [*cell.args['args'], '--device=cuda', '--json=True'], echo=False)
    assert s.mode in ('train', 'kernels', 'decode', 'serve', 'prefill', 'recompute', 'lengths')


@pytest.mark.parametrize('part', CELLS)
def test_a_part_fits_into_a_call(part):
    limit = 360 if part == 'first' else gpu_check.LIMIT - gpu_check.RESERVE
    assert sum(stage.seconds for stage in PARTS[part]()) <= limit


@pytest.mark.parametrize('part', CELLS)
def test_names_are_told_apart_and_speed_has_an_expectation(part):
    cells = CELLS[part]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert (cell.limit > 0) == (0 < cell.share < 1) == bool(cell.work), cell.name


def test_limits_are_those_of_the_hardware():
    """GPT-2 124M's 124M weights in bfloat16 and a few hundred keys a layer; 64 rows of 8,192 tokens in int8."""
    cells = {cell.name: cell for cell in CELLS['first']}
    assert cells['bench/decode/b1-1k'].limit == pytest.approx(249e6 / 3.35e12, rel=0.01)
    assert cells['bench/decode/b64-8k-int8'].limit == pytest.approx(122e-6, rel=0.01)
    assert cells['bench/train/full-b32'].limit == pytest.approx(0.775e9 * 32 * 1024 / 989e12, rel=0.01)


def test_dry_run_lists_every_cell(capsys):
    gpu_check.main(['--dry_run=True'])
    out = capsys.readouterr().out
    for cell in (cell for part in CELLS.values() for cell in part):
        line = next(line for line in out.splitlines() if f'  {cell.name}  ' in line + '  ')
        assert f'{cell.seconds:.0f} s' in line and (not cell.limit or f'{cell.share:.0%} expected' in line)
    assert 'first: about' in out and 'tests: the tests marked gpu' in out
    gpu_check.main(['--dry_run', '--part=tune'])
    assert 'first' not in capsys.readouterr().out


# -- whatever happens to a worker -------------------------------------------------------------------------------------

WORKER = '''
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from scripts.gpu.supervise import worker_cells
options, names, emit = worker_cells()
print('noise on standard output')
for name in names:
    if name == 'early':
        raise SystemExit('no such module')
    emit(begin=name)
    if name == 'crash':
        os.abort()
    if name == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    if name == 'hang':
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
        print(child.pid, flush=True)
        time.sleep(60)
    time.sleep(0.3 * (name == 'slow'))
    emit(cell=name, status='ok', worker=os.getpid())
    if name == 'poison':
        os._exit(3)
'''


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / 'worker.py'
    path.write_text(WORKER.format(root=str(ROOT)))
    return [sys.executable, str(path)]


@pytest.fixture
def run(worker, tmp_path):
    """run(names) -> {name: record}, as cells.jsonl has them."""
    def run(names, processes=1, batch=0, limit=60.0, now=time.monotonic, seconds=0.1):
        records = Records(tmp_path / 'cells.jsonl', 'r', {'device': 'none'})
        supervisor = Supervisor('part', worker, records, now() + limit, tmp_path / 'log.txt', now)
        supervisor.run([Cell(name, seconds) for name in names], processes, batch)
        return {record['cell']: record for record in summary.read(tmp_path / 'cells.jsonl')[1]}
    return run


def states(found):
    return {name: record['status'] for name, record in found.items()}


def test_a_crash_costs_one_cell(run):
    found = run(['a', 'crash', 'b', 'killed', 'c', 'early', 'd'])
    assert states(found) == {'a': 'ok', 'crash': 'crashed', 'b': 'ok', 'killed': 'crashed', 'c': 'ok', 'early': 'crashed',
                             'd': 'ok'}
    assert 'SIGABRT' in found['crash']['why'] and 'SIGKILL' in found['killed']['why']
    assert 'no such module' in found['early']['why'] and 'exit status 1' in found['early']['why']


def test_a_poisoned_worker_hands_the_others_on(run):
    found = run(['a', 'poison', 'b', 'c'])
    assert set(states(found).values()) == {'ok'}
    assert found['a']['worker'] == found['poison']['worker'] != found['b']['worker'] == found['c']['worker']


def test_a_cell_that_hangs_is_ended_with_all_that_it_started(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, 'LEAST', 5.0)
    found = run(['a', 'hang', 'b'])
    assert states(found) == {'a': 'ok', 'hang': 'stopped', 'b': 'ok'} and found['hang']['why'] == 'it had 5 s'
    child = int(next(line for line in (tmp_path / 'log.txt').read_text().splitlines() if line.isdigit()))
    for _ in range(50):
        if not Path(f'/proc/{child}').exists() or 'zombie' in Path(f'/proc/{child}/status').read_text():
            return
        time.sleep(0.1)
    raise AssertionError('its child still runs')


class Clock:
    """Stands still until a cell has been recorded, then jumps."""

    def __init__(self, path: Path, jumps: dict[int, float]):
        self.path, self.jumps = path, jumps

    def __call__(self):
        recorded = max(0, len(self.path.read_text().splitlines()) - 1) if self.path.exists() else 0
        return max((t for n, t in self.jumps.items() if recorded >= n), default=0.0)


@pytest.mark.parametrize('n_done', [0, 1, 2])
def test_a_part_ends_at_its_limit_and_keeps_what_it_has(run, tmp_path, n_done):
    """Whatever was running is stopped, the rest is not begun, what was done stays."""
    names = ['a', 'b', 'hang', 'c', 'd']
    names = names[2 - n_done:]
    found = run(names, limit=100, now=Clock(tmp_path / 'cells.jsonl', {n_done: 200.0}) if n_done else iter_clock([0, 0, 0, 200]))
    done = [name for name, record in found.items() if record['status'] == 'ok']
    assert len(done) >= n_done and len(found) == len(names)
    left = {name: record for name, record in found.items() if name not in done}
    assert all(record['status'] in ('stopped', 'not run') for record in left.values()) and 'c' in left
    assert all('time' in record['why'] for record in left.values())


@pytest.mark.parametrize('part, limit', [(part, limit) for part in CELLS for limit in (gpu_check.LIMIT, 100)
                                         if limit > 100 or len(CELLS[part]) > 1])
def test_parts_by_their_own_estimates(part, limit, worker, tmp_path, monkeypatch):
    """Workers that do nothing, a clock that goes by the estimates: within the limit of a call every cell is run; a part that is
    cut short says of each cell what became of it."""
    seconds = {cell.name: cell.seconds / stage.processes for stage in PARTS[part]() for cell in stage.cells}
    path = tmp_path / 'cells.jsonl'

    def now():
        done = [json.loads(line).get('cell') for line in path.read_text().splitlines()] if path.exists() else []
        return sum(seconds.get(name, 0.0) for name in done)
    check = gpu_check.Check(tmp_path, limit, 'cpu', now)
    monkeypatch.setattr(check, 'supervisor', lambda part, module, *args: Supervisor(
        part, worker, check.records, check.end, check.detail / 'log.txt', now))
    check.measure(part, PARTS[part]())
    assert check.close() == (limit == gpu_check.LIMIT)
    found = states({record['cell']: record for record in summary.read(path)[1]} if limit == gpu_check.LIMIT else
                   {record['cell']: record for record in check.records.added})
    assert set(found) == set(seconds)
    if limit < gpu_check.LIMIT:
        assert set(found.values()) & {'stopped', 'not run'} and {path.name for path in tmp_path.iterdir()} >= {'README.md'}


def iter_clock(values):
    """A clock that shows these in turn, and the last one from then on."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_many_workers_share_the_cells(run):
    found = run([f'slow{k}' for k in range(12)] + ['crash'], processes=4, batch=2)
    assert sorted(states(found).values()) == ['crashed'] + ['ok'] * 12
    assert len({record['worker'] for record in found.values() if 'worker' in record}) >= 6


def test_a_full_disk_loses_nothing_that_is_printed(run, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(supervise, 'open', lambda path, *args, **kwargs: full() if str(path).endswith('.jsonl')
                        else open(path, *args, **kwargs), raising=False)
    (tmp_path / 'cells.jsonl').write_text('')
    run(['a', 'crash', 'b'])
    printed = [json.loads(line.partition('): ')[2]) for line in capsys.readouterr().out.splitlines()
               if 'No space left on device): ' in line]
    assert [(record['cell'], record['status']) for record in printed if 'cell' in record] == [
        ('a', 'ok'), ('crash', 'crashed'), ('b', 'ok')]


def test_a_full_disk_does_not_end_the_check(tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, 'No space left on device')
    check = gpu_check.Check(tmp_path, 60, 'cpu')
    monkeypatch.setattr(gpu_check.tarfile, 'open', full)
    monkeypatch.setattr(gpu_check, 'write_page', full)
    check.records.add({'part': 'first', 'cell': 'a', 'status': 'ok'})
    assert check.close() is True
    out = capsys.readouterr().out
    assert f'details stay in {check.detail}: No space left on device' in out and 'first: 1 ok' in out
    assert check.detail.exists() and not list(tmp_path.glob('*.part'))


def test_ctrl_c_ends_the_workers_and_keeps_what_there_is(worker, tmp_path):
    program = f'''
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from scripts.gpu.cells import Cell
from scripts.gpu.supervise import Records, Supervisor
records = Records(Path({str(tmp_path / 'cells.jsonl')!r}), 'r', {{}})
Supervisor('part', {worker!r}, records, time.monotonic() + 60, Path({str(tmp_path / 'log.txt')!r})).run(
    [Cell(name, 20) for name in ('a', 'hang', 'b')])
'''
    process = subprocess.Popen([sys.executable, '-c', program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(300):
        if (tmp_path / 'log.txt').exists() and any(line.isdigit() for line in (tmp_path / 'log.txt').read_text().splitlines()):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    found = {record['cell']: record for record in summary.read(tmp_path / 'cells.jsonl')[1]}
    assert states(found) == {'a': 'ok', 'hang': 'crashed', 'b': 'not run'} and found['b']['why'] == 'interrupted'


# -- tests as cells ---------------------------------------------------------------------------------------------------

TESTS = {'tests/test_kernels.py': '''
import os, pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 + 1 == 3, 'wrong sum'
def test_skipped(): pytest.skip('needs more')
def test_dies(): os.abort()
@pytest.mark.parametrize('name', ['a b', 'c'])
def test_after(name): pass
@pytest.fixture
def broken(): raise RuntimeError('no fixture')
def test_broken(broken): pass
''', 'tests/programs/test_gpu.py': '''
import pytest
@pytest.mark.gpu
def test_program(): pass
def test_of_the_cpu(): pass
'''}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with tests in place of this one's."""
    for name, text in TESTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / 'pytest.ini').write_text('[pytest]\nmarkers = gpu: needs a CUDA device\naddopts = --import-mode=importlib\n')
    for module in (supervise, run_tests):
        monkeypatch.setattr(module, 'ROOT', tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    return tmp_path


def run_them(project, ids):
    records = Records(project / 'cells.jsonl', 'r', {})
    command = [sys.executable, '-m', 'scripts.gpu.run_tests', '--device=cpu']
    Supervisor('tests', command, records, time.monotonic() + 120, project / 'log.txt').run([Cell(name, 5) for name in ids], 2, 4)
    return {record['cell'].partition('::')[2]: record for record in records.added}


def test_tests_are_collected_with_programs_first_and_run(project):
    ids, words = run_tests.collect()
    assert words == '' and ids[0] == 'tests/programs/test_gpu.py::test_program' and len(ids) == 8
    found = run_them(project, ids)
    assert states(found) == {'test_program': 'ok', 'test_good': 'ok', 'test_bad': 'failed', 'test_skipped': 'skipped',
                             'test_dies': 'crashed', 'test_after[a b]': 'ok', 'test_after[c]': 'ok', 'test_broken': 'failed'}
    assert 'wrong sum' in found['test_bad']['why'] and 'no fixture' in found['test_broken']['why']


def test_after_a_failure_that_poisons_the_device_another_process_goes_on(project):
    (project / 'tests' / 'conftest.py').write_text(
        'import os, sys\nsys.modules["__main__"].context_is_poisoned = lambda: True\n'
        'def pytest_runtest_setup(item): open("processes.txt", "a").write(f"{os.getpid()} {item.name}\\n")\n')
    found = run_them(project, [f'tests/test_kernels.py::{name}' for name in ('test_good', 'test_bad', 'test_after[c]')])
    assert states(found) == {'test_good': 'ok', 'test_bad': 'failed', 'test_after[c]': 'ok'}
    process = {name: number for number, name in map(str.split, (project / 'processes.txt').read_text().splitlines())}
    assert process['test_good'] == process['test_bad'] != process['test_after[c]']


def test_a_package_that_is_missing_costs_the_tests_that_import_it(project, tmp_path, monkeypatch):
    (project / 'tests' / 'test_kernels.py').write_text('import nothing_of_that_name\n')
    ids, words = run_tests.collect()
    assert ids == ['tests/programs/test_gpu.py::test_program'] and 'nothing_of_that_name' in words
    check = gpu_check.Check(tmp_path, 120, 'cpu')
    check.tests('tests', lambda name: True)
    assert states({record['cell']: record for record in check.records.added}) == {'collection': 'skipped', ids[0]: 'ok'}
    (project / 'tests' / 'programs' / 'test_gpu.py').unlink()
    check.tests('tests', lambda name: True)
    assert check.records.added[-1]['cell'] == 'collection' and check.records.added[-1]['status'] == 'failed'


# -- what a cell measured ---------------------------------------------------------------------------------------------

needs_interpreter = pytest.mark.skipif(not INTERPRETING, reason='interpreted where there is no GPU')


@needs_interpreter
def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch):
    decode = pytest.importorskip('attention.kernels.decode')
    from attention.kernels import wanted
    from scripts.gpu.measure import Machine, run_cell
    right, machine, args = decode.stored_attention, Machine('cpu'), dict(layout='ring', kv_dtype='int8')
    with wanted(True):
        assert run_cell('attention/ring/int8', args, machine)['status'] == 'ok'
        for spoil, status in ((lambda y: y * 1.01, 'wrong'), (lambda y: y.index_fill(0, torch.tensor([3]), torch.nan), 'wrong'),
                              (lambda y: 1 / 0, 'failed')):
            monkeypatch.setattr(decode, 'stored_attention', lambda *args, spoil=spoil, **how: spoil(right(*args, **how)))
            assert run_cell('attention/ring/int8', args, machine)['status'] == status


def test_rows_are_judged_one_by_one():
    """The mean over many values is small: an error in it must not be measured by a row that has one value."""
    from scripts.gpu.measure import judged
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
@pytest.mark.parametrize('part, only', [('first', ''), ('tune', 'paged'), ('train', 'b16'), ('sizes', ''),
                                        ('programs', ''), ('train-more', 'recompute,sdpa')])
def test_a_rehearsal(part, only, tmp_path):
    pytest.importorskip('triton')
    done = subprocess.run(['bash', 'scripts/gpu_check.sh', f'--part={part}', '--rehearse=True', f'--only={only}',
                           f'--out={tmp_path}'], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {'PYTHON': sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary.read(tmp_path / 'cells.jsonl')[1]
    assert [record['cell'] for record in found if record['status'] != 'ok'] == []
    assert len(found) == len([cell for cell in CELLS[part] if any(text in cell.name for text in only.split(','))])
    assert {path.name for path in tmp_path.iterdir()} == {'cells.jsonl', 'README.md', 'detail.tar.gz'}
    assert len(done.stdout.rpartition('GPU check: ')[2].splitlines()) <= summary.LINES


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is one')
def test_without_a_gpu(tmp_path):
    done = subprocess.run([sys.executable, 'scripts/gpu_check.py', '--part=tests', f'--out={tmp_path}'], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and 'no CUDA device' in done.stderr


# -- tables -----------------------------------------------------------------------------------------------------------

def records_of_all_kinds():
    timed = {'part': 'first', 'cell': 'bench/decode/b1', 'status': 'ok', 'limit': 74e-6, 'share': 0.2, 'work': '249 MB read',
             'measured_seconds': 370e-6}
    wrong = {'part': 'first', 'cell': 'captured/int8', 'status': 'wrong', 'error': 0.3, 'allowed': 0.05,
             'why': 'error 3.00e-01, allowed 5.00e-02'}
    tests = [{'part': 'tests', 'cell': f'tests/a.py::test_{k}', 'status': 'failed', 'why': f'call: long\nE   assert {k}'}
             for k in range(60)] + [{'part': 'tests', 'cell': 'tests/a.py::test_good', 'status': 'ok'}]
    return [timed, wrong, *tests, {'part': 'first', 'cell': 'profile/decode', 'status': 'ok', 'table': 'kernel  us\n_split  9'}]


def test_the_summary_is_short_and_begins_with_what_is_wrong():
    lines = summary.short([{'device': 'a GPU', 'torch': '2.11'}], records_of_all_kinds()).splitlines()
    assert len(lines) <= 40 and lines[0] == 'GPU check: device a GPU, torch 2.11'
    assert lines[1:4] == ['first: 2 ok, 1 wrong', 'tests: 1 ok, 60 failed',
                          'WRONG captured/int8: error 3.00e-01, allowed 5.00e-02']
    assert 'decode/b1: 370.0 us, limit 74.0 us: 20% (expected 20%); 249 MB read' in lines
    assert lines[-1].endswith('more lines in README.md)')


def test_the_page_and_a_merge(tmp_path):
    later = [{'part': 'first', 'cell': 'captured/int8', 'status': 'ok'},
             {'part': 'first', 'cell': 'bench/decode/b1', 'status': 'not run', 'why': 'the time was up'}]
    for name, records in (('a', records_of_all_kinds()), ('b', later)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({'run': name, 'facts': {'device': f'GPU {name}'}})] + [json.dumps(record) for record in records]
        (tmp_path / name / 'cells.jsonl').write_text('\n'.join(lines) + '\n')
    (tmp_path / 'a' / 'cells.jsonl').open('a').write('{"part": "first", "cell": "cut sho')
    gpu_check.main(['--merge', str(tmp_path / 'b' / 'cells.jsonl'), f"--out={tmp_path / 'a'}"])
    page = (tmp_path / 'a' / 'README.md').read_text()
    assert '- device GPU a' in page and '- device GPU b' in page
    assert '| captured/int8 | ok |' in page and '| captured/int8 | wrong |' not in page  # the newest counts
    assert '370.0 us, limit 74.0 us: 20%' in page and '_split  9' in page and 'tests/a.py::test_good' not in page
