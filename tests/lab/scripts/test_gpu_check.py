"""The GPU check, as far as it can be tested without a GPU: the list of its cells, and that no
result is lost, whatever happens."""
import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import configurator
from lab.scripts import gpu_check
from lab.scripts.gpu import run_tests, summary, supervise
from lab.scripts.gpu.cells import PARTS, Cell
from lab.scripts.gpu.supervise import ROOT, Records, Supervisor

CELLS = {part: [cell for stage in stages() for cell in stage.cells]
         for part, stages in PARTS.items() if stages}
ALL = [cell for cells in CELLS.values() for cell in cells]


# -- what it would run -----------------------------------------------------------------------------


@pytest.mark.parametrize('part', CELLS)
def test_a_part_fits_into_a_call_and_its_cells_are_sound(part, monkeypatch):
    limits = {'smoke': 120, 'first': 360}
    limit = limits.get(part, gpu_check.LIMIT - gpu_check.RESERVE)
    assert sum(stage.seconds for stage in PARTS[part]()) <= limit
    cells = CELLS[part]
    assert len({cell.name for cell in cells}) == len(cells)
    monkeypatch.chdir(ROOT)
    for cell in cells:
        assert (cell.limit > 0) == (0 < cell.share < 1) == bool(cell.work), cell.name
        if cell.name.startswith('bench/'):
            configurator.parse('bench', [*cell.args['args'], '--device=cuda'], echo=False)


def test_limits_are_those_of_the_hardware():
    """GPT-2 124M's weights in bfloat16 plus a few hundred keys per layer; 64 rows of 8,192 tokens
    in int8; 0.775 GFLOP per training token."""
    cells = {cell.name: cell for cell in CELLS['first']}
    assert cells['bench/decode/b1-1k'].limit == pytest.approx(249e6 / 3.35e12, rel=0.01)
    assert cells['bench/decode/b64-8k-int8'].limit == pytest.approx(122e-6, rel=0.01)
    flops = 0.775e9 * 32 * 1024
    assert cells['bench/train/full-b32'].limit == pytest.approx(flops / 989e12, rel=0.01)


def test_dry_run_lists_every_cell(capsys):
    gpu_check.main(['--dry_run=True'])
    out = capsys.readouterr().out
    assert all(f'  {cell.name}  ' in out.replace('\n', '  ') for cell in ALL)
    gpu_check.main(['--dry_run', '--part=tune'])
    assert 'first' not in capsys.readouterr().out


# -- whatever happens to a worker ------------------------------------------------------------------

WORKER = '''
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from lab.scripts.gpu.supervise import worker_cells
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
    """run(names) -> {name: record}, read from cells.jsonl."""
    def run(names, processes=1, batch=0, limit=60.0, now=time.monotonic, seconds=0.1):
        records = Records(tmp_path / 'cells.jsonl', 'r', {'device': 'none'})
        supervisor = Supervisor('part', worker, records, now() + limit, tmp_path / 'log.txt', now)
        supervisor.run([Cell(name, seconds) for name in names], processes, batch)
        return by_name(tmp_path)
    return run


def by_name(folder):
    """{name: record}, read from the folder's cells.jsonl."""
    return {record['cell']: record for record in summary.read(folder / 'cells.jsonl')[1]}


def states(found):
    return {name: record['status'] for name, record in found.items()}


def test_a_crash_costs_one_cell(run):
    found = run(['a', 'crash', 'b', 'killed', 'c', 'early', 'd'])
    assert states(found) == {'a': 'ok', 'crash': 'crashed', 'b': 'ok', 'killed': 'crashed',
                             'c': 'ok', 'early': 'crashed', 'd': 'ok'}
    assert 'SIGABRT' in found['crash']['why'] and 'SIGKILL' in found['killed']['why']
    why = found['early']['why']
    assert 'no such module' in why and 'exit status 1' in why


def test_a_poisoned_worker_hands_the_others_on(run):
    found = run(['a', 'poison', 'b', 'c'])
    assert set(states(found).values()) == {'ok'}
    workers = {name: record['worker'] for name, record in found.items()}
    assert workers['a'] == workers['poison'] != workers['b'] == workers['c']


def test_a_cell_that_hangs_is_ended_with_all_that_it_started(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, 'LEAST', 5.0)
    found = run(['a', 'hang', 'b'])
    assert states(found) == {'a': 'ok', 'hang': 'stopped', 'b': 'ok'}
    assert found['hang']['why'] == 'it had 5 s'
    log = (tmp_path / 'log.txt').read_text().splitlines()
    child = Path('/proc') / next(line for line in log if line.isdigit())
    for _ in range(50):
        if not child.exists() or 'zombie' in (child / 'status').read_text():
            return
        time.sleep(0.1)
    raise AssertionError('its child still runs')


class Clock:
    """A clock that stands still until `n` cells have been recorded, then jumps by 200 seconds."""

    def __init__(self, path: Path, n: int):
        self.path, self.n = path, n

    def __call__(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return 200.0 if len(lines) - 1 >= self.n else 0.0  # the first line describes the machine


@pytest.mark.parametrize('n_done', [1, 2])
def test_a_part_ends_at_its_limit_and_keeps_what_it_has(run, tmp_path, n_done):
    """The running cell is stopped, the rest is not started, and finished cells are kept."""
    names = ['a', 'b', 'hang', 'c', 'd']
    names = names[2 - n_done:]
    found = run(names, limit=100, now=Clock(tmp_path / 'cells.jsonl', n_done))
    done = [name for name, record in found.items() if record['status'] == 'ok']
    assert len(done) >= n_done and len(found) == len(names)
    left = {name: record for name, record in found.items() if name not in done}
    assert 'c' in left
    assert all(record['status'] in ('stopped', 'not run') for record in left.values())
    assert all('time' in record['why'] for record in left.values())


@pytest.mark.parametrize('part, limit', [*((part, gpu_check.LIMIT) for part in CELLS),
                                         ('first', 100)])
def test_parts_by_their_own_estimates(part, limit, worker, tmp_path, monkeypatch):
    """With workers that do nothing and a clock that advances by the estimates, every cell is run
    within the limit of a call; a part that is cut short has a record of every cell."""
    seconds = {cell.name: cell.seconds / stage.processes for stage in PARTS[part]()
               for cell in stage.cells}
    path = tmp_path / 'cells.jsonl'

    def now():
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(seconds.get(json.loads(line).get('cell'), 0.0) for line in lines)

    def supervisor(part, module, *args):
        log = check.detail / 'log.txt'
        return Supervisor(part, worker, check.records, check.end, log, now)
    check = gpu_check.Check(tmp_path, limit, 'cpu', now)
    monkeypatch.setattr(check, 'supervisor', supervisor)
    check.measure(part, PARTS[part]())
    whole = limit == gpu_check.LIMIT
    assert check.close() == whole
    added = {record['cell']: record for record in check.records.added}
    found = states(by_name(tmp_path) if whole else added)
    assert set(found) == set(seconds)
    if not whole:
        assert set(found.values()) & {'stopped', 'not run'}
        assert (tmp_path / 'README.md').exists()


def full(*args, **kwargs):
    """Fail like any write to a full disk."""
    raise OSError(errno.ENOSPC, 'No space left on device')


def test_a_full_disk_loses_nothing_that_is_printed(run, tmp_path, capsys, monkeypatch):
    def partly_full(path, *args, **kwargs):
        return full() if str(path).endswith('.jsonl') else open(path, *args, **kwargs)
    monkeypatch.setattr(supervise, 'open', partly_full, raising=False)
    (tmp_path / 'cells.jsonl').write_text('')
    run(['a', 'crash', 'b'])
    lines = capsys.readouterr().out.splitlines()
    printed = [json.loads(line.partition('): ')[2]) for line in lines
               if 'No space left on device): ' in line]
    found = {record['cell']: record for record in printed if 'cell' in record}
    assert states(found) == {'a': 'ok', 'crash': 'crashed', 'b': 'ok'}


def test_a_full_disk_does_not_end_the_check(tmp_path, monkeypatch, capsys):
    check = gpu_check.Check(tmp_path, 60, 'cpu')
    monkeypatch.setattr(gpu_check.tarfile, 'open', full)
    monkeypatch.setattr(gpu_check, 'write_page', full)
    check.records.add({'part': 'first', 'cell': 'a', 'status': 'ok'})
    assert check.close() is True
    out = capsys.readouterr().out
    assert f'details stay in {check.detail}: No space left on device' in out
    assert 'first: 1 ok' in out
    assert check.detail.exists() and not list(tmp_path.glob('*.part'))


def test_ctrl_c_ends_the_workers_and_keeps_what_there_is(run, tmp_path):
    log, before = tmp_path / 'log.txt', signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while not (log.exists() and any(x.isdigit() for x in log.read_text().splitlines())):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(['a', 'hang', 'b'], seconds=20)
    finally:
        signal.signal(signal.SIGINT, before)
    found = by_name(tmp_path)
    assert states(found) == {'a': 'ok', 'hang': 'crashed', 'b': 'not run'}
    assert found['b']['why'] == 'interrupted'


# -- tests as cells --------------------------------------------------------------------------------

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
    """A folder with tests, used in place of this repository."""
    for name, text in TESTS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / 'pytest.ini').write_text('[pytest]\nmarkers = gpu: needs a CUDA device\n'
                                         'addopts = --import-mode=importlib\n')
    for module in (supervise, run_tests):
        monkeypatch.setattr(module, 'ROOT', tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(ROOT))
    return tmp_path


def run_them(project, ids):
    records = Records(project / 'cells.jsonl', 'r', {})
    command = [sys.executable, '-m', 'lab.scripts.gpu.run_tests', '--device=cpu']
    supervisor = Supervisor('tests', command, records, time.monotonic() + 120, project / 'log.txt')
    supervisor.run([Cell(name, 5) for name in ids], 2, 4)
    return {record['cell'].partition('::')[2]: record for record in records.added}


def test_tests_are_collected_with_programs_first_and_run(project):
    ids, words = run_tests.collect()
    assert words == '' and len(ids) == 8
    assert ids[0] == 'tests/programs/test_gpu.py::test_program'
    found = run_them(project, ids)
    assert states(found) == {'test_program': 'ok', 'test_good': 'ok', 'test_bad': 'failed',
                             'test_skipped': 'skipped', 'test_dies': 'crashed',
                             'test_after[a b]': 'ok', 'test_after[c]': 'ok',
                             'test_broken': 'failed'}
    assert 'wrong sum' in found['test_bad']['why']
    assert 'no fixture' in found['test_broken']['why']


def test_a_package_that_is_missing_costs_the_tests_that_import_it(project, tmp_path):
    (project / 'tests' / 'test_kernels.py').write_text('import nothing_of_that_name\n')
    check = gpu_check.Check(tmp_path, 120, 'cpu')
    check.tests('tests', lambda name: True)
    found = {record['cell']: record for record in check.records.added}
    assert states(found) == {'collection': 'skipped',
                             'tests/programs/test_gpu.py::test_program': 'ok'}
    assert 'nothing_of_that_name' in found['collection']['why']
    (project / 'tests' / 'programs' / 'test_gpu.py').unlink()
    check.tests('tests', lambda name: True)
    last = check.records.added[-1]
    assert last['cell'] == 'collection' and last['status'] == 'failed'
