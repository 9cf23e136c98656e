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
from kv.plan import KV_DTYPES, KVPlan, checked_dtype

FULL, WINDOW, CHUNK, STATE = 'full', 'window', 'chunk', 'state'
CONV, RECURRENT = 'conv', 'recurrent'
NANOKV = 'nanokv'
INSTALL = "pip install 'transformers>=5.23'"
FLOAT32_BYTES = 4

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

    float32: always in that dtype; otherwise in the model's. spare: inputs of a convolution that
    transformers keeps beyond those.
    """
    kind: str
    shape: tuple[int, ...]
    float32: bool = False
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

    def position_nbytes(self, kv_dtype: str) -> int:
        """Bytes of one position: elements, and a scale for each head's vector if quantized."""
        element, scale = KV_DTYPES[checked_dtype(kv_dtype)]
        return sum(part.heads * int(part.width * element + scale) for part in self.parts)

    def states_nbytes(self, dtype: str, spare: bool = False) -> int:
        """Bytes of the states of one sequence, in `dtype` where they are not always float32.
        spare: with the inputs of convolutions that only transformers keeps."""
        size = KV_DTYPES[checked_dtype(dtype)][0]
        return sum((state.size + spare * state.spare * state.shape[0])
                   * (FLOAT32_BYTES if state.float32 else size) for state in self.states)


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


def memory_of_facts(config: dict, why: str) -> Memory:
    """Read the common keys of a text model's config.

    why: what to do about other keys, as the end of a sentence.

    Raises:
        UserError: if a necessary fact is missing or wrong, or another key may describe memory.
    """
    model_type = str(config.get('model_type') or '?')
    if ENCODERS.search(f"{model_type} {config.get('architectures')}"):
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
    given = config.get('head_dim') is not None
    width = count('head_dim') * n_head if given else count('hidden_size', 'n_embd')
    if heads > n_head or width % n_head:
        raise UserError(f'this config has {heads} K/V heads, {n_head} query heads and a width of '
                        f'{width:,}, which contradict each other')

    kinds, assumed = config.get('layer_types'), ()
    if kinds is None:
        kinds = ['full_attention'] * n_layer
        if config.get('sliding_window') and config.get('use_sliding_window') is not False:
            assumed = (f"it has windows ({config['sliding_window']}), but does not say in which "
                       'layers: all are counted as if they had none, which is an upper bound',)
    if not (isinstance(kinds, list) and len(kinds) == n_layer
            and all(isinstance(kind, str) and kind in KINDS for kind in kinds)):
        raise UserError(f'this config has layer_types={str(kinds)[:60]}: known are '
                        f"{' and '.join(KINDS)}, for each of {n_layer} layers; {why}")
    parts = tuple(Part(name, heads, width // n_head) for name in ('K', 'V'))
    stores = tuple(Store(KINDS[kind], (i,), parts,
                         count('sliding_window') if KINDS[kind] == WINDOW else 0)
                   for i, kind in enumerate(kinds))
    return Memory(stores, n_layer, n_head, width // n_head, model_type, assumed)


def memory_of_plan(plan: KVPlan) -> Memory:
    """A KV plan as the memory of a model."""
    stores = []
    for slot in plan.slots:
        shape = slot.n_kv_head, slot.head_dim
        names = ('latent' if slot.latent else 'K = V',) if slot.tied else ('K', 'V')
        half = State(RECURRENT, (slot.n_kv_head, slot.head_dim // 2))
        stores.append(Store(WINDOW if slot.window else FULL, slot.layers,
                            tuple(Part(name, *shape) for name in names), slot.window,
                            (half,) * slot.offset))
    return Memory(tuple(stores), len(plan.layers), plan.n_head, plan.head_dim, NANOKV)
