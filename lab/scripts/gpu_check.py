"""Check and measure everything that needs a GPU; see lab/scripts/gpu_check.sh and docs/gpu.md."""
import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError  # noqa: E402
from configurator import run_program  # noqa: E402
from lab.scripts.gpu import run_tests, summary  # noqa: E402
from lab.scripts.gpu.cells import PARTS, Cell, Stage  # noqa: E402
from lab.scripts.gpu.supervise import Records, Supervisor  # noqa: E402

LIMIT = 540   # seconds per call
RESERVE = 15  # of these, for the summary
TEST_PROCESSES = 8
# then a new process starts: imports take seconds, and a process that dies takes few tests with it
TESTS_A_PROCESS = 8


def facts() -> dict:
    """Facts about a run that are needed to interpret its results."""
    import torch
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {'device': torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            'torch': torch.__version__, 'triton': triton_version,
            'CUDA': torch.version.cuda, 'Python': platform.python_version(),
            'cores': os.cpu_count(), 'commit': commit(),
            'date': f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}'}


def commit() -> str:
    """The output of git describe; in a copy without git, a hash of all Python files."""
    with contextlib.suppress(OSError):
        done = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT,
                              capture_output=True, text=True)
        if done.stdout:
            return done.stdout.strip()
    found = hashlib.sha256()
    for path in sorted(ROOT.rglob('*.py')):
        if not any(part.startswith('.') for part in path.relative_to(ROOT).parts):
            found.update(path.read_bytes())
    return f'sources {found.hexdigest()[:10]}'


class Check:
    """One call. Results go to the folder `out`, details to a temporary folder that is packed into
    one archive in `out`."""

    def __init__(self, out: Path, limit: float, device: str, now=time.monotonic):
        self.out, self.device, self.now = out, device, now
        self.end, self.kept = now() + limit - RESERVE, True
        self.detail = Path(tempfile.mkdtemp(prefix='gpu-check-'))
        self.records = Records(out / 'cells.jsonl', f'{os.getpid()}-{time.time():.0f}', facts())

    def supervisor(self, part: str, module: str, *args: str) -> Supervisor:
        os.environ['GPU_CHECK_DETAIL'] = str(self.detail)
        command = [sys.executable, '-m', module, f'--device={self.device}', *args]
        return Supervisor(part, command, self.records, self.end, self.detail / 'log.txt', self.now)

    def measure(self, part: str, stages: list[Stage]) -> None:
        arguments = self.detail / 'arguments.json'
        for stage in stages:
            arguments.write_text(json.dumps({cell.name: cell.args for cell in stage.cells}))
            workers = self.supervisor(part, 'lab.scripts.gpu.measure', f'--cells={arguments}')
            workers.run(stage.cells, stage.processes, batch=int(stage.alone))
            self.keep()

    def tests(self, part: str, only) -> None:
        names, words = run_tests.collect()
        if words:
            status = 'skipped' if names else 'failed'
            self.records.add({'part': part, 'cell': 'collection', 'status': status, 'why': words})
        cells = [Cell(name, 30 if name.startswith(run_tests.FIRST) else 5)
                 for name in names if only(name)]
        workers = self.supervisor(part, 'lab.scripts.gpu.run_tests')
        workers.run(cells, TEST_PROCESSES, TESTS_A_PROCESS)

    def keep(self) -> None:
        """Write the table and the archive of details, as far as disk space allows."""
        with contextlib.suppress(OSError):
            write_page(self.out)
        part = self.out / 'detail.tar.part'
        try:
            with tarfile.open(part, 'w:gz') as tar:
                tar.add(self.detail, arcname='detail')
            part.replace(self.out / 'detail.tar.gz')
        except OSError as e:
            part.unlink(missing_ok=True)
            self.kept = False
            print(f'details stay in {self.detail}: {e.strerror}', flush=True)

    def close(self) -> bool:
        """Print the summary. Returns whether there are results and all of them are good."""
        self.keep()
        print('\n' + summary.short([facts()], self.records.added), flush=True)
        if self.kept:
            shutil.rmtree(self.detail, ignore_errors=True)
        states = {record['status'] for record in self.records.added}
        return bool(states) and states <= set(summary.GOOD)


def write_page(out: Path) -> None:
    page = summary.page(*summary.read(out / 'cells.jsonl'))
    (out / 'README.md').write_text(page + '\n', encoding='utf-8')


def merge(files: list[Path], out: Path) -> None:
    """Append results from other folders, oldest first, to those in `out`."""
    with open(out / 'cells.jsonl', 'a', encoding='utf-8') as target:
        for file in files:  # the newline comes first because the last line may be cut short
            target.write('\n' + file.read_text(encoding='utf-8').strip() + '\n')
    write_page(out)


def dry_run(parts) -> None:
    """Print every cell with its estimate, the time at an H100's limits and the expected time."""
    for part in parts:
        if PARTS[part] is None:
            print(f'{part}: the tests marked gpu, {TEST_PROCESSES} processes, programs first; '
                  'each a cell')
            continue
        stages = PARTS[part]()
        print(f'{part}: about {sum(stage.seconds for stage in stages):.0f} s')
        for stage in stages:
            print(f'  {stage.processes} at a time' if stage.processes > 1 else
                  '  one after another')
            for cell in stage.cells:
                line = f'    {cell.seconds:5.0f} s  {cell.name}'
                if cell.limit:
                    line += (f'  [{cell.work}: {summary.time_of(cell.limit)} at the limit, '
                             f'{cell.share:.0%} expected, '
                             f'{summary.time_of(cell.limit / cell.share)}]')
                print(line)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog='lab/scripts/gpu_check.sh', description=__doc__)
    switch = dict(nargs='?', const='True', default='False', choices=('True', 'False'))
    parser.add_argument('--part', choices=PARTS, help='what to check')
    parser.add_argument('--out', type=Path, default=ROOT / 'results' / 'gpu',
                        help='folder for results (default: results/gpu)')
    parser.add_argument('--limit', type=float, default=LIMIT,
                        help='seconds that this call may take (default: %(default)s)')
    parser.add_argument('--only', default='', metavar='TEXT',
                        help='run only cells with this text in their name; commas separate texts')
    parser.add_argument('--dry_run', **switch, help='list cells, estimates and predictions')
    parser.add_argument('--rehearse', **switch,
                        help='run the cells on the CPU with tiny sizes, to test the check itself')
    parser.add_argument('--merge', type=Path, nargs='+', metavar='FILE',
                        help='add the cells.jsonl of other folders to OUT')
    s = parser.parse_args(argv)
    if s.dry_run == 'True':
        return dry_run([s.part] if s.part else PARTS)
    s.out.mkdir(parents=True, exist_ok=True)
    if s.merge:
        return merge(s.merge, s.out)
    if s.part is None:
        parser.error(f"--part is needed: one of {', '.join(PARTS)} (--dry_run lists their cells)")
    rehearse = s.rehearse == 'True'
    if rehearse:
        os.environ['TRITON_INTERPRET'] = '1'
    elif facts()['device'] is None:
        raise UserError('no CUDA device found (--rehearse=True runs the cells without one)')
    check = Check(s.out.resolve(), s.limit, 'cpu' if rehearse else 'cuda')

    def only(name):
        return any(text in name for text in s.only.split(','))
    try:
        if PARTS[s.part] is None:
            check.tests(s.part, only)
        else:
            stages = [replace(stage, cells=tuple(cell for cell in stage.cells if only(cell.name)))
                      for stage in PARTS[s.part]()]
            check.measure(s.part, [stage for stage in stages if stage.cells])
    finally:
        good = check.close()
    raise SystemExit(0 if good else 1)


if __name__ == '__main__':
    run_program(main)
