"""The JSON file of a measurement: written whole or not at all."""
import json
import os
from pathlib import Path

from config.errors import UserError


def check_target(path: str) -> None:
    """Raises UserError where `path` ('' = nowhere) cannot become a file."""
    if not path:
        return
    folder = Path(path).parent
    if Path(path).is_dir():
        raise UserError(f'save={path!r} is a folder: give the name of a file in it')
    if not folder.is_dir():
        raise UserError(f'save={path!r}: there is no folder {folder}/ to write it in')
    if not os.access(folder, os.W_OK):
        raise UserError(f'save={path!r}: {folder}/ cannot be written to')


def write_json(path: str, document: dict) -> None:
    """Replace `path` by `document`; a reader finds the old file or the new one, never a part."""
    temporary = Path(f'{path}.{os.getpid()}.tmp')
    try:
        temporary.write_text(json.dumps(document, indent=1) + '\n', encoding='utf-8')
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f'save={path!r} cannot be written: {e.strerror}') from e
    finally:
        temporary.unlink(missing_ok=True)
