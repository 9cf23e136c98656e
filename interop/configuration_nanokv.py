"""config.json of nanoKV's models. `python -m interop.export` copies this file and
modeling_nanokv.py next to the weights.

Copyright (c) 2026 the nanoKV authors, MIT License.
"""
from transformers.configuration_utils import PretrainedConfig

# The fields of nanoKV's GPTConfig. The first seven are nanoGPT's and are always saved.
NANOGPT = {'block_size': 1024, 'vocab_size': 50304, 'n_layer': 12, 'n_head': 12, 'n_embd': 768,
           'dropout': 0.0, 'bias': True}
DEFAULTS = NANOGPT | {
    'n_kv_head': 0, 'head_dim': 0, 'layer_pattern': 'G', 'window_size': 0, 'kv_share': '',
    'share_global_kv': False, 'pos_embedding': 'learned', 'rope_theta': 10000.0,
    'rope_theta_global': 0.0, 'qk_norm': False, 'mlp_hidden': 0, 'gelu': 'exact',
    'kv_quant_train': '', 'attn_sink': False, 'rope_fraction_global': 1.0, 'key_offset': False,
    'kv_tied': '', 'kv_latent': 0, 'act_clamp': 0.0}
CHOICES = {'pos_embedding': ('learned', 'rope'), 'gelu': ('exact', 'tanh', 'relu2'),
           'kv_quant_train': ('', 'int8'), 'kv_tied': ('', 'global', 'all')}
LAYER_TYPES = {'G': 'full_attention', 'L': 'sliding_attention'}


class NanoKVConfig(PretrainedConfig):
    """`nanokv` contains the GPTConfig; all other keys about the model are derived from it for other
    programs. ValueError: if a field is unknown or out of range, or a derived key contradicts it.
    """
    model_type = 'nanokv'
    keys_to_ignore_at_inference = ['past_key_values']

    def __init__(self, nanokv: dict | None = None, use_cache: bool = True, **kwargs):
        fields = check_fields(nanokv or {})
        self.nanokv = {name: value for name, value in fields.items()
                       if name in NANOGPT or value != DEFAULTS[name]}
        self.use_cache = use_cache
        for name, value in derived_keys(fields).items():
            given = kwargs.pop(name, value)
            if given != value:
                raise ValueError(f'config.json: {name}={given!r}, but by nanokv it is {value!r}')
            setattr(self, name, value)
        ids = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
        super().__init__(**(ids | kwargs))

    def field(self, name: str):
        return self.nanokv.get(name, DEFAULTS[name])


def check_fields(nanokv: dict) -> dict:
    """All fields of the GPTConfig, defaults included."""
    if not isinstance(nanokv, dict):
        raise ValueError(f'config.json: nanokv={nanokv!r} is not an object')
    for name, value in nanokv.items():
        if name not in DEFAULTS:
            raise ValueError(f'config.json: {name}={value!r} is not supported by this version of '
                             'nanoKV for transformers')
        expected = type(DEFAULTS[name])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise ValueError(f'config.json: nanokv.{name}={value!r} is not {expected.__name__}')
    fields = DEFAULTS | nanokv
    n_head, n_kv_head = fields['n_head'], fields['n_kv_head']
    pattern, share = fields['layer_pattern'], fields['kv_share']
    head_dim, tied = fields['head_dim'] or fields['n_embd'] // max(n_head, 1), fields['kv_tied']
    fraction, latent = fields['rope_fraction_global'], fields['kv_latent']
    rope = fields['pos_embedding'] == 'rope'
    rules = [(name, fields[name] in choices, f'allowed are {choices}')
             for name, choices in CHOICES.items()]
    rules += [(name, fields[name] >= 1, 'must be at least 1')
              for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd')]
    rules += [
        ('n_kv_head', n_kv_head == 0 or n_kv_head > 0 and n_head % n_kv_head == 0,
         f'must divide n_head={n_head}'),
        ('layer_pattern', pattern and not pattern.strip('GL'), 'allowed are G and L'),
        ('kv_share', len(share) in (0, len(pattern)), f'not as long as layer_pattern={pattern!r}'),
        ('window_size', 'L' not in pattern or fields['window_size'] >= 1,
         'must be at least 1 with local layers'),
        ('rope_fraction_global', 0 <= fraction <= 1 and (rope or fraction == 1),
         "must be from 0 to 1, and below 1 needs pos_embedding='rope'"),
        ('act_clamp', fields['act_clamp'] >= 0, 'must be at least 0'),
        ('kv_tied', 'G' in pattern or tied != 'global', 'there are no global layers'),
        ('key_offset', not fields['key_offset'] or 'G' in pattern and not tied and not latent
         and head_dim % 4 == 0, 'needs global layers that are neither tied nor latents, and '
         f'head_dim={head_dim} to be a multiple of 4'),
        ('kv_latent', latent == 0 or latent > 0 and latent % head_dim == 0 and 'G' in pattern
         and not tied and not (rope and fraction), f'must be a multiple of head_dim={head_dim} '
         'and needs global layers that are neither tied nor rotated')]
    for name, is_valid, rule in rules:
        if not is_valid:
            raise ValueError(f'config.json: nanokv.{name}={fields[name]!r}: {rule}')
    return fields


def derived_keys(fields: dict) -> dict:
    """The fields under transformers' names. `kv_owners`: the layer whose K and V a layer reads."""
    pattern, share, n_layer = fields['layer_pattern'], fields['kv_share'], fields['n_layer']
    layer_types, kv_owners, owner_of = [], [], {}
    for layer in range(n_layer):
        period, place = divmod(layer, len(pattern))
        group = (period, share[place]) if share else layer
        if pattern[place] == 'G' and fields['share_global_kv']:
            group = 'global'
        layer_types.append(LAYER_TYPES[pattern[place]])
        kv_owners.append(owner_of.setdefault(group, layer))
    return {
        'vocab_size': fields['vocab_size'], 'hidden_size': fields['n_embd'],
        'num_hidden_layers': n_layer, 'num_attention_heads': fields['n_head'],
        'num_key_value_heads': fields['n_kv_head'] or fields['n_head'],
        'head_dim': fields['head_dim'] or fields['n_embd'] // fields['n_head'],
        'intermediate_size': fields['mlp_hidden'] or 4 * fields['n_embd'],
        'max_position_embeddings': fields['block_size'],
        'layer_types': layer_types,
        'sliding_window': fields['window_size'] if 'sliding_attention' in layer_types else None,
        'kv_sharing_modes': ['store' if owner == layer else 'reuse'
                             for layer, owner in enumerate(kv_owners)],
        'kv_owners': kv_owners, 'tie_word_embeddings': True}
