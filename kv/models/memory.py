"""What a Hugging Face model remembers of a sequence, by layer.

    full      K and V (or a latent) of every position
    window    K and V of the last `window` positions; chunk: of those since the chunk began
    blocks    an entry for every complete block of `stride` positions (DeepSeek-V4)
    state     arrays whose size does not depend on the length: recurrent states, and the last
              inputs of short convolutions

`kv.models.build` reads the stores from a cache that transformers makes. Without transformers,
`memory_of_facts` knows the keys of a few model types. No torch here.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

from config.errors import UserError, shown
from kv.plan import KV_DTYPES, KVPlan, checked_dtype

FULL, WINDOW, CHUNK, BLOCKS, STATE = 'full', 'window', 'chunk', 'blocks', 'state'
CONV, RECURRENT = 'conv', 'recurrent'
NANOKV = 'nanokv'
INSTALL = "pip install 'transformers>=5.23'"
FLOAT32_BYTES = 4

KNOWN = 'llama', 'mistral', 'mixtral', 'phi3', 'qwen2', 'qwen3'  # to `memory_of_facts`


class Part(NamedTuple):
    """Numbers stored at each position: `heads` vectors of `width`."""
    name: str
    heads: int
    width: int


@dataclass(frozen=True)
class State:
    """An array per sequence. A convolution needs kernel - 1 inputs of each channel.

    float32: always in that dtype; otherwise in the model's. of_keys: in that of K, or in float32
    where K is quantized. spare: inputs of a convolution that transformers keeps beyond those.
    """
    kind: str
    shape: tuple[int, ...]
    float32: bool = False
    spare: int = 0
    of_keys: bool = False


@dataclass(frozen=True)
class Store:
    """What one layer stores. layers: that layer, then those that read its K and V. stride: tokens
    for which it has one entry. waiting: numbers kept, in the model's dtype, for each token of the
    block that has begun; overlaps: and half of them for each token of the block before. trimmed:
    transformers stores no more than the window."""
    kind: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    window: int = 0
    states: tuple[State, ...] = ()
    stride: int = 1
    waiting: int = 0
    overlaps: bool = False
    trimmed: bool = True

    def positions(self, length: int) -> int:
        """Positions needed to go on after `length` tokens."""
        if self.window:
            return min(length, self.window)
        return length // self.stride

    def position_nbytes(self, kv_dtype: str) -> int:
        """Bytes of one position: elements, and a scale for each head's vector if quantized."""
        element, scale = KV_DTYPES[checked_dtype(kv_dtype)]
        return sum(part.heads * int(part.width * element + scale) for part in self.parts)

    def states_nbytes(self, dtype: str, kv_dtype: str, length: int, spare: bool = False) -> int:
        """Bytes of the states of one sequence of `length` tokens, and of its last block. dtype: the
        model's. spare: with the inputs of convolutions that only transformers keeps."""
        total = KV_DTYPES[dtype][0] * self.waiting * (length % self.stride)
        if self.overlaps and length >= self.stride:
            total += KV_DTYPES[dtype][0] * self.waiting * self.stride // 2
        for state in self.states:
            size, scale = KV_DTYPES[checked_dtype(kv_dtype if state.of_keys else dtype)]
            if state.float32 or scale:
                size = FLOAT32_BYTES
            total += size * (math.prod(state.shape) + spare * state.spare * state.shape[0])
        return total


@dataclass(frozen=True)
class Memory:
    """A model's memory: `stores`, by layer. assumed: what the config leaves open, in words.
    defaults: where settings that it leaves out come from."""
    stores: tuple[Store, ...]
    n_layer: int
    n_head: int
    head_dim: int
    model_type: str
    assumed: tuple[str, ...] = ()
    defaults: str = ''


def memory_of_facts(config: dict) -> Memory:
    """Read a text model's config without transformers.

    Raises:
        UserError: if the model type is not in KNOWN, a necessary key is missing or wrong, or a
            layer has other than full attention.
    """
    model_type = config.get('model_type')
    if model_type not in KNOWN:
        raise UserError(f'model_type={model_type!r}: without transformers, known are '
                        f"{', '.join(KNOWN)}; for others: {INSTALL}")

    def whole(name):
        value = config.get(name)
        if type(value) is not int or value < 1:
            raise UserError(f'this config has {name}={shown(value)}: must be a whole number of at '
                            f'least 1; for the defaults of its class: {INSTALL}')
        return value
    n_layer, n_head, heads = map(whole, ('num_hidden_layers', 'num_attention_heads',
                                         'num_key_value_heads'))
    divided = config.get('head_dim') is None and model_type != 'qwen3'  # whose class has a default
    width = whole('hidden_size') // n_head if divided else whole('head_dim')

    window = config.get('sliding_window', model_type == 'mistral')  # whose class has one
    kinds = config.get('layer_types')
    if kinds is None and not (window and config.get('use_sliding_window') is not False):
        kinds = ['full_attention'] * n_layer
    if kinds != ['full_attention'] * n_layer:
        raise UserError('without transformers, only models are read whose layers all have full '
                        f'attention; this config has layer_types={str(kinds)[:60]} and '
                        f'sliding_window={shown(window)}: {INSTALL}')
    parts = Part('K', heads, width), Part('V', heads, width)
    stores = tuple(Store(FULL, (i,), parts) for i in range(n_layer))
    return Memory(stores, n_layer, n_head, width, model_type)


def memory_of_plan(plan: KVPlan) -> Memory:
    """A KV plan as the memory of a model."""
    stores = []
    for slot in plan.slots:
        shape = slot.n_kv_head, slot.head_dim
        names = ('latent' if slot.latent else 'K = V',) if slot.tied else ('K', 'V')
        half_key = State(RECURRENT, (slot.n_kv_head, slot.head_dim // 2), of_keys=True)
        stores.append(Store(WINDOW if slot.window else FULL, slot.layers,
                            tuple(Part(name, *shape) for name in names), slot.window,
                            (half_key,) if slot.offset else ()))
    return Memory(tuple(stores), len(plan.layers), plan.n_head, plan.head_dim, NANOKV)
