"""config.json of nanoKV's models, for transformers and for the vLLM plugin. `python -m
interop.export` copies this file as configuration_nanokv.py, next to the weights and
modeling_nanokv.py.

Copyright (c) 2026 the nanoKV authors, MIT License.
"""
from transformers.configuration_utils import PretrainedConfig

# the fields of nanoKV's GPTConfig and their defaults
DEFAULTS = {
    'block_size': 1024, 'vocab_size': 50304, 'n_layer': 12, 'n_head': 12, 'n_embd': 768,
    'dropout': 0.0, 'bias': True, 'n_kv_head': 0, 'head_dim': 0, 'layer_pattern': 'G',
    'window_size': 0, 'kv_share': '', 'share_global_kv': False, 'pos_embedding': 'learned',
    'rope_theta': 10000.0, 'rope_theta_global': 0.0, 'qk_norm': False, 'mlp_hidden': 0,
    'gelu': 'exact', 'kv_quant_train': '', 'attn_sink': False, 'rope_fraction_global': 1.0,
    'key_offset': False, 'kv_tied': '', 'kv_latent': 0, 'attn_gate': False}
# what transformers and vLLM call some of them
OTHER_NAMES = {'n_embd': 'hidden_size', 'n_layer': 'num_hidden_layers',
               'n_head': 'num_attention_heads', 'window_size': 'sliding_window'}


class NanoKVConfig(PretrainedConfig):
    """The keys of config.json as attributes. `nanokv` contains the fields of the GPTConfig that are
    not the default; the export derives all other keys about the model from it. ValueError: if a
    field is unknown, or is contradicted by its key under another name."""
    model_type = 'nanokv'
    keys_to_ignore_at_inference = ['past_key_values']

    def __init__(self, nanokv: dict | None = None, use_cache: bool = True, **kwargs):
        self.nanokv, self.use_cache = dict(nanokv or {}), use_cache
        for name, value in self.nanokv.items():
            if name not in DEFAULTS:
                raise ValueError(f'config.json: {name}={value!r} is not supported by this version '
                                 'of nanoKV for transformers and vLLM')
        for name, key in OTHER_NAMES.items():
            if kwargs.get(key) not in (None, self.field(name)):
                raise ValueError(f'config.json: {key}={kwargs[key]!r}, but by nanokv it is '
                                 f'{self.field(name)!r}')
        ids = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
        super().__init__(**(ids | kwargs))

    def field(self, name: str):
        return self.nanokv.get(name, DEFAULTS[name])

    def is_local(self, layer: int) -> bool:
        return self.layer_types[layer] == 'sliding_attention'

    def latent(self, layer: int) -> int:
        """The width of the latent from which the layer makes K and V, 0 without one."""
        return 0 if self.is_local(layer) else self.field('kv_latent')

    def tied(self, layer: int) -> bool:
        """Whether the layer's K is its V."""
        kinds = ('all',) if self.is_local(layer) else ('all', 'global')
        return self.latent(layer) > 0 or self.field('kv_tied') in kinds
