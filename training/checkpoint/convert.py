"""The weights of a KV plan from those of a larger one: fewer K/V heads, windows, shared caches."""
import dataclasses

import torch

from common.errors import UserError
from common.gpt_config import GPTConfig, fields_with
from kv.plan import KVPlan, plan_kv
from kv.weights import c_attn_rows, shapes
from training.checkpoint.adapt import check_forms, check_patterns

# the settings that may change
MEMORY = fields_with('trained', 'memory', 'pooled')


def convert_weights(weights: dict, old: GPTConfig, new: GPTConfig) -> dict:
    """Convert the weights of `old` (nanoGPT's names; not modified) to those of `new`, which differs
    only in the settings in MEMORY. UserError: if `check_conversion` raises it."""
    check_conversion(old, new)
    after = plan_kv(new)
    return converted(weights, plan_kv(old), after, shapes(new, after).keys())


def converted(weights: dict, before: KVPlan, after: KVPlan, names) -> dict:
    """The weights `names` of plan `after`, as differentiable functions of those of plan `before`:
    K/V heads are the means of their groups (GQA, Ainslie et al. 2023), those of a shared slot are
    the means over its layers, and a layer that only reads K and V has the rows of its queries."""
    out = dict(weights)
    for was, now in zip(before.layers, after.layers):
        n_kv_head = after.slots[now.slot].n_kv_head
        owners = [layer for layer in (before.layers[i] for i in after.slots[now.slot].layers)
                  if now.owns and layer.owns
                  and (layer is was or averages(before, layer, n_kv_head))]
        same = owners == [was] and before.slots[was.slot].n_kv_head == n_kv_head
        for kind in ('weight', 'bias') if was.owns and not same else ():
            name = f'transformer.h.{{}}.attn.c_attn.{kind}'
            if name.format(now.index) in weights:
                q = weights[name.format(now.index)][:c_attn_rows(before, was)[0]]
                each = [[_pooled(x, before.slots[layer.slot].n_kv_head, n_kv_head)
                         for x in weights[name.format(layer.index)].split(
                             c_attn_rows(before, layer))[1:]] for layer in owners]
                kv = [torch.stack(rows).mean(0) for rows in zip(*each)]
                out[name.format(now.index)] = torch.cat([q, *kv])
    return {name: x for name, x in out.items() if name in names}


def averages(plan: KVPlan, layer, n_kv_head: int) -> bool:
    """Whether a layer has a part in the mean of a shared slot: not with fewer heads, and not with
    latents, which each layer reads in its own way."""
    slot = plan.slots[layer.slot]
    return not slot.latent and slot.n_kv_head % n_kv_head == 0


def _pooled(x, old: int, new: int):
    """The mean over each group of heads, (old * D, ...) -> (new * D, ...)."""
    return x.unflatten(0, (new, old // new, -1)).mean(1).flatten(0, 1)


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
