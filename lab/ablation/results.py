"""The files of a ladder. Each row and seed is a line of runs.jsonl, so that a ladder can be
measured on several machines."""
import json
from collections import Counter
from pathlib import Path

from common.errors import UserError
from common.files import regular_only, write_whole
from lab.ablation.ladder import digest, slug_of
from training.checkpoint.file import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results'
CORE = ['model.py', 'generate.py', *(f'kv/{name}.py' for name in (
    '__init__', 'plan', 'slots', 'cache', 'quantize', 'report'))]
CORE += sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'attention').glob('*.py'))


def core_digest() -> str:
    """Return a digest of the sources of the core (docs/architecture.md)."""
    return digest([(ROOT / path).read_text(encoding='utf-8') for path in CORE])


def as_line(document: dict) -> str:
    return json.dumps(document, separators=(',', ':')) + '\n'


class Results:
    """A ladder's folder: runs.jsonl, the report made from it, and runs/ with the checkpoints.

    runs.jsonl has a line for each row and seed; the last line of a row and seed counts. The
    settings of a run are stored as their difference from the nearest line {"base": settings} above
    it. So files measured on two machines are joined with `cat`.
    """

    def __init__(self, ladder):
        self.ladder = ladder
        self.folder = Path(ladder.s.folder) if ladder.s.folder else RESULTS / ladder.s.name
        self.path = self.folder / 'runs.jsonl'
        self._read = None, {}  # status of the file when it was read, and its runs

    def out_dir(self, row, seed: int) -> Path:
        """Return train.py's out_dir for a row; different settings get a different folder."""
        return self.folder / 'runs' / f'{row.slug}-seed{seed}-{self.ladder.training(row)}'

    def trained(self, row, seed: int) -> tuple[dict, Path]:
        """The checkpoint of a row's training, and its file. UserError: if it is not finished."""
        path, wanted = self.out_dir(row, seed) / 'ckpt.pt', self.ladder.settings(row).max_iters
        saved = load_checkpoint(path)
        if saved['iter_num'] != wanted:
            raise UserError(f"{path} is at iteration {saved['iter_num']} of {wanted}: train row "
                            f'{row.name!r} to its end first (with ablate.py; delete its line in '
                            f'{self.path.name} if it was trained elsewhere)')
        return saved, path

    def runs(self) -> dict[tuple[str, int], dict]:
        """Return (slug of the row, seed) -> run, with whole settings, of any settings."""
        if not self.path.exists():
            return {}
        found = self.path.stat()
        status = found.st_size, found.st_mtime_ns
        if self._read[0] != status:
            base, runs = {}, {}
            for number, text in enumerate(self.path.read_bytes().splitlines(), 1):
                try:
                    line = json.loads(text)
                except ValueError as e:
                    raise UserError(f'{self.path}, line {number} cannot be read: {e}; delete it '
                                    'to measure again') from e
                base = line.get('base', base)
                if 'row' in line:
                    line['settings'] = base | line['settings']
                    runs[slug_of(line['row']), line['seed']] = line
            self._read = status, runs
        return self._read[1]

    def seeds(self, row) -> list[int]:
        """The requested seeds, and those measured earlier."""
        measured = (seed for slug, seed in self.runs() if slug == row.slug)
        return sorted({*self.ladder.seeds(row), *measured})

    def read(self, row, seed: int) -> dict | None:
        """Return the result of a run; None if there is none with the row's current settings."""
        run = self.runs().get((row.slug, seed))
        if run is None or run['fingerprint'] != self.ladder.fingerprint(row):
            return None
        before = run['settings']  # fingerprints omit defaults, which may have changed
        now = self.ladder.weighty(row).items()
        return run if all(before.get(name, value) == value for name, value in now) else None

    def write(self, row, seed: int, run: dict) -> None:
        """Append a run with whole settings, in one write: lines of several processes do not mix."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, 'ab', buffering=0, opener=regular_only) as file:
            file.write(as_line({'row': row.name, 'seed': seed, **run}).encode())

    def compact(self) -> None:
        """Sort the runs and store only what differs from the settings that most of them have."""
        runs = self.runs()
        if not runs:
            return
        settings = [run['settings'] for run in runs.values()]
        names = set.intersection(*map(set, settings))
        base = {name: Counter(each[name] for each in settings).most_common(1)[0][0]
                for name in sorted(names)}
        lines = [{'base': base}]
        for _, run in sorted(runs.items()):
            lines.append(run | {'settings': {name: value for name, value in run['settings'].items()
                                             if name not in base or value != base[name]}})
        write_whole(self.path, ''.join(map(as_line, lines)))

    def other_core(self) -> str:
        """A line on results measured with another or an unknown version of the core, or ''."""
        runs = [self.read(row, seed) for row in self.ladder.rows.values()
                for seed in self.seeds(row)]
        cores = [run.get('core') for run in runs if run]
        other = len(cores) - cores.count(core_digest())
        if not other:
            return ''
        return (f'{other} of {len(cores)} results were measured with another version of the core '
                '(model.py, generate.py, kv/, attention/). Delete their lines in runs.jsonl '
                'to measure again, and runs/ to train again')
