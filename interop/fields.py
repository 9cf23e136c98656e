"""The keys of an exported model's config.json: `nanokv`, and those derived from it."""
import dataclasses

from config.errors import shown
from config.gpt_config import GPTConfig
from kv.plan import LOCAL, plan_kv


def derived_keys(config: GPTConfig) -> dict:
    """The keys under transformers' names. `kv_owners`: the layer whose K and V each layer reads."""
    plan = plan_kv(config)
    local = [layer.kind == LOCAL for layer in plan.layers]
    return {
        'vocab_size': config.vocab_size, 'hidden_size': config.n_embd,
        'num_hidden_layers': config.n_layer, 'num_attention_heads': config.n_head,
        'num_key_value_heads': plan.n_kv_head, 'head_dim': plan.head_dim,
        'intermediate_size': config.resolved_mlp_hidden,
        'layer_types': ['sliding_attention' if x else 'full_attention' for x in local],
        'sliding_window': config.window_size if any(local) else None,
        'kv_sharing_modes': ['store' if layer.owns else 'reuse' for layer in plan.layers],
        'kv_owners': [plan.slots[layer.slot].owner for layer in plan.layers],
        'max_position_embeddings': config.block_size, 'tie_word_embeddings': True}


def gpt_config(nanokv: dict, other_keys: dict) -> GPTConfig:
    """Return the GPTConfig stored in `nanokv`. ValueError: if a field is unknown or out of range,
    or one of `other_keys` contradicts it."""
    if not isinstance(nanokv, dict):
        raise ValueError(f'config.json: nanokv={shown(nanokv)} is not an object')
    types = {f.name: f.type for f in dataclasses.fields(GPTConfig)}
    for name, value in nanokv.items():
        if name not in types:
            raise ValueError(f'config.json: {name}={shown(value)} is not supported by '
                             'interop.import_hf')
        if type(value) is not types[name] and not (types[name] is float and type(value) is int):
            raise ValueError(f'config.json: nanokv.{name}={shown(value)} is not '
                             f'{types[name].__name__}')
    config = GPTConfig(**nanokv)
    for name, value in derived_keys(config).items():
        given = other_keys.get(name, value)
        if given != value:
            raise ValueError(f'config.json: {name}={shown(given)}, but by nanokv it is '
                             f'{shown(value)}')
    return config
