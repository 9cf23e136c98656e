"""Writing results: a reader never gets part of a file."""
import json
from pathlib import Path

from common.errors import UserError
from common.files import replacing


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and its folder. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding='utf-8')
    except OSError as e:
        raise UserError(f'{path} cannot be written: {e.strerror or e}') from e


def write_json(path: Path | str, document) -> None:
    write_whole(Path(path), json.dumps(document, indent=1) + '\n')
