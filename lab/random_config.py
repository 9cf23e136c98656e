"""Small random configs over all fields of GPTConfig, and how long their sequences must be."""
import contextlib
import dataclasses
import random
import re

from common.errors import UserError
from common.gpt_config import GPTConfig, model_args

VOCAB, WIDTH = 61, 24
LONGEST = 512  # of sequences
# fields whose numbers are no distances between tokens
SIZES = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_kv_head', 'head_dim',
         'mlp_hidden', 'kv_latent', 'kv_head_pattern'}


def random_config(rng: random.Random, windows=(1, 2, 3, 5, 8, 33), **fixed) -> GPTConfig:
    """A small config, at least one period and a layer deep, in which each field has, with even
    odds, one of the values that its metadata names (`tries`). Values that contradict others are
    left out. windows: those of local layers. fixed: fields that stay as given."""
    fields = [f for f in dataclasses.fields(GPTConfig) if f.name not in fixed]
    pattern = fixed.get('layer_pattern') or rng.choice(
        [*GPTConfig.__dataclass_fields__['layer_pattern'].metadata['tries'], 'G',
         ''.join(rng.choice('GL') for _ in range(rng.randint(1, 4)))])
    config = GPTConfig(**dict(
        block_size=160, vocab_size=VOCAB, n_embd=WIDTH, n_head=2, layer_pattern=pattern,
        n_layer=len(pattern) + rng.randint(1, 3), window_size=rng.choice(windows),
        rope_theta=50.0) | fixed)
    for f in rng.sample(fields, len(fields)) * 2:  # the second time it may go with the others
        tries = f.metadata['tries']
        if f.name in ('kv_share', 'window_pattern', 'kv_head_pattern'):
            tries = [aligned_text(rng, config, f.name, windows)]
        if tries and f.name not in ('layer_pattern', 'window_size') and rng.random() < 0.3:
            with contextlib.suppress(UserError):
                config = dataclasses.replace(config, **{f.name: rng.choice(tries)})
    return long_enough(config)


def distances(config: GPTConfig) -> dict[str, int]:
    """Field -> its largest number, of the fields that may be a distance between tokens."""
    changed = {name: value for name, value in model_args(config).items()
               if name not in SIZES and isinstance(value, (int, str))}
    numbers = {name: re.findall(r'\d+', str(value)) for name, value in changed.items()}
    return {name: max(map(int, its)) for name, its in numbers.items() if its}


def long_enough(config: GPTConfig) -> GPTConfig:
    """The config with twice as many positions as the largest distance, or LONGEST."""
    twice = 2 * max(distances(config).values(), default=0)
    return dataclasses.replace(config, block_size=max(config.block_size, min(twice, LONGEST)))


def aligned_text(rng: random.Random, config: GPTConfig, name: str, windows) -> str:
    """A text for a field with a letter or number for each layer of the pattern."""
    kinds = config.layer_pattern
    if name == 'kv_share':
        return ''.join(rng.choice('AB' if kind == 'L' else 'XY') for kind in kinds)
    allowed = windows if name == 'window_pattern' else (0, 1, 2)
    slots = [letter if kind == 'L' or not config.share_global_kv else 'shared'
             for kind, letter in zip(kinds, config.kv_share or map(str, range(len(kinds))))]
    numbers = {slot: rng.choice(allowed) for slot in slots}
    is_window = name == 'window_pattern'
    return ','.join(str(0 if is_window and kind == 'G' else numbers[slot])
                    for kind, slot in zip(kinds, slots))
