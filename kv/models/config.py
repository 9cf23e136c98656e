"""Find and read a model's config.json. No torch here."""
import re
from pathlib import Path

from common.errors import UserError, shown
from common.files import read_json
from data.download import from_hub

# where a model of several parts has its text model
TEXT = ('text_config', 'language_config', 'llm_config', 'thinker_config', 'decoder')
MOST = 2_000  # layers, or experts of a layer
COUNTS = re.compile(r'(^|_)(num|n)_(\w+_)?(layer|expert)s?$|coder_layers$')
IN_ALL = 1_000_000  # of all other numbers, but for those that are often large and never counted to
LARGE = re.compile('size|dim|embd|rank|width|channel|inner|ffn|ff$|d_model|length|_len$|ctx|'
                   'context|position|window|topk|token|_ids?$|index$|theta|base|rate|freq|seed|'
                   'param|pixels|fft|seconds')


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


def text_of(config: dict) -> dict:
    """The config of the text model, which alone has a KV cache."""
    inner = next((config[name] for name in TEXT
                  if isinstance(config.get(name), dict) and config[name]), None)
    return text_of(inner) if inner else config


def check_sizes(value, name: str = 'in all, counts') -> int:
    """Return the sum of the counts in a config, or in a value of it. Raise UserError for counts
    with which building would never end, or would need too much memory."""
    most, total = IN_ALL, 0
    if isinstance(value, dict):
        total = sum(check_sizes(inner, str(key)) for key, inner in value.items())
    elif isinstance(value, list):
        total = sum(check_sizes(inner, name) for inner in value)
    elif type(value) is int and COUNTS.search(name):
        most, total = MOST, max(value, 0)
    elif type(value) is int and not LARGE.search(name):
        total = max(value, 0)
    if total > most:
        raise UserError(f'this config has {name}={shown(value)}: at most {most:,} make sense')
    return total
