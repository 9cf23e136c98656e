"""Run cells in worker processes, within a time limit. A cell that crashes, hangs or corrupts the
CUDA context does not affect other cells, and every result is written as soon as it arrives.

A worker is a program that gets names of cells as its last arguments and writes lines of JSON to the
file descriptor --fd: {"begin": name} when it starts a cell, {"cell": name, "status": ..., ...} when
the cell is done. It may end after any cell; the remaining cells go to another worker.
"""
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GRACE = 5     # seconds between asking a worker to end and killing it
PATIENCE = 4  # a cell may take this many times its estimate, and at least LEAST seconds
LEAST = 120   # includes imports, which are slow when all processes start at once


class Records:
    """Appends one line per result to OUT/cells.jsonl, flushed at once. If that fails (a full disk),
    the line goes to standard output, so that it is not lost."""

    def __init__(self, path: Path, run: str, facts: dict):
        self.path, self.run, self.added, self._lock = path, run, [], threading.Lock()
        self._append({'run': run, 'facts': facts})

    def add(self, record: dict) -> None:
        with self._lock:
            self.added.append(record)
            self._append({'run': self.run} | record)
            line = f"{record['status']:8} {record['cell']}"
            if 'seconds' in record:
                line += f" ({record['seconds']:.0f} s)"
            if record.get('why'):
                line += f": {record['why'].splitlines()[-1][:150]}"
            print(line, flush=True)

    def _append(self, record):
        line = json.dumps(record)
        try:
            with open(self.path, 'a', encoding='utf-8') as file:
                file.write(line + '\n')
        except OSError as e:
            print(f'cannot be written to {self.path} ({e.strerror}): {line}', flush=True)


class Supervisor:
    """Runs cells (`lab.scripts.gpu.cells.Cell`) of one part in workers until the time is up.

    command: starts a worker; `--fd=N` and the names of cells are appended.
    end: time on the clock `now` after which nothing may run.
    log: file to which workers' output is appended.
    """

    def __init__(self, part: str, command: list[str], records: Records, end: float, log: Path,
                 now=time.monotonic):
        self.part, self.command, self.records = part, command, records
        self.end, self.log, self.now = end, log, now
        self._processes, self._stopping = set(), False

    def run(self, cells, processes: int = 1, batch: int = 0) -> None:
        """Run all cells in this order, `processes` workers at a time. Each worker gets `batch`
        cells (0 = an equal share of all)."""
        shares = [cells[i:i + batch] for i in range(0, len(cells), batch)] if batch else [
            cells[i::processes] for i in range(min(processes, len(cells)))]
        # A pool, because Thread.join does not survive Ctrl-C before Python 3.13: it then treats
        # the thread as finished, and the last results would be lost.
        with ThreadPoolExecutor(processes) as pool:
            drained = [pool.submit(self._drain, share) for share in shares]
            try:
                wait(drained)
            finally:  # Ctrl-C: the workers are stopped, which their threads notice
                self._stopping = True
                for process in list(self._processes):
                    end_group(process)
        for future in drained:
            future.result()

    def _drain(self, cells):
        while cells:
            cells = self._worker(cells)

    def _worker(self, cells) -> list:
        """Run one worker. Returns the cells that it did not reach; at least one cell is always
        recorded."""
        if self._stopping or self.now() >= self.end:
            why = 'interrupted' if self._stopping else 'the time was up'
            for cell in cells:
                self._record(cell, 'not run', why=why)
            return []
        read, write = os.pipe()
        command = [*self.command, f'--fd={write}', *(cell.name for cell in cells)]
        try:
            with open(self.log, 'ab') as log:
                process = subprocess.Popen(
                    command, cwd=ROOT, pass_fds=[write], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        except OSError as e:
            os.close(read)
            self._record(cells[0], 'failed', why=f'could not start a worker: {e}')
            return cells[1:]
        finally:
            os.close(write)
        self._processes.add(process)
        try:
            left = self._follow(process, read, cells)
            if not left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            return left
        finally:
            end_group(process)
            self._processes.discard(process)
            os.close(read)

    def _follow(self, process, read, cells):
        """Record what the worker reports, until it is done or is stopped. Returns the cells that
        are left."""
        left = {cell.name: cell for cell in cells}
        current, since, text = None, self.now(), b''
        while left:
            limit = max(LEAST, PATIENCE * (current or cells[0]).seconds)
            if self.now() >= min(self.end, since + limit):
                end_group(process)
                cell = left.pop((current or next(iter(left.values()))).name)
                over = self.now() >= self.end
                why = 'the time of the part was up' if over else f'it had {limit:.0f} s'
                self._record(cell, 'stopped', seconds=self.now() - since, why=why)
                break
            if not select.select([read], [], [], 0.05)[0]:
                continue
            piece = os.read(read, 2 ** 16)
            if not piece:  # it has ended
                process.wait()
                if current or len(left) == len(cells):  # within a cell, or before its first
                    cell = left.pop((current or cells[0]).name)
                    seconds, why = self.now() - since, how_it_ended(process, self.log)
                    self._record(cell, 'crashed', seconds=seconds, why=why)
                break
            *lines, text = (text + piece).split(b'\n')
            for line in filter(None, lines):
                # JSON has no NaN or infinities: use their names
                message = json.loads(line, parse_constant=lambda x: str(float(x)))
                if 'begin' in message:
                    current, since = left.get(message['begin']), self.now()
                elif message.get('cell') in left:
                    cell, current = left.pop(message.pop('cell')), None
                    self._record(cell, **{'seconds': self.now() - since} | message)
                    since = self.now()
        return list(left.values())

    def _record(self, cell, status, **more):
        record = {'part': self.part, 'cell': cell.name, 'status': status, 'estimate': cell.seconds}
        if cell.limit:
            record |= {'limit': cell.limit, 'share': cell.share, 'work': cell.work}
        self.records.add(record | more)


def end_group(process) -> None:
    """End the worker and every process it started: interrupt them, then kill them."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            pass
    process.wait()


def how_it_ended(process, log: Path) -> str:
    """The last lines of the log and the exit status or signal."""
    code = process.returncode
    how = f'signal {-code} ({signal.Signals(-code).name})' if code < 0 else f'exit status {code}'
    tail = log.read_bytes()[-1500:].decode('utf-8', 'replace').strip().splitlines()[-6:]
    return '\n'.join([*tail, f'the worker ended with {how}'])


def end_if_poisoned() -> None:
    """For workers: end the process if CUDA in it rejects all work, as happens after an illegal
    memory access. The remaining cells go to a new process."""
    import torch
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        sys.stdout.flush()
        os._exit(3)


def worker_cells():
    """For workers: (options {'fd': N, ...}, names, emit) from the command line. emit(**message)
    writes a message to the supervisor."""
    options = dict(arg[2:].split('=', 1) for arg in sys.argv[1:] if arg.startswith('--'))
    stream = os.fdopen(int(options['fd']), 'w', buffering=1)

    def emit(**message):
        stream.write(json.dumps(message) + '\n')
    return options, [arg for arg in sys.argv[1:] if not arg.startswith('--')], emit
