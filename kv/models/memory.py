"""What a model of Hugging Face's transformers remembers of a sequence, from the facts in its
config. No torch here.

    full      K and V (or a latent) of every position
    window    K and V of the last `window` positions
    state     arrays whose size does not depend on the length: recurrent states, and the last
              inputs of short convolutions

Facts are read by the name of their key (`sliding_window`, `kv_lora_rank`, ...), whatever the
family of the model, so a new family that uses known mechanisms needs no code. A key that sounds
like memory and was not read is listed in `Memory.unread`: the account may lack something.
"""
import re
from dataclasses import dataclass, replace

from config.errors import UserError
from kv.models.states import State, states_of

FULL, WINDOW, STATE = 'full', 'window', 'state'

# Names of kinds of layers: what transformers writes today, and what older config.json files have.
ATTENTION = {'full_attention', 'attention', 'global', 'global_attention', 'full', 'hybrid',
             'indexed_attention', 'sparse'}
WINDOWED = {'sliding_attention', 'chunked_attention', 'local', 'local_attention', 'sliding',
            'hybrid_sliding'}
STATEFUL = {'linear_attention', 'mamba', 'mamba2', 'recurrent', 'conv', 'hybrid', 'hybrid_sliding'}
EMPTY = {'mlp', 'moe', 'dense', 'dummy'}

# A key with one of these in its name may describe memory ...
SUSPICIOUS = re.compile('state|conv|window|chunk|lora_rank|latent|ssm|mamba|recurr|rnn|lru|compress'
                        '|memory|cache|kv_|linear_|delta|index_|_swa|swa_|block_type|layer_type'
                        '|attn_type|attention_type|local_|global_|hybrid|shared_layers')
# ... but for these, which do not, or only beside another key that has been read
HARMLESS = re.compile('(q_lora_rank|mlp_layer_types|num_local_experts|.*shared_expert.*|mamba_expand'
                      '|(mamba_)?chunk_size|chunk_size_feed_forward|mamba_dt_rank'
                      '|index_(topk|n_heads)|max_window_layers|ssm_multipliers)$')
# other ways to say what layer_types says
SAME_AS_LAYER_TYPES = {
    'sliding_window_pattern', '_sliding_window_pattern', 'full_attention_interval',
    'layers_block_type', 'block_types', 'hybrid_layer_ids', 'hybrid_override_pattern',
    'attn_layer_indices', 'full_attn_idxs', 'kv_sharing_modes', 'attn_type_list'}


@dataclass(frozen=True)
class Part:
    """Numbers stored at each position: `heads` vectors of `width`."""
    name: str
    heads: int
    width: int


@dataclass(frozen=True)
class Store:
    """What layer `owner` writes and `layers` (the owner first) read."""
    kind: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    window: int = 0
    states: tuple[State, ...] = ()

    @property
    def owner(self) -> int:
        return self.layers[0]

    def positions(self, length: int) -> int:
        """Positions needed to go on after `length` tokens."""
        return min(length, self.window) if self.kind == WINDOW else length


@dataclass(frozen=True)
class Memory:
    """A model's memory: `stores` in the order of their owners. `unread`: keys of the config that
    sound like memory but were not read, with their values. `assumed`: what it does not say, in
    words."""
    stores: tuple[Store, ...]
    n_layer: int
    n_head: int
    head_dim: int
    model_type: str
    unread: dict
    assumed: tuple[str, ...] = ()


class Facts:
    """A config as a dict that knows which of its keys have been read."""

    def __init__(self, config: dict):
        self.config, self.read = config, set()

    def get(self, *names, default=None):
        """Return the first of these keys that has a value; default without one."""
        self.read.update(names)
        return next((self.config[name] for name in names if self.config.get(name) is not None),
                    default)

    def count(self, *names, default: int | None = None) -> int:
        """The same for a whole number of at least 1. Raises UserError for anything else."""
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            where = next((name for name in names if self.config.get(name) is not None), None)
            given = f'{where}={value!r}' if where else f"no {' or '.join(names)}"
            raise UserError(f'this config has {given}: a whole number of at least 1 is needed')
        return value

    def any(self, holds) -> bool:
        """Whether there is a key whose name `holds`."""
        found = list(filter(holds, self.config))
        self.read.update(found)
        return bool(found)

    def unread(self) -> dict:
        return {name: value for name, value in sorted(self.config.items())
                if name not in self.read and value and type(value) in (int, list, dict)
                and SUSPICIOUS.search(name) and not HARMLESS.match(name)}


def memory_of(config: dict, complete: bool = True) -> Memory:
    """Read a config.

    config: the contents of config.json, of the text model alone. complete: whether the defaults of
    its class are filled in (`kv.models.config.completed`).

    Raises:
        UserError: if a necessary fact is missing, is no whole number, or contradicts another.
    """
    facts = Facts(config)
    n_layer = facts.count('num_hidden_layers', 'n_layer', 'n_layers', 'num_layers',
                          'decoder_layers')
    kinds, assumed = kinds_of(facts, n_layer, complete)
    n_layer = len(kinds)
    writers = writers_of(facts, kinds)
    layers = [store_of(facts, i, kind) for i, kind in enumerate(kinds)]
    readers = {}
    for i, writer in enumerate(writers):
        readers.setdefault(writer, []).append(i)
    stores = tuple(replace(layers[i], layers=tuple(readers[i])) for i in sorted(readers)
                   if layers[i].parts or layers[i].states)
    n_head = facts.get('num_attention_heads', 'n_head', 'n_heads', 'num_heads', default=0)
    widths = [part.width for store in stores for part in store.parts]
    return Memory(stores, n_layer, n_head, max(widths, default=0), config.get('model_type') or '?',
                  facts.unread(), assumed)


def kinds_of(facts: Facts, n_layer: int, complete: bool) -> tuple[list[str], tuple[str, ...]]:
    """The kind of each layer, as `layer_types` names them, and what had to be assumed."""
    kinds, assumed = facts.get('layer_types', 'layers_block_type'), ()
    if kinds is None:
        kinds = _from_pattern(facts, n_layer)
    if kinds is None:
        window = facts.get('sliding_window', 'sliding_window_size', 'attention_chunk_size')
        local = 'sliding_attention' if facts.get('sliding_window', 'sliding_window_size') else (
            'chunked_attention' if window else 'full_attention')
        if window and not complete:
            assumed = (f'this config has windows of {window}, but does not say in which layers: '
                       'all are counted as if they had none, which is an upper bound',)
            local = 'full_attention'
        kinds = [local] * n_layer
    facts.read |= SAME_AS_LAYER_TYPES
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f'this config has layer_types={kinds!r}: a list of names is needed')
    if len(kinds) < n_layer:
        raise UserError(f'this config has num_hidden_layers={n_layer}, but layer_types for '
                        f'{len(kinds)} of them')
    known = ATTENTION | WINDOWED | STATEFUL | EMPTY
    for kind in kinds:
        if kind not in known:
            raise UserError(f'this config has a layer of type {kind!r}, which is not accounted '
                            f"for; known are {', '.join(sorted(known))}")
    return kinds, assumed


def _from_pattern(facts: Facts, n_layer: int) -> list[str] | None:
    """The kinds of layers by keys older than `layer_types`; None without them."""
    window, chunk = facts.get('sliding_window', 'sliding_window_size'), facts.get(
        'attention_chunk_size')
    local = 'sliding_attention' if window else 'chunked_attention' if chunk else 'full_attention'
    every = facts.get('sliding_window_pattern', '_sliding_window_pattern')
    if isinstance(every, int) and every > 0:
        return ['full_attention' if (i + 1) % every == 0 else local for i in range(n_layer)]
    if isinstance(every, str) and every:  # 'LLLG'
        return [local if every[i % len(every)] == 'L' else 'full_attention'
                for i in range(n_layer)]
    use = facts.get('use_sliding_window')
    if use is False:
        return ['full_attention'] * n_layer
    if use and 'max_window_layers' in facts.config:  # Qwen 2: only the layers from there on
        first = facts.get('max_window_layers')
        return ['full_attention' if i < first else local for i in range(n_layer)]
    every = facts.get('full_attention_interval')
    if every:
        return ['full_attention' if (i + 1) % every == 0 else 'linear_attention'
                for i in range(n_layer)]
    if facts.get('state_size', 'ssm_state_size') and not facts.get('num_key_value_heads'):
        return ['linear_attention'] * n_layer
    return None


def writers_of(facts: Facts, kinds: list[str]) -> list[int]:
    """The layer whose K and V each layer reads: itself, or an earlier one of its kind."""
    n = len(kinds)
    sources = facts.get('kv_source_layers')
    if sources:
        return list(sources)
    shared = facts.get('num_kv_shared_layers', default=0)
    if not isinstance(shared, int) or not 0 <= shared < n:
        raise UserError(f'this config has num_kv_shared_layers={shared!r} of {n} layers')
    writers = list(range(n))
    for i in range(n - shared, n):  # Gemma 3n: the last layer of this kind that has its own
        same = [j for j in range(n - shared) if kinds[j] == kinds[i]]
        if not same:
            raise UserError(f'this config has num_kv_shared_layers={shared}, but no layer before '
                            f'them is of type {kinds[i]!r} as layer {i} is')
        writers[i] = same[-1]
    return writers


def store_of(facts: Facts, i: int, kind: str) -> Store:
    """What layer `i` would store for itself."""
    parts, window = (), 0
    states = states_of(facts, kind) if kind in STATEFUL else ()
    if kind in WINDOWED:
        window = facts.count('attention_chunk_size') if kind == 'chunked_attention' else (
            facts.count('sliding_window', 'sliding_window_size', 'attention_window_size',
                        'window_size'))
    if kind in WINDOWED or kind in ATTENTION:
        parts = parts_of(layer_facts(facts, i), kind)
    kept = WINDOW if window else FULL if parts else STATE
    return Store(kept, (i,), parts, window, states)


def layer_facts(facts: Facts, i: int) -> Facts:
    """The facts with those that the config gives for layer `i` alone."""
    own = {int(name): value for name, value in (facts.get('per_layer_config') or {}).items()}
    own = own.get(i)
    if not own:
        return facts
    mine = Facts(facts.config | own)
    mine.read = facts.read
    return mine


def parts_of(facts: Facts, kind: str) -> tuple[Part, ...]:
    """What attention of this kind stores at each position."""
    latent = facts.get('kv_lora_rank')
    if latent:  # multi-head latent attention: the latent, and one key with RoPE for all heads
        parts = [Part('latent', 1, latent), Part('RoPE key', 1, facts.count('qk_rope_head_dim'))]
    else:
        parts = _keys_and_values(facts, kind)
    if kind == 'indexed_attention':  # DeepSeek sparse attention: one key of the indexer
        parts.append(Part('indexer key', 1, facts.count('index_head_dim')))
    return tuple(parts)


def _keys_and_values(facts: Facts, kind: str) -> list[Part]:
    n_head = facts.count('num_attention_heads', 'n_head', 'n_heads', 'num_heads',
                         'decoder_attention_heads')
    heads = facts.get('num_key_value_heads', 'num_kv_heads', 'n_head_kv', default=n_head)
    attention = facts.get('attn_config')
    if isinstance(attention, dict):  # MPT, DBRX
        heads = attention.get('kv_n_heads') or heads
    if facts.get('multi_query') and not facts.get('new_decoder_architecture'):  # Falcon, StarCoder
        heads = 1
    width = facts.get('head_dim', 'attention_head_dim', 'kv_channels')
    if width is None:
        hidden = facts.count('hidden_size', 'n_embd', 'd_model')
        if hidden % n_head:
            raise UserError(f'this config has a width of {hidden}, which is not a multiple of its '
                            f'{n_head} heads, and no head_dim')
        width = hidden // n_head
    values = facts.get('v_head_dim', default=width)
    prefix = 'swa_' if kind in WINDOWED else 'global_'
    if prefix == 'swa_' or kind in ATTENTION:
        heads = facts.get(f'{prefix}num_key_value_heads', f'num_{prefix}key_value_heads',
                          default=heads)
        width = facts.get(f'{prefix}head_dim', default=width)
        values = facts.get(f'{prefix}v_head_dim', default=values if 'v_head_dim' in facts.config
                           else width)
    for name, value in (('K/V heads', heads), ('head_dim', width), ('v_head_dim', values)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f'this config has {value!r} for its {name}: a whole number of at '
                            'least 1 is needed')
    return [Part('K', heads, width), Part('V', heads, values)]
