"""Find and read a model's config.json. No torch here."""
import re
from pathlib import Path

from config.errors import UserError
from config.files import read_json
from data.download import from_hub

# where a model of several parts has its text model
TEXT = ('text_config', 'language_config', 'llm_config', 'thinker_config', 'decoder')
MOST = 2_000  # layers, or experts of a layer
COUNTS = re.compile(r'(^|_)(num|n)_(\w+_)?(layer|expert)s?$|coder_layers$')


def read_config(where: str) -> dict:
    """Return the contents of a config.json, given by its path, its folder, or the name of a model
    on the hub (owner/name).

    Raises:
        UserError: if it is not found, cannot be fetched, or is no JSON object.
    """
    path = Path(where)
    path = path / 'config.json' if path.is_dir() else path
    if not path.exists():
        path = _from_hub(where)
    try:
        config = read_json(path)
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read: {e}') from e
    if not isinstance(config, dict):
        raise UserError(f'{path} is not a config: it holds {type(config).__name__}, not an object')
    return config


def _from_hub(name: str) -> Path:
    if name.count('/') != 1 or name.startswith(('.', '/')) or name.endswith('.json'):
        raise UserError(f'{name!r}: no such folder or config.json')
    try:
        return from_hub(name, 'config.json')
    except Exception as e:  # not installed, offline, private, absent
        raise UserError(f"{name!r}: no such folder, and the hub's config.json cannot be fetched: "
                        f"{' '.join(str(e).split())[:200]}") from e


def text_of(config: dict) -> dict:
    """The config of the text model, which alone has a KV cache."""
    inner = next((config[name] for name in TEXT
                  if isinstance(config.get(name), dict) and config[name]), None)
    return text_of(inner) if inner else config


def check_sizes(config: dict) -> None:
    """Raise UserError for numbers of layers or experts with which building would never end."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value)
        elif type(value) is int and value > MOST and COUNTS.search(str(name)):
            raise UserError(f'this config has {name}={value:,}: at most {MOST:,} make sense')
