"""What a Hugging Face model remembers of a sequence, by layer.

    full      K and V (or a latent) of every position
    window    K and V of the last `window` positions; chunk: of those since the chunk began
    state     arrays whose size does not depend on the length: recurrent states, and the last
              inputs of short convolutions

`kv.models.build` reads the stores from a cache that transformers makes. Without transformers,
`memory_of_facts` knows the keys of a few model types. No torch here.
"""
import math
from dataclasses import dataclass, field

from config.errors import UserError, shown
from kv.plan import KV_DTYPES, KVPlan, checked_dtype

FULL, WINDOW, CHUNK, STATE = 'full', 'window', 'chunk', 'state'
CONV, RECURRENT = 'conv', 'recurrent'
NANOKV = 'nanokv'
INSTALL = "pip install 'transformers>=5.23'"
FLOAT32_BYTES = 4

KINDS = {'full_attention': FULL, 'sliding_attention': WINDOW}
# Model types that `memory_of_facts` knows. Without a head_dim, the first divide hidden_size by the
# number of heads; the others have a default of their class.
DIVIDED = ('llama', 'mistral', 'mixtral', 'phi3', 'qwen2')
OTHERS = ('qwen3', 'gemma2', 'gemma3_text')
WINDOWS = ('mistral', 'gemma2', 'gemma3_text')  # classes with windows by default


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


def memory_of_facts(config: dict) -> Memory:
    """Read a text model's config without transformers.

    Raises:
        UserError: if its model type is not among a few common ones, or a necessary key is missing.
    """
    model_type = config.get('model_type')
    if model_type not in (*DIVIDED, *OTHERS):
        raise UserError(f'model_type={model_type!r}: without transformers, known are '
                        f"{', '.join((*DIVIDED, *OTHERS))}; for others: {INSTALL}")
    names = 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads', 'head_dim'
    for name in (*names, 'hidden_size', 'sliding_window'):
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise UserError(f'this config has {name}={shown(value)}: must be a whole number of at '
                            'least 1')
    facts = {name: config.get(name) for name in names}
    if not facts['head_dim'] and model_type in DIVIDED and facts['num_attention_heads']:
        facts['head_dim'] = config.get('hidden_size', 0) // facts['num_attention_heads']
    missing = [name for name, value in facts.items() if not value]
    if model_type in WINDOWS and 'sliding_window' not in config:
        missing.append('sliding_window')
    if missing:
        raise UserError(f"this config has no {' and no '.join(missing)}; for the defaults of its "
                        f'class: {INSTALL}')

    n_layer, n_head, heads, width = facts.values()
    kinds, window, assumed = config.get('layer_types'), config.get('sliding_window'), ()
    if kinds is None:
        kinds = ['full_attention'] * n_layer
        if window and config.get('use_sliding_window') is not False:
            assumed = (f'it has windows ({window}), but does not say in which layers: all are '
                       'counted as if they had none, which is an upper bound',)
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(
            not isinstance(kind, str) or kind not in KINDS for kind in kinds):
        raise UserError(f'this config has layer_types={str(kinds)[:60]}: known are '
                        f"{' and '.join(KINDS)}, for each of {n_layer} layers")
    parts = Part('K', heads, width), Part('V', heads, width)
    stores = tuple(Store(KINDS[kind], (i,), parts, window if KINDS[kind] == WINDOW else 0)
                   for i, kind in enumerate(kinds))
    return Memory(stores, n_layer, n_head, width, model_type, assumed)


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
