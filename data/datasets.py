"""Find a dataset folder by its name, preparing the dataset first when its prepare.py can."""

import difflib
import importlib.util
import sys
from pathlib import Path

from config.errors import UserError

DATA_ROOT = Path(__file__).resolve().parent


def ensure_dataset(name: str, root: Path = DATA_ROOT) -> Path:
    """Return the folder `root/name`, which then holds train.bin and val.bin.

    If they are missing, runs `root/name/prepare.py`, i.e. its `main([])` (a nanoGPT-style prepare.py without a
    main does its work on import). Raises UserError for a name that is no plain folder name, an unknown dataset
    (listing those that exist), or a preparation that fails.
    """
    if not name or name in ('.', '..') or any(c in name for c in '/\\\0'):
        raise UserError(f'dataset name {name!r}: allowed is the name of a folder under data/, without path separators')
    root = Path(root)
    folder = root / name
    if _is_prepared(folder):
        return folder
    if not (folder / 'prepare.py').is_file():
        raise UserError(_unknown(name, root))
    print(f'preparing dataset {name}...', flush=True)
    _run_prepare(folder / 'prepare.py')
    if not _is_prepared(folder):
        raise UserError(f'dataset {name!r}: its prepare.py ended without leaving train.bin and val.bin in its folder')
    return folder


def available_datasets(root: Path = DATA_ROOT) -> list[str]:
    """Names, sorted, of the dataset folders under `root` that are prepared or can prepare themselves."""
    root = Path(root)
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    return sorted(path.name for path in folders if _is_prepared(path) or (path / 'prepare.py').is_file())


def _is_prepared(folder: Path) -> bool:
    return (folder / 'train.bin').is_file() and (folder / 'val.bin').is_file()


def _unknown(name: str, root: Path) -> str:
    names = available_datasets(root)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f' (did you mean {near[0]!r}?)' if near else ''
    return (f'no dataset {name!r}{hint}; available: {", ".join(names) or "none"}; '
            f'for one of your own put train.bin and val.bin into data/{name}/')


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
