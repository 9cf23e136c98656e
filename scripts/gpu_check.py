"""Check and measure on a GPU all that needs one: see scripts/gpu_check.sh and docs/gpu.md."""
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from configurator import run_program  # noqa: E402
from scripts.gpu import run_tests, summary  # noqa: E402
from scripts.gpu.cells import PARTS, Cell, Stage  # noqa: E402
from scripts.gpu.supervise import Records, Supervisor  # noqa: E402

LIMIT = 540          # seconds of a call
RESERVE = 15         # of these, for the summary
TEST_PROCESSES = 8
TESTS_A_PROCESS = 8  # then another begins: importing everything takes seconds, and one that dies takes few along
TEST_SECONDS = {'tests/programs/': 30, '': 5}


def facts() -> dict:
    """What every result needs beside it."""
    import torch
    try:
        import triton
        found = triton.__version__
    except ImportError:
        found = None
    gpu = torch.cuda.is_available()
    return {'device': torch.cuda.get_device_name() if gpu else None, 'torch': torch.__version__, 'triton': found,
            'CUDA': torch.version.cuda, 'Python': platform.python_version(), 'cores': os.cpu_count(), 'commit': commit(),
            'date': datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M')}


def commit() -> str:
    """Of git; where the checkout came without it, a hash of its Python files."""
    with contextlib.suppress(OSError):
        told = subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT, capture_output=True, text=True).stdout
        if told.strip():
            return told.strip()
    found = hashlib.sha256()
    for path in sorted(ROOT.rglob('*.py')):
        if not any(part.startswith('.') for part in path.relative_to(ROOT).parts):
            found.update(path.read_bytes())
    return f'sources {found.hexdigest()[:10]}'


class Check:
    """One call: the folder that results go to, and the one beside it for details, which become one archive."""

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
        for stage in stages:
            arguments = self.detail / 'arguments.json'
            arguments.write_text(json.dumps({cell.name: cell.args for cell in stage.cells}), encoding='utf-8')
            workers = self.supervisor(part, 'scripts.gpu.measure', f'--cells={arguments}')
            workers.run(stage.cells, stage.processes, batch=int(stage.alone))
            self.keep()

    def tests(self, part: str, only) -> None:
        names, words = run_tests.collect()
        if words:
            self.records.add({'part': part, 'cell': 'collection', 'status': 'failed' if not names else 'skipped', 'why': words})
        names = [name for name in names if only(name)]
        cells = [Cell(name, next(s for start, s in TEST_SECONDS.items() if name.startswith(start))) for name in names]
        self.supervisor(part, 'scripts.gpu.run_tests').run(cells, TEST_PROCESSES, TESTS_A_PROCESS)
        self.keep()

    def keep(self) -> None:
        """The table and the archive of details, as far as there is room for them."""
        with contextlib.suppress(OSError):
            write_page(self.out)
        archive = self.out / 'detail.tar.gz'
        part = archive.with_suffix('.part')
        try:
            with tarfile.open(part, 'w:gz') as tar:
                tar.add(self.detail, arcname='detail')
            part.replace(archive)
        except OSError as e:
            part.unlink(missing_ok=True)
            self.kept = False
            print(f'details stay in {self.detail}: {e.strerror}', flush=True)

    def close(self) -> bool:
        """Prints the summary; whether all is well."""
        self.keep()
        print()
        print(summary.short([facts()], self.records.added), flush=True)
        if self.kept:
            shutil.rmtree(self.detail, ignore_errors=True)
        return bool(self.records.added) and all(record['status'] in summary.GOOD for record in self.records.added)


def write_page(out: Path) -> None:
    (out / 'README.md').write_text(summary.page(*summary.read(out / 'cells.jsonl')) + '\n', encoding='utf-8')


def merge(files: list[Path], out: Path) -> None:
    """Results of other folders, oldest first, behind those of this one."""
    lines = [line for file in files for line in file.read_text(encoding='utf-8').splitlines() if line.strip()]
    with open(out / 'cells.jsonl', 'a', encoding='utf-8') as target:
        target.writelines('\n' + line for line in lines)  # also behind a line that was cut short
        target.write('\n')
    write_page(out)


def dry_run(parts) -> None:
    """Every cell, its estimate, and what an H100's limits allow beside what we expect."""
    for part in parts:
        if PARTS[part] is None:
            print(f'{part}: the tests marked gpu, {TEST_PROCESSES} processes, programs first; each a cell')
            continue
        stages = PARTS[part]()
        print(f'{part}: about {sum(stage.seconds for stage in stages):.0f} s')
        for stage in stages:
            print(f"  {stage.processes} at a time" if stage.processes > 1 else '  one after another')
            for cell in stage.cells:
                line = f'    {cell.seconds:5.0f} s  {cell.name}'
                if cell.limit:
                    line += (f'  [{cell.work}: {summary.time_of(cell.limit)} at the limit, {cell.share:.0%} expected, '
                             f'{summary.time_of(cell.limit / cell.share)}]')
                print(line)


def arguments(argv):
    parser = argparse.ArgumentParser(prog='scripts/gpu_check.sh', description=__doc__)
    parser.add_argument('--part', choices=PARTS, help='what to check')
    parser.add_argument('--out', type=Path, default=ROOT / 'results' / 'gpu', help='folder for results (results/gpu)')
    parser.add_argument('--limit', type=float, default=LIMIT, help='seconds of this call (%(default)s)')
    parser.add_argument('--only', default='', metavar='TEXT', help='only cells with this text in their name; several with commas between')
    parser.add_argument('--dry_run', nargs='?', const='True', default='False', choices=('True', 'False'),
                        help='list cells, estimates and predictions')
    parser.add_argument('--rehearse', nargs='?', const='True', default='False', choices=('True', 'False'),
                        help='run the cells on the CPU, tiny: to try the check itself')
    parser.add_argument('--merge', type=Path, nargs='+', metavar='FILE', help='add cells.jsonl of other folders to OUT')
    return parser, parser.parse_args(argv)


def main(argv=None) -> None:
    parser, s = arguments(argv)
    if s.dry_run == 'True':
        return dry_run([s.part] if s.part else PARTS)
    s.out.mkdir(parents=True, exist_ok=True)
    if s.merge:
        return merge(s.merge, s.out)
    if s.part is None:
        parser.error(f"--part is needed: one of {', '.join(PARTS)} (--dry_run lists what is in them)")
    rehearse = s.rehearse == 'True'
    if not rehearse and facts()['device'] is None:
        print('error: there is no CUDA device here (--rehearse=True tries the check out without one)', file=sys.stderr)
        raise SystemExit(2)
    if rehearse:
        os.environ['TRITON_INTERPRET'] = '1'
    check = Check(s.out.resolve(), s.limit, 'cpu' if rehearse else 'cuda')

    def only(name):
        return any(text in name for text in s.only.split(','))
    try:
        if PARTS[s.part] is None:
            check.tests(s.part, only)
        else:
            stages = [Stage(tuple(cell for cell in stage.cells if only(cell.name)), stage.processes, stage.alone)
                      for stage in PARTS[s.part]()]
            check.measure(s.part, [stage for stage in stages if stage.cells])
    finally:
        good = check.close()
    raise SystemExit(0 if good else 1)


if __name__ == '__main__':
    run_program(main)
