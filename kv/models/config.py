"""Find and read a model's config.json, and fill in what it leaves to its class. No torch here.

A config.json holds what differs from the defaults of its class in transformers. With the package
installed, the class fills them in; without it, facts that the file lacks are unknown, and
`completed` says so.
"""
from pathlib import Path

from config.errors import UserError
from config.files import read_json

# where a model of several parts has its text model
TEXT = ('text_config', 'language_config', 'llm_config', 'thinker_config', 'decoder')
# attributes of transformers' config classes that may be properties, or other names of keys
GENERIC = ('layer_types', 'kv_sharing_modes', 'num_hidden_layers', 'num_attention_heads',
           'num_key_value_heads', 'head_dim', 'sliding_window', 'hidden_size')


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


def stated(config: dict) -> set[str]:
    """The names of the text model's settings that the config itself gives, and their other names
    in its class."""
    text = text_of(config)
    names = set(text)
    try:
        import transformers
        aliases = transformers.CONFIG_MAPPING[text['model_type']].attribute_map
    except (ImportError, KeyError, TypeError):
        return names
    return names.union(*(pair for pair in aliases.items() if names & set(pair)))


def completed(config: dict) -> tuple[dict, str]:
    """Fill in the defaults of the config's class. Returns the text model's config, and where the
    defaults come from ('' = they could not be filled in)."""
    try:
        name = config['model_type']
        import transformers
        cls = transformers.CONFIG_MAPPING[name]
    except (ImportError, KeyError, TypeError):  # TypeError: no name at all
        return text_of(config), ''
    try:
        found = cls.from_dict(config).get_text_config(decoder=True)
        settings = found.to_dict()
        for name in GENERIC:  # `layer_types` replaces older forms of itself
            if settings.get(name) is None and getattr(found, name, None) is not None:
                settings[name] = getattr(found, name)
    except Exception as e:  # whatever a class or one of its properties raises
        raise UserError(f"this config is not valid for transformers' {cls.__name__}: "
                        f"{' '.join(str(e).split())[:300]}") from e
    settings |= {key: config[key] for key in ('dtype', 'torch_dtype') if config.get(key)}
    return settings, f'transformers {transformers.__version__}, {type(found).__name__}'
