"""Find and read a model's config.json. No torch here."""
from pathlib import Path

from common.errors import UserError
from common.files import read_json
from data.download import from_hub


def read_config(where: str) -> dict:
    """Return the contents of a config.json, given by its path, its folder, or the name of a model
    on the hub (owner/name). UserError: if it is not found, cannot be fetched, or is no JSON object.
    """
    path = Path(where)
    path = path / 'config.json' if path.is_dir() else path
    if not path.exists():
        if where.count('/') != 1 or where.startswith(('.', '/')) or where.endswith('.json'):
            raise UserError(f'{where!r}: no such folder or config.json')
        path = from_hub(where, 'config.json')
    try:
        config = read_json(path)
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read: {e}') from e
    if not isinstance(config, dict):
        raise UserError(f'{path} is not a config: it holds {type(config).__name__}, not an object')
    return config
