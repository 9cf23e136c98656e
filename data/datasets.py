"""Find a dataset folder by its name, running its prepare.py first if necessary."""
import difflib
import importlib.util
import os
import re
import sys
from pathlib import Path

from common.errors import UserError
from common.folder_lock import one_at_a_time
from data.tokenfiles import is_prepared

DATA_ROOT = Path(__file__).resolve().parent


def ensure_dataset(name: str, root: Path = DATA_ROOT) -> Path:
    """Return the folder `root/name` with its token files, preparing the dataset if necessary.

    A missing dataset is made by `main([])` of `root/name/prepare.py` (one in nanoGPT's style has no
    main and does its work on import), except one with a line `BY_HAND = 'why'`; a second process
    waits for the first. Raises UserError for an invalid folder name, an unknown dataset (listing
    those that exist), one to prepare by hand (with the command), or a failed preparation.
    """
    if not name or name in ('.', '..') or any(c in name for c in '/\\\0'):
        raise UserError(f'dataset name {name!r}: allowed is the name of a folder under data/, '
                        'without path separators')
    folder = root / name
    if is_prepared(folder):
        return folder
    script = folder / 'prepare.py'
    if not os.path.isfile(script):
        names = available_datasets(root)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f' (did you mean {near[0]!r}?)' if near else ''
        raise UserError(f'no dataset {name!r}{hint}; there are {", ".join(names)}; '
                        'your own text: python data/text/prepare.py --help')
    if why := by_hand(script):
        raise UserError(f'dataset {name!r} is not prepared, and training does not start that by '
                        f'itself: {why}; run: python {root.name}/{name}/prepare.py '
                        '(--help shows its options)')
    with one_at_a_time(folder):
        if not is_prepared(folder):
            print(f'preparing dataset {name}...', flush=True)
            _run_prepare(script)
    if not is_prepared(folder):
        raise UserError(f'dataset {name!r}: its prepare.py ended without leaving train.bin and '
                        'val.bin in its folder')
    return folder


def available_datasets(root: Path = DATA_ROOT) -> list[str]:
    """Return sorted names of the folders under `root` that are prepared or have a prepare.py."""
    return sorted(path.name for path in root.glob('*')
                  if is_prepared(path) or (path / 'prepare.py').is_file())


def by_hand(script: Path) -> str:
    """Return the text that a prepare.py assigns to BY_HAND, '' if none, without running it."""
    text = script.read_text(encoding='utf-8', errors='replace') if script.is_file() else ''
    found = re.search(r'^BY_HAND = (.*)', text, re.M)
    return found[1].strip('\'" ') if found else ''


def _run_prepare(path: Path) -> None:
    module_name = f'prepare_{path.parent.name}'
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
        if hasattr(module, 'main'):
            module.main([])
    finally:
        del sys.modules[module_name]
