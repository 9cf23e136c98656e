"""config.json as it is; the folder's own modeling_nanokv.py checks more."""
from transformers import PretrainedConfig


class NanoKVConfig(PretrainedConfig):
    """Keys of an exported config.json (`interop/fields.py` of nanoKV) as attributes; `nanokv` has the fields of a GPTConfig
    that are not its defaults."""
    model_type = 'nanokv'

    def __init__(self, nanokv=None, **kwargs):
        self.nanokv = nanokv or {}
        super().__init__(**kwargs)

    def field(self, name, default):
        """A field of the GPTConfig."""
        return self.nanokv.get(name, default)
