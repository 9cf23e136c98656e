"""The keys of an exported model's config.json: `nanokv`, and those derived from it."""
import dataclasses

from config.errors import UserError, shown
from config.gpt_config import GPTConfig
from kv.plan import LOCAL, plan_kv

# The fields of GPTConfig that this room supports. Who adds one here teaches it to export.is_gpt2,
# to modeling_nanokv.py and to nanokv_vllm, which have lists of their own.
FIELDS = (
    'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'n_kv_head',
    'head_dim', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv', 'pos_embedding',
    'rope_theta', 'rope_theta_global', 'qk_norm', 'mlp_hidden', 'gelu', 'kv_quant_train',
    'attn_sink', 'rope_fraction_global', 'key_offset', 'kv_tied', 'kv_latent', 'act_clamp')


def check_supported(nanokv: dict, program: str) -> None:
    """Raise UserError if `nanokv`, as from `model_args`, has a field that is not in FIELDS."""
    for name, value in nanokv.items():
        if name not in FIELDS:
            raise UserError(f'{name}={shown(value)} is not supported by {program}')


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
    check_supported(nanokv, 'interop.import_hf (nanokv in config.json)')
    types = {f.name: f.type for f in dataclasses.fields(GPTConfig)}
    for name, value in nanokv.items():
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
