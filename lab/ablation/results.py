"""Where a ladder's results lie: one JSON file for each row and seed, so that a ladder can go on anywhere."""
import json
import os
import re
from pathlib import Path

from config.errors import UserError

RESULTS = Path(__file__).resolve().parents[2] / 'results'


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding='utf-8')
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f'{path} cannot be written: {e}') from e
    finally:
        temporary.unlink(missing_ok=True)


class Results:
    """A ladder's folder: measured/ROW-seedSEED.json, speed.json, what the report makes of them, and runs/ (not to be
    committed) with the checkpoints."""

    def __init__(self, ladder):
        self.ladder = ladder
        self.folder = Path(ladder.s.folder) if ladder.s.folder else RESULTS / ladder.s.name

    def out_dir(self, row, seed: int) -> Path:
        """Where a row trains. With other settings it is another folder."""
        return self.folder / 'runs' / f'{row.slug}-seed{seed}-{self.ladder.training(row)}'

    def path(self, row, seed: int) -> Path:
        return self.folder / 'measured' / f'{row.slug}-seed{seed}.json'

    def failure_path(self, row, seed: int) -> Path:
        return self.folder / 'measured' / f'{row.slug}-seed{seed}.failed.json'

    def seeds(self, row) -> list[int]:
        """Those asked for now, and those that were measured before."""
        files = (self.folder / 'measured').glob('*.json')
        found = (re.fullmatch(re.escape(row.slug) + r'-seed(\d+)', path.stem) for path in files)
        return sorted({*self.ladder.seeds(row), *(int(match[1]) for match in found if match)})

    def read(self, row, seed: int) -> dict | None:
        """What was measured; None if nothing was, or with other settings than the row has now."""
        found = read_json(self.path(row, seed))
        if not isinstance(found, dict) or found.get('fingerprint') != self.ladder.fingerprint(row):
            return None
        before = found.get('settings', {})  # a default may have become another since
        same = all(before[name] == value for name, value in self.ladder.weighty(row).items() if name in before)
        return found if same else None

    def failed(self, row, seed: int) -> str:
        """What went wrong; '' = nothing."""
        for each in (row, self.ladder.trainer(row)):
            found = read_json(self.failure_path(each, seed))
            if found and found.get('training') == self.ladder.training(row):
                return found['error']
        return ''

    def write(self, row, seed: int, found: dict) -> None:
        write_whole(self.path(row, seed), json.dumps(found, indent=1) + '\n')
        self.failure_path(row, seed).unlink(missing_ok=True)

    def write_failure(self, row, seed: int, error: str) -> None:
        """row: the one that its training is named after."""
        what = {'row': row.name, 'seed': seed, 'training': self.ladder.training(row), 'error': error}
        write_whole(self.failure_path(row, seed), json.dumps(what, indent=1) + '\n')


def read_json(path: Path):
    """The document in a file; None if there is no such file.

    Raises:
        UserError: it cannot be read as JSON.
    """
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read: {e}; delete it to measure anew') from e
