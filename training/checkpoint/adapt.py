"""Change settings of a checkpoint where its weights allow it: context length, RoPE, windows."""
import dataclasses

import torch

from common.errors import UserError
from common.gpt_config import GPTConfig, fields_with, model_args
from common.settings import COMMAND_LINE, MODEL
from kv.plan import KVPlan, plan_kv
from kv.weights import POSITIONS
from training.checkpoint.file import restoring

# nanoGPT always keeps the checkpoint's values of these, whatever a config file says
NANOGPT_KEPT = ('n_layer', 'n_head', 'n_embd', 'bias')
FREE, CONVERTED = fields_with('trained', 'free', 'memory'), fields_with('trained', 'pooled')
POOLED = 'convert the checkpoint (python -m interop.convert pools its K/V projections) '


def wishes(s) -> dict:
    """Return the model settings in `s` that are meant to change a trained model: those on the
    command line, and with other weights (init_from) those in config files too, except
    `NANOGPT_KEPT`. (On resume a config file describes the run, not a change of it.)"""
    from_files = [] if s.init_from == 'resume' else [name for name in MODEL
                                                     if name not in NANOGPT_KEPT]
    return {name: value for name, value in s.given_fields().items()
            if s.given[name] == COMMAND_LINE or name in from_files}


def keep_trained(s, config: GPTConfig) -> None:
    """Print one line on the settings in config files that the trained `config` overrides. Dropout
    may change. Raises UserError if a setting on the command line differs."""
    names = [name for name, value in s.given_fields().items()
             if name != 'dropout' and _differs(config, name, value)]
    if typed := [name for name in names if s.given[name] == COMMAND_LINE]:
        asked = ', '.join(f'{s.asked(name)} (it has {getattr(config, name)!r})' for name in typed)
        raise UserError(f'the model is trained, and this program cannot change it: {asked}; '
                        f'leave out {", ".join(typed)}')
    if names:
        kept = ', '.join(f'{name} = {getattr(config, name)!r} (not {getattr(s, name)!r})'
                         for name in names)
        print(f'As the model was trained, whatever the config file says: {kept}')


def adapted_config(old: GPTConfig, wanted: dict, asked) -> GPTConfig:
    """Return `old` with the model settings `wanted` by the user, if the weights allow them: those
    without weights (`FREE`), a shorter context, a longer one with RoPE, RoPE for learned positions.
    Raises UserError if others differ. asked: how the user gave a setting, for errors."""
    changes = {name: value for name, value in wanted.items() if _differs(old, name, value)}
    fixed = sorted(changes.keys() - {*FREE, 'block_size', 'pos_embedding'})
    if changes.get('pos_embedding') == 'learned':
        fixed.append('pos_embedding')
    problems = []
    if fixed:
        listed = ', '.join(f'{asked(name)} (trained with {getattr(old, name)!r})'
                           for name in fixed)
        pooled = POOLED if any(name in CONVERTED for name in fixed) else ''
        problems.append(f'the weights cannot change to {listed}: leave out {", ".join(fixed)}, '
                        f'{pooled}or train from scratch '
                        f'(can be changed: block_size, pos_embedding to rope, {", ".join(FREE)})')
    learned = old.pos_embedding == 'learned' and 'pos_embedding' not in changes
    if learned and changes.get('block_size', 0) > old.block_size:
        problems.append(f"{asked('block_size')}: pos_embedding='learned' has positions up to "
                        f'{old.block_size}; for a longer context finetune with '
                        '--pos_embedding=rope as well')
    if problems:
        raise UserError('; '.join(problems))
    new = dataclasses.replace(old, **changes)
    check_patterns(new, changes)
    before, after = plan_kv(old), plan_kv(new)
    for old_layer, new_layer in zip(before.layers, after.layers):
        was, now = before.slots[old_layer.slot].owner, after.slots[new_layer.slot].owner
        if was != now:
            raise UserError(f'layer_pattern={new.layer_pattern!r} would have layer '
                            f'{old_layer.index} use the K/V of layer {now}, but it was trained '
                            f'with those of layer {was} (layer_pattern={old.layer_pattern!r}, '
                            f'kv_share={old.kv_share!r}): give a pattern that shares alike')
    check_forms(before, after)
    return new


def check_patterns(new: GPTConfig, changes) -> None:
    """Raise UserError if a number is changed in whose place the weights have a pattern."""
    for name, pattern in (('window_size', 'window_pattern'), ('n_kv_head', 'kv_head_pattern')):
        if name in changes and pattern not in changes and getattr(new, pattern):
            raise UserError(f'{name}={getattr(new, name)}: the weights have {pattern}='
                            f'{getattr(new, pattern)!r} in its place; give {pattern}, too')


def check_forms(before: KVPlan, after: KVPlan) -> None:
    """Raise UserError if a layer would store another form of K and V than it was trained for."""
    for was, now in zip(before.layers, after.layers):
        old, new = before.slots[was.slot], after.slots[now.slot]
        if any(getattr(old, name) != getattr(new, name)
               for name in ('tied', 'latent', 'offset', 'head_dim')):
            raise UserError(f'layer {now.index} would be {now.kind}, but was trained {was.kind}: '
                            'kv_tied, kv_latent or key_offset differ between the two')


def _differs(config: GPTConfig, name: str, value) -> bool:
    defaults = {'n_kv_head': config.n_head, 'head_dim': config.n_embd // config.n_head,
                'mlp_hidden': 4 * config.n_embd}  # what 0 stands for
    old = getattr(config, name)
    return (value or defaults.get(name, value)) != (old or defaults.get(name, old))


def adapt(saved: dict, old: GPTConfig, new: GPTConfig, origin) -> None:
    """Change the checkpoint `saved` in place to `new` = `adapted_config(old, ...)`: weights,
    moments, model_args. Raises UserError, which names `origin`, if the moments are invalid."""
    saved['model_args'] = model_args(new)
    same = (new.pos_embedding, new.block_size) == (old.pos_embedding, old.block_size)
    if old.pos_embedding != 'learned' or same:
        return
    crop = None if new.pos_embedding == 'rope' else new.block_size
    weight = saved['model'].pop(POSITIONS, None)
    if crop and torch.is_tensor(weight):
        saved['model'][POSITIONS] = weight[:crop].clone()
    if saved.get('optimizer'):
        with restoring(origin, 'optimizer'):
            _adapt_moments(saved['optimizer'], crop)


def _adapt_moments(optimizer: dict, crop: int | None) -> None:
    """Crop or remove AdamW's state for wpe, the second parameter of its first group."""
    state, groups = optimizer['state'], optimizer['param_groups']
    if not state:
        return
    index = next(group['params'][1] for group in groups if 'betas' in group)
    if crop is not None:
        for name, x in state.get(index, {}).items():
            if name.startswith('exp_avg'):
                state[index][name] = x[:crop].clone()
        return

    def renumbered(i):
        return i - 1 if i > index else i
    optimizer['state'] = {renumbered(i): s for i, s in state.items() if i != index}
    for group in groups:
        group['params'] = [renumbered(i) for i in group['params'] if i != index]


def differences(old: GPTConfig, new: GPTConfig) -> list[str]:
    """Describe each changed setting except dropout."""
    names = [name for name in MODEL if name != 'dropout']
    return [f'{name} = {getattr(new, name)!r} (trained with {getattr(old, name)!r})'
            for name in names if getattr(new, name) != getattr(old, name)]


def crop_block_size(model, block_size: int) -> None:
    """Shorten the model's context in place by dropping later positions. Raises UserError if
    block_size is below 1 or above the model's."""
    if not 1 <= block_size <= model.config.block_size:
        raise UserError(f'block_size={block_size}: can only be cropped, to 1 to '
                        f'{model.config.block_size}')
    model.config = dataclasses.replace(model.config, block_size=block_size)
    model.plan = plan_kv(model.config)
    if model.rotary is None:
        wpe = model.transformer.wpe
        wpe.weight = torch.nn.Parameter(wpe.weight.detach()[:block_size].clone())
        wpe.num_embeddings = block_size
