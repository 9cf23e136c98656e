"""Find and read a model's config.json. No torch here."""
from pathlib import Path

from config.errors import UserError
from config.files import read_json

# where a model of several parts has its text model
TEXT = ('text_config', 'language_config', 'llm_config', 'thinker_config', 'decoder')


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
    missing = UserError(f'{name!r}: no such folder or config.json, and no name of a model on the '
                        'hub (owner/name)')
    if name.count('/') != 1 or name.startswith(('.', '/')) or name.endswith('.json'):
        raise missing
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError(f'{name!r}: no such folder; to look on the hub: '
                        'pip install huggingface_hub') from None
    logging.set_verbosity_error()  # it warns of what the error below says
    try:
        return Path(hf_hub_download(name, 'config.json'))
    except Exception as e:  # offline, private, absent: the hub's own words
        raise UserError(f"{name!r}: no such folder, and the hub's config.json cannot be fetched: "
                        f"{' '.join(str(e).split())[:200]}") from e


def text_of(config: dict) -> dict:
    """The config of the text model, which alone has a KV cache; quantization and dtype are those of
    the whole."""
    for name in TEXT:
        inner = config.get(name)
        if isinstance(inner, dict) and inner:
            whole = {key: config[key] for key in ('dtype', 'torch_dtype') if config.get(key)}
            return text_of(whole | inner)
    return config
