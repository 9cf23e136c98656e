"""Configs of each mechanism that changes what a cache stores or how layers attend, and of pairs.
(Random combinations of them: `tests.helpers.models.configs`.)"""
import dataclasses
import random
from itertools import combinations

from common.gpt_config import GPTConfig
from lab.conform import random_config
from tests.helpers.models import FULL_STACK

# as changes of a stack with head_dim=8 and two or more query heads, such as STACK
CHANGES = {
    'sink': dict(attn_sink=True),
    'partial RoPE': dict(rope_fraction_global=0.5),
    'NoPE': dict(rope_fraction_global=0.0),
    'key offset': dict(key_offset=True),
    'global K = V': dict(kv_tied='global'),
    'K = V': dict(kv_tied='all'),
    'latents': dict(kv_latent=16, rope_fraction_global=0.0),
    'latents with learned positions': dict(
        kv_latent=24, pos_embedding='learned', share_global_kv=False, qk_norm=False),
    'layers that differ': dict(layer_pattern='LLG', kv_share='', window_pattern='4,9,0',
                               kv_head_pattern='1,2,0'),
    'ReLU squared': dict(gelu='relu2'),
    'many': dict(kv_latent=16, rope_fraction_global=0.0, attn_sink=True,
                 kv_quant_train='int8', n_kv_head=2, layer_pattern='LG', kv_share='',
                 share_global_kv=False, bias=True)}
STACK = dict(FULL_STACK, head_dim=8)
MECHANISMS = {name: STACK | changes for name, changes in CHANGES.items()}


def traits(config: GPTConfig) -> set[tuple]:
    """(field, value) of settings that have few values; (field, True) of others that are not at
    their default; which kinds of layers there are."""
    few = {f.name for f in dataclasses.fields(config)
           if f.metadata['choices'] or isinstance(f.default, bool)} | {'rope_fraction_global'}
    others = {'n_kv_head', 'kv_share', 'kv_latent', 'window_pattern', 'kv_head_pattern',
              'rope_theta_global'}
    changed = {(name, value if name in few else True) for name, value in vars(config).items()
               if name in few | others and value != GPTConfig.__dataclass_fields__[name].default}
    return changed | {('layers', ''.join(sorted(set(config.layer_pattern))))}


def pairs(n_candidates=1500, **fixed) -> list[GPTConfig]:
    """A few random configs in which each two traits occur together that do so in any of the
    candidates: of those left, the one with the most new pairs is next."""
    left = [random_config(random.Random(seed), **fixed) for seed in range(n_candidates)]
    left = [(config, set(combinations(sorted(traits(config), key=str), 2))) for config in left]
    chosen, seen = [], set()
    while True:
        config, new = max(left, key=lambda candidate: len(candidate[1] - seen))
        if new <= seen:
            return chosen
        chosen.append(config)
        seen |= new
