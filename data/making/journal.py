"""How the files of a dataset appear, so that an interruption at any moment loses neither the old dataset nor the new one.

    .train.bin.tmp, .val.bin.tmp, ...    what is being written: replaces nothing yet
    .state.tmp                           says how far a preparation came that can be resumed (see resume.py), or
                                         {"publish": [names], "retire": [names]}: all is written, names are changing

Once "publish" is on disk there is no way back: finish() makes the changes, here or, after a kill, in the next preparation
of the folder. The file that marks a dataset complete (train.bin or train_00000.bin) appears last, and the old one goes
first, so that old and new never look like one dataset. Whoever calls these functions holds the folder's lock (lock.py).
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.errors import UserError

MARKERS = ('train.bin', 'train_00000.bin')  # either makes a dataset complete
NAME = r'(?:[A-Za-z0-9][A-Za-z0-9_-]*\.bin|meta\.pkl|source\.json)'
LEFT_OVER = re.compile(rf'\.(?:{NAME}|state|new-state)(?:\.\w+)?\.tmp')


@contextlib.contextmanager
def as_user_error(folder: Path, advice: str = '') -> Iterator[None]:
    """Turn an OSError of writing to `folder` (no such place, a full disk, no permission) into a UserError."""
    try:
        yield
    except OSError as error:
        reason = 'it is no folder' if isinstance(error, FileExistsError) else error.strerror or error
        raise UserError(f'cannot write a dataset to {str(folder)!r}: {reason}{advice}') from None


def temporary(folder: Path, name: str) -> Path:
    """Where the file `name` of a dataset lies until it is published."""
    return folder / f'.{name}.tmp'


def left_over(folder: Path) -> list[Path]:
    """All files of a preparation that is not published."""
    return [path for path in folder.glob('.*.tmp') if LEFT_OVER.fullmatch(path.name)]


def clear(folder: Path) -> None:
    """Remove all that a preparation left, unless it only has to be finished; see finish()."""
    if 'publish' not in read_state(folder):
        for path in left_over(folder):
            path.unlink(missing_ok=True)


def read_state(folder: Path) -> dict[str, Any]:
    """What .state.tmp holds, {} if it is missing or damaged."""
    try:
        state = json.loads(temporary(folder, 'state').read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    good = isinstance(state, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) and re.fullmatch(NAME, name) for name in names)
        for names in (state.get('publish', []), state.get('retire', [])))
    return state if good else {}


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Make `state` what .state.tmp holds, all at once."""
    new = temporary(folder, 'new-state')
    with open(new, 'w') as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, temporary(folder, 'state'))


def publish(folder: Path, names: list[str], old: list[str], state: dict[str, Any]) -> None:
    """Make the temporary files of `names` the dataset, in place of the files `old` that it had, as far as they exist.

    state: more to note meanwhile. Ctrl-C comes too late once names are changing: it is raised when that is done.
    """
    names = sorted(names, key=lambda name: (name in MARKERS, name != 'source.json', name))  # whose files these are comes first
    retire = sorted((name for name in old if name in MARKERS or name not in names), key=lambda name: name not in MARKERS)
    try:
        write_state(folder, {**state, 'publish': names, 'retire': retire})
        finish(folder)
    except KeyboardInterrupt:
        finish(folder)
        raise


def finish(folder: Path) -> dict[str, Any]:
    """Finish a publication that has begun, and return what its state was; {} if there is none."""
    state = read_state(folder)
    if 'publish' not in state:
        return {}
    for name in state.get('retire', []):
        if name not in state['publish'] or temporary(folder, name).exists():  # else it is the new one already
            (folder / name).unlink(missing_ok=True)
    for name in state['publish']:
        if temporary(folder, name).exists():
            os.replace(temporary(folder, name), folder / name)
    temporary(folder, 'state').unlink()
    return state
