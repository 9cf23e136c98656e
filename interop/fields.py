"""config.json of an exported model: `nanokv` has its GPTConfig, and other keys, for other programs, follow from that."""
import dataclasses

from config.gpt_config import GPTConfig
from kv.plan import LOCAL, plan_kv

LAYER_TYPE = {True: 'sliding_attention', False: 'full_attention'}  # by: is it local


def follows_from(config: GPTConfig) -> dict:
    """The keys that other programs look for, under transformers' names. `kv_owners`: whose K and V each layer reads."""
    plan = plan_kv(config)
    local = [layer.kind == LOCAL for layer in plan.layers]
    return {
        'vocab_size': config.vocab_size, 'hidden_size': config.n_embd, 'num_hidden_layers': config.n_layer,
        'num_attention_heads': config.n_head, 'num_key_value_heads': plan.n_kv_head, 'head_dim': plan.head_dim,
        'intermediate_size': config.resolved_mlp_hidden, 'max_position_embeddings': config.block_size,
        'layer_types': [LAYER_TYPE[x] for x in local], 'sliding_window': config.window_size if any(local) else None,
        'kv_sharing_modes': ['store' if layer.owns else 'reuse' for layer in plan.layers],
        'kv_owners': [plan.slots[layer.slot].owner for layer in plan.layers], 'tie_word_embeddings': True}


def checked(nanokv: dict, others: dict) -> GPTConfig:
    """The GPTConfig that `nanokv` says.

    Raises:
        ValueError: a field that is unknown or out of its range, or one of the `others` that contradicts it.
    """
    known = {f.name for f in dataclasses.fields(GPTConfig)}
    if not isinstance(nanokv, dict):
        raise ValueError(f'config.json: nanokv is {nanokv!r}, not an object')
    for name in nanokv:
        if name not in known:
            raise ValueError(f'config.json: nanokv has {name!r}, which this version does not know')
    for f in dataclasses.fields(GPTConfig):
        value = nanokv.get(f.name, f.default)
        if type(value) is not f.type and not (f.type is float and type(value) is int):
            raise ValueError(f'config.json: nanokv has {f.name}={value!r}, which is no {f.type.__name__}')
    config = GPTConfig(**nanokv)
    for name, value in follows_from(config).items():
        if others.get(name, value) != value:
            raise ValueError(f'config.json: {name}={others[name]!r}, but by its nanokv fields it is {value!r}')
    return config
