"""What a Hugging Face model remembers of a sequence, by layer.

    full      K and V (or a latent) of every position
    window    K and V of the last `window` positions; chunk: of those since the chunk began
    state     arrays whose size does not depend on the length: recurrent states, and the last
              inputs of short convolutions

`kv.models.build` reads the stores from a cache that transformers makes. Without transformers,
`memory_of_facts` knows the common keys of a config. No torch here.
"""
import math
import re
from dataclasses import dataclass, field

from config.errors import UserError
from kv.plan import KVPlan

FULL, WINDOW, CHUNK, STATE = 'full', 'window', 'chunk', 'state'
CONV, RECURRENT = 'conv', 'recurrent'
ALWAYS_FLOAT32 = 'float32'
NANOKV = 'nanokv'
INSTALL = "pip install 'transformers>=5.23'"
MOST = 2_000  # layers, or experts of a layer
COUNTS = re.compile(r'(^|_)(num|n)_(\w+_)?(layer|expert)s?$|coder_layers$')

KINDS = {'full_attention': FULL, 'sliding_attention': WINDOW}
COMMON = {'layer_types', 'num_key_value_heads', 'use_cache', 'cache_implementation',
          'max_window_layers', 'sliding_window', 'use_sliding_window', 'chunk_size_feed_forward'}
# A key with one of these in its name may describe memory of which the common keys say nothing.
SUSPICIOUS = re.compile('state|conv|window|chunk|kv_|lora_rank|latent|ssm|mamba|recurr|rnn|lru'
                        '|cache|compress|memory|multi_?query|linear_|delta|index|swa|block_'
                        '|layers?_type|per_layer|attn_|attention_(head_)?type|attention_groups'
                        '|local|global|hybrid|shared_layers|is_encoder|cross_attention|key_value')
HARMLESS = re.compile('output_|initializer_|attn_(implementation|pdrop)|.*(bias|dropout)$'
                      '|num_local_experts|.*scale')
ENCODERS = re.compile('(?i)bert|electra|clip|xlm|MaskedLM|Encoder')


@dataclass(frozen=True)
class Part:
    """Numbers stored at each position: `heads` vectors of `width`."""
    name: str
    heads: int
    width: int


@dataclass(frozen=True)
class State:
    """An array per sequence. A convolution needs kernel - 1 inputs of each channel.

    dtype: '' = the model's compute dtype. spare: inputs of a convolution that transformers keeps
    beyond those.
    """
    kind: str
    shape: tuple[int, ...]
    dtype: str = ''
    spare: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Store:
    """What one layer stores. layers: that layer, then those that read its K and V."""
    kind: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    window: int = 0
    states: tuple[State, ...] = ()

    def positions(self, length: int) -> int:
        """Positions needed to go on after `length` tokens."""
        return min(length, self.window) if self.window else length


@dataclass(frozen=True)
class Memory:
    """A model's memory: `stores`, by layer. assumed: what the config leaves open, in words.
    defaults: where settings that it leaves out come from; filled: those settings."""
    stores: tuple[Store, ...]
    n_layer: int
    n_head: int
    head_dim: int
    model_type: str
    assumed: tuple[str, ...] = ()
    defaults: str = ''
    filled: dict = field(default_factory=dict)


def check_sizes(config: dict) -> None:
    """Raise UserError for numbers of layers or experts with which building would never end."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value)
        elif type(value) is int and value > MOST and COUNTS.search(str(name)):
            raise UserError(f'this config has {name}={value:,}: at most {MOST:,} make sense')


def memory_of_facts(config: dict, why: str) -> Memory:
    """Read the common keys of a text model's config.

    why: what to do about other keys, as the end of a sentence.

    Raises:
        UserError: if a necessary fact is missing or wrong, or another key may describe memory.
    """
    check_sizes(config)
    model_type, archs = str(config.get('model_type') or '?'), config.get('architectures')
    if ENCODERS.search(f'{model_type} {archs}'):
        raise UserError(f'{model_type} may be an encoder, which has no KV cache; {why}')
    for name, value in config.items():
        if value and name not in COMMON and SUSPICIOUS.search(name) and not HARMLESS.match(name):
            raise UserError(f'this config has {name}={str(value)[:60]}, and only its class knows '
                            f'what that stores; {why}')

    def count(*names, default=None) -> int:
        name = next((name for name in names if config.get(name) is not None), None)
        value = config[name] if name else default
        if type(value) is not int or value < 1:
            given = f'{name}={value!r}' if name else f"no {' or '.join(names)}"
            raise UserError(f'this config has {given}: a whole number of at least 1 is needed; '
                            f'{why}')
        return value

    n_layer = count('num_hidden_layers', 'n_layer')
    n_head = count('num_attention_heads', 'n_head')
    heads = count('num_key_value_heads', default=n_head)
    if heads > n_head:
        raise UserError(f'this config has {heads} K/V heads and {n_head} query heads')
    width = config.get('head_dim')
    if width is None:
        hidden = count('hidden_size', 'n_embd')
        if hidden % n_head:
            raise UserError(f'this config has a width of {hidden}, which is not a multiple of its '
                            f'{n_head} heads, and no head_dim')
        width = hidden // n_head
    width = count('head_dim', default=width)
    kinds, assumed = config.get('layer_types'), ()
    windows = config.get('sliding_window') and config.get('use_sliding_window') is not False
    if kinds is None:
        kinds = ['full_attention'] * n_layer
        if windows:
            assumed = (f"it has windows ({config['sliding_window']}), but does not say in which "
                       'layers: all are counted as if they had none, which is an upper bound',)
    if not (isinstance(kinds, list) and len(kinds) == n_layer
            and all(isinstance(kind, str) and kind in KINDS for kind in kinds)):
        raise UserError(f'this config has layer_types={str(kinds)[:60]}: known are '
                        f"{' and '.join(KINDS)}, for each of {n_layer} layers; {why}")
    parts = Part('K', heads, width), Part('V', heads, width)
    stores = []
    for i, kind in enumerate(kinds):
        window = count('sliding_window') if KINDS[kind] == WINDOW else 0
        stores.append(Store(KINDS[kind], (i,), parts, window))
    return Memory(tuple(stores), n_layer, n_head, width, model_type, assumed)


def memory_of_plan(plan: KVPlan) -> Memory:
    """A KV plan as the memory of a model."""
    stores = []
    for slot in plan.slots:
        one = Part('latent' if slot.latent else 'K = V' if slot.tied else 'K', slot.n_kv_head,
                   slot.head_dim)
        parts = (one,) if slot.tied else (one, Part('V', slot.n_kv_head, slot.head_dim))
        half = (State(RECURRENT, (slot.n_kv_head, slot.head_dim // 2)),) * slot.offset
        stores.append(Store(WINDOW if slot.window else FULL, slot.layers, parts, slot.window, half))
    return Memory(tuple(stores), len(plan.layers), plan.n_head, plan.head_dim, NANOKV)
