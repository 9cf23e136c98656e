"""The files of a ladder: a JSON file for each row and seed, so that a ladder can be measured on
several machines."""
import json
import re
import textwrap
from pathlib import Path

from config.errors import UserError
from lab.ablation.ladder import digest
from lab.files import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results'
CORE = ['model.py', 'generate.py', *(f'kv/{name}.py' for name in (
    '__init__', 'plan', 'slots', 'cache', 'quantize', 'report'))]
CORE += sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'attention').glob('*.py'))


def core_digest() -> str:
    """Return a digest of the sources of the core (docs/architecture.md)."""
    return digest([(ROOT / path).read_text(encoding='utf-8') for path in CORE])


def read_json(path: Path):
    """Return the document in a file, or None without the file. UserError: if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read: {e}; delete it to measure again') from e


class Results:
    """A ladder's folder: measured/ROW-seedSEED.json, speed.json, the report made from them, and
    runs/ with the checkpoints (not committed)."""

    def __init__(self, ladder):
        self.ladder = ladder
        self.folder = Path(ladder.s.folder) if ladder.s.folder else RESULTS / ladder.s.name

    def out_dir(self, row, seed: int) -> Path:
        """Return train.py's out_dir for a row; different settings get a different folder."""
        return self.folder / 'runs' / f'{row.slug}-seed{seed}-{self.ladder.training(row)}'

    def path(self, row, seed: int) -> Path:
        return self.folder / 'measured' / f'{row.slug}-seed{seed}.json'

    def failure_path(self, row, seed: int) -> Path:
        return self.path(row, seed).with_suffix('.failed.json')

    def seeds(self, row) -> list[int]:
        """The requested seeds, and those measured earlier."""
        names = (path.stem for path in (self.folder / 'measured').glob('*.json'))
        matches = (re.fullmatch(re.escape(row.slug) + r'-seed(\d+)', name) for name in names)
        return sorted({*self.ladder.seeds(row), *(int(match[1]) for match in matches if match)})

    def read(self, row, seed: int) -> dict | None:
        """Return the result of a run; None if there is none with the row's current settings."""
        run = read_json(self.path(row, seed))
        if not isinstance(run, dict) or run.get('fingerprint') != self.ladder.fingerprint(row):
            return None
        before = run.get('settings', {})  # fingerprints omit defaults, which may have changed
        now = self.ladder.weighty(row).items()
        return run if all(before.get(name, value) == value for name, value in now) else None

    def other_core(self, speed: dict | None) -> list[str]:
        """Return lines on results measured with another version of the core, and on those that do
        not record theirs; none if there are no such results. speed: that of speed.json, if used."""
        runs = {self.path(row, seed).name: self.read(row, seed)
                for row in self.ladder.rows.values() for seed in self.seeds(row)}
        cores = {name: run.get('core') for name, run in (runs | {'speed.json': speed}).items()
                 if run}
        unknown = sum(core is None for core in cores.values())
        other = [name for name, core in cores.items() if core not in (None, core_digest())]

        lines = []
        if other:
            names = textwrap.shorten(', '.join(other), 200, placeholder=' ...')
            lines.append(f'{len(other)} of {len(cores)} results were measured with another version '
                         f'of the core (model.py, generate.py, kv/, attention/): {names}. Delete '
                         'these files to measure again, and runs/ to train again')
        if unknown:
            lines.append(f'{unknown} of {len(cores)} results do not record their version of the '
                         'core')
        return lines

    def failed(self, row, seed: int) -> str:
        """Return the training or measurement error of a failed run; '' if there is none."""
        for each in (row, self.ladder.trainer(row)):
            failure = read_json(self.failure_path(each, seed))
            if failure and failure.get('training') == self.ladder.training(row):
                return failure['error']
        return ''

    def write(self, row, seed: int, run: dict) -> None:
        write_json(self.path(row, seed), run)
        self.failure_path(row, seed).unlink(missing_ok=True)

    def write_failure(self, row, seed: int, error: str) -> None:
        write_json(self.failure_path(row, seed), {
            'row': row.name, 'seed': seed, 'training': self.ladder.training(row), 'error': error})
