"""Convert a trained model to a smaller KV cache: fewer K/V heads, windows, shared caches.

    python train.py config/train_rope_mha.py                                   # any model
    python -m interop.convert out-rope-mha out-mqa --n_kv_head=1               # MQA
    python -m interop.convert out-rope-mha out-small config/train_mqa_local.py # a config's settings
    python train.py config/train_rope_mha.py --init_from=resume --out_dir=out-mqa --n_kv_head=1 \\
        --max_iters=70

K/V heads are pooled by their mean; layers that share a cache use the K and V of the first. Sinks,
offset keys, tied K and V, and latents can be neither added nor removed. Settings of a config that a
conversion cannot change are printed, and stay as they were. The converted model is
worse until it is trained more: the GQA paper (Ainslie et al. 2023) needs 5% of the original steps.
The new checkpoint is at iteration 0, without optimizer state.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import dataclasses
import sys
from pathlib import Path

import torch

import configurator
from common.errors import UserError
from common.gpt_config import GPTConfig, fields_with, model_args
from common.settings import COMMAND_LINE, Model
from kv.plan import plan_kv
from kv.weights import c_attn_rows
from model import GPT
from training.checkpoint.adapt import check_forms, check_patterns, keep_trained
from training.checkpoint.file import config_of, load_checkpoint, load_weights
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.load_model import model_of

# the settings that a conversion may change
MEMORY = fields_with('trained', 'memory', 'pooled')


def convert_weights(weights: dict, old: GPTConfig, new: GPTConfig) -> dict:
    """Convert the weights of `old` (nanoGPT's names; not modified) to those of `new`, which differs
    only in the settings in MEMORY. UserError: if `check_conversion` raises it."""
    check_conversion(old, new)
    before, after = plan_kv(old), plan_kv(new)
    out = dict(weights)
    for was, now in zip(before.layers, after.layers):
        slot, n_kv_head = before.slots[was.slot], after.slots[now.slot].n_kv_head
        groups = n_kv_head, slot.n_kv_head // n_kv_head, -1
        prefix = f'transformer.h.{now.index}.attn.'
        for name in (prefix + 'c_attn.weight', prefix + 'c_attn.bias'):
            if name in weights and was.owns:
                q, *kv = weights[name].split(c_attn_rows(before, was))
                # (heads * D, ...) -> (new heads * D, ...): the mean over each group of heads
                pooled = [x.unflatten(0, groups).mean(1).flatten(0, 1) for x in kv if now.owns]
                out[name] = torch.cat([q, *pooled])
    with torch.device('meta'):
        kept = GPT(new).state_dict()  # without what only owners of K and V have
    return {name: x for name, x in out.items() if name in kept}


def check_conversion(old: GPTConfig, new: GPTConfig) -> None:
    """Raise UserError if a setting not in MEMORY differs, K/V heads cannot be pooled evenly, or a
    layer would own K and V that it was trained without or in another form."""
    for f in dataclasses.fields(GPTConfig):
        was, now = getattr(old, f.name), getattr(new, f.name)
        if f.name not in MEMORY and f.name != 'dropout' and was != now:
            raise UserError(f'{f.name}={now!r}, but the weights have {f.name}={was!r}: a '
                            f'conversion can change {", ".join(MEMORY)}')
    check_patterns(new, [name for name in MEMORY if getattr(old, name) != getattr(new, name)])
    before, after = plan_kv(old), plan_kv(new)
    check_forms(before, after)
    for was, now in zip(before.layers, after.layers):
        if now.owns and not was.owns:
            raise UserError(f'layer {now.index} would need K and V of its own, but was trained to '
                            f'use those of layer {before.slots[was.slot].owner}: sharing can be '
                            'added, not undone')
        had, has = (plan.slots[layer.slot].n_kv_head for plan, layer in
                    ((before, was), (after, now)))
        if now.owns and had % has:
            raise UserError(f'n_kv_head={has}: the {had} K/V heads of layer {now.index} cannot be '
                            'pooled evenly into that number')


def convert_checkpoint(source: Path, changes: dict) -> dict:
    """Return the checkpoint at `source` with `changes`, at iteration 0 and without optimizer state.
    UserError: if the checkpoint is unreadable or cannot be converted (`check_conversion`)."""
    saved = load_checkpoint(source)
    old = config_of(saved, source)
    try:
        new = dataclasses.replace(old, **changes)
    except ValueError as e:
        raise UserError(f'{source}: {e}') from e
    weights = model_of(saved, source).state_dict()  # checked
    model = GPT(new)
    load_weights(model, {'model': convert_weights(weights, old, new)}, source)
    return new_checkpoint(model, new, saved.get('config', {}) | changes,
                          tokens=saved.get('tokens', ''), meta=saved.get('meta'))


def new_checkpoint(model: GPT, config: GPTConfig, settings: dict, **more) -> dict:
    """A checkpoint at iteration 0 without optimizer state. settings: train.py's, but defaults."""
    return {'model': model.state_dict(), 'optimizer': {'state': {}, 'param_groups': []},
            'model_args': model_args(config), 'iter_num': 0, 'best_val_loss': torch.tensor(1e9),
            'holds_best': False, 'config': settings, **more}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    wants_help = {'-h', '--help'} & set(argv)
    s = configurator.parse(Model, ['--help'] if wants_help else argv[2:], usage=__doc__)
    if len(argv) < 2 or argv[0].startswith('-') or argv[1].startswith('-'):
        raise UserError('give the folder of the checkpoint and one for the new checkpoint, then '
                        'the changes: python -m interop.convert out out-mqa --n_kv_head=1')
    source, target = Path(argv[0], 'ckpt.pt'), Path(argv[1], 'ckpt.pt')
    if target.exists():
        raise UserError(f'{target} is there already: delete it or give another folder')
    # a config file may also have settings that a conversion cannot change
    changes = {name: value for name, value in s.given_fields().items()
               if name in (*MEMORY, 'dropout') or s.given[name] == COMMAND_LINE}
    if not changes:
        raise UserError(f'nothing to change: give one or more of {", ".join(MEMORY)}')
    checkpoint = convert_checkpoint(source, changes)
    CheckpointManager(target.parent).save(checkpoint)
    keep_trained(s, config_of(checkpoint, target))
    print(f'{target}: ' + ', '.join(f'{name} = {value!r}' for name, value in changes.items()))


if __name__ == '__main__':
    configurator.run_program(main)
