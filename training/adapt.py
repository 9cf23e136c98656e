"""Give a checkpoint other settings, where its weights allow it: a shorter or longer context, RoPE, other windows."""
import dataclasses

from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from config.schema import MODEL
from kv.plan import plan_kv

NANOGPT_KEPT = ('n_layer', 'n_head', 'n_embd', 'bias')  # nanoGPT takes them from the checkpoint whatever the config says
FREE = ('dropout', 'window_size', 'layer_pattern', 'rope_theta', 'rope_theta_global', 'gelu', 'kv_quant_train')
WPE = 'transformer.wpe.weight'


def adapted_config(old: GPTConfig, wanted: dict) -> GPTConfig:
    """`old` with the settings of `wanted` (model keys that the user gave), as far as trained weights can follow.

    Can be changed: what has no weights (windows and the kinds of layers, RoPE bases, the form of GELU, dropout, rounding of
    K and V in training), a shorter context, a longer one with RoPE, and learned positions for RoPE. n_layer, n_head,
    n_embd and bias stay as they are whatever is wanted, as in nanoGPT.

    Raises:
        UserError: anything else that differs; positions that do not exist; an invalid combination.
    """
    changes = {name: value for name, value in wanted.items() if value != getattr(old, name) and name not in NANOGPT_KEPT}
    if changes.get('pos_embedding') == 'learned':
        raise UserError("pos_embedding='learned': the checkpoint has RoPE, and so no position embeddings to go on with; "
                        "leave pos_embedding='rope'")
    fixed = sorted(changes.keys() - {*FREE, 'block_size', 'pos_embedding'})
    if fixed:
        name = fixed[0]
        raise UserError(f'{name}={changes[name]!r}, but the weights were trained with {name}={getattr(old, name)!r}, which '
                        f'they cannot change: leave it out, or train from scratch (can be changed: block_size, '
                        f'pos_embedding to rope, {", ".join(FREE)})')
    new = dataclasses.replace(old, **changes)
    if new.pos_embedding == 'learned' and new.block_size > old.block_size:
        raise UserError(f"block_size={new.block_size}: pos_embedding='learned' has positions up to {old.block_size}; for a "
                        'longer context finetune with --pos_embedding=rope as well')
    for before, after in zip(plan_kv(old).layers, plan_kv(new).layers):
        if before.owns != after.owns:
            has = 'has' if before.owns else 'has no'
            raise UserError(f'layer_pattern={new.layer_pattern!r}, but layer {before.index} of the checkpoint {has} K/V '
                            f'projections of its own, trained with layer_pattern={old.layer_pattern!r}, '
                            f'kv_share={old.kv_share!r}: give a pattern with the same owners')
    return new


def adapt(saved: dict, old: GPTConfig, new: GPTConfig) -> None:
    """Make the checkpoint `saved` (in place) one of `new` = `adapted_config(old, ...)`: weights, moments, model_args."""
    saved['model_args'] = model_args(new)
    if old.pos_embedding != 'learned':
        return
    crop = None if new.pos_embedding == 'rope' else new.block_size
    weight = saved['model'].pop(WPE)
    if crop is not None:
        saved['model'][WPE] = weight[:crop].clone()
    if saved.get('optimizer'):
        _adapt_moments(saved['optimizer'], crop)


def _adapt_moments(optimizer: dict, crop: int | None) -> None:
    """AdamW's state of wpe, the second parameter of the first group (see `configure_optimizers`), cropped or taken out."""
    state, index = optimizer['state'], 1
    if crop is not None:
        if index in state:
            state[index].update({name: x[:crop].clone() for name, x in state[index].items() if name.startswith('exp_avg')})
        return
    optimizer['state'] = {i - (i > index): s for i, s in state.items() if i != index}
    for k, group in enumerate(optimizer['param_groups']):
        group['params'] = [i - (i > index) for i in group['params'] if k > 0 or i != index]


def differences(old: GPTConfig, new: GPTConfig) -> list[str]:
    """One phrase for each setting that was changed, dropout aside."""
    return [f'{key.name} = {getattr(new, key.name)!r} (trained with {getattr(old, key.name)!r})' for key in MODEL
            if key.name != 'dropout' and getattr(new, key.name) != getattr(old, key.name)]
