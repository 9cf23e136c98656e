"""What a Hugging Face model remembers of a sequence, from the facts in its config. No torch here.

    full      K and V (or a latent) of every position
    window    K and V of the last `window` positions; chunk: of those since the chunk began
    state     arrays whose size does not depend on the length: recurrent states, and the last
              inputs of short convolutions

Facts are read by the names of keys (`sliding_window`, `kv_lora_rank`, ...), whatever the family, so
a new family that uses known mechanisms needs no code. Keys that sound like memory but were not read
are listed in `Memory.unread`: the account may lack something.
"""
import re
from dataclasses import dataclass, field, replace

from config.errors import UserError
from kv.models.kinds import ATTENTION, CHUNKED, STATEFUL, WINDOWED, encoder_in, kinds_of
from kv.models.states import State, states_of, width_of_heads

MOST_LAYERS = 10_000
FULL, WINDOW, CHUNK, STATE = 'full', 'window', 'chunk', 'state'
TYPES = {bool: 'true or false', str: 'text', list: 'a list', dict: 'an object'}
# lists with an entry for each layer
PER_LAYER = ('attn_type_list', 'indexer_types', 'kv_sharing_modes', 'num_key_value_heads',
             'num_kv_heads', 'num_key_value_heads_per_layer', 'num_attention_heads')

HEAD_FORMS = (None, 'multihead', 'multiquery', 'multihead_attention', 'multiquery_attention',
              'grouped_query_attention')
# A key with one of these in its name may describe memory ...
SUSPICIOUS = re.compile('state|conv|window|chunk|lora_rank|latent|ssm|mamba|recurr|rnn|lru|compress'
                        '|memory|cache|kv_|key_value|multi_?query|linear_|delta|index|_swa|swa_'
                        '|block_types?|block_configs|layers?_types?|per_layer|attn_type|attn_layer'
                        '|attention_type|attention_groups|local_|global_|hybrid|shared_layers'
                        '|share_factor|group_num|cross_attention')
# ... but these do not, or only beside a key that has been read
HARMLESS = re.compile('(use_.*|output_.*|initializer_.*|.*_bias|.*_act|mlp_layer_types|q_lora_rank'
                      '|num_local_experts|.*shared_expert.*|mamba_expand|(mamba_)?chunk_size'
                      '|chunk_size_feed_forward|mamba_dt_rank|mamba_norm.*|linear_allow.*'
                      '|mamba_ssm_cache_dtype|ssm_multipliers|index_(topk|n_heads).*'
                      '|vocab_size_per_layer_input|hidden_size_per_layer_input'
                      '|max_window_layers|cache_implementation)$')


@dataclass(frozen=True)
class Part:
    """Numbers stored at each position: `heads` vectors of `width`."""
    name: str
    heads: int
    width: int


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
    """A model's memory: `stores`, by layer. unread: keys of the config that sound like memory but
    were not read, with their values. assumed: what the config leaves open, in words. facts: the
    keys that were read, with their values."""
    stores: tuple[Store, ...]
    n_layer: int
    n_head: int
    head_dim: int
    model_type: str
    unread: dict
    assumed: tuple[str, ...] = ()
    facts: dict = field(default_factory=dict)


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
        if type(value) is not int or value < 1:
            where = next((name for name in names if self.config.get(name) is not None), None)
            given = f'{where}={value!r}' if where else f"no {' or '.join(names)}"
            raise UserError(f'this config has {given}: a whole number of at least 1 is needed')
        return value

    def optional(self, *names) -> int:
        """The same, or 0 if the config has 0, null or nothing there."""
        value = self.get(*names)
        return 0 if value is None or value == 0 and type(value) is int else self.count(*names)

    def typed(self, kind: type, *names):
        """The first of these keys that has a value, which must be of this type; None without one.
        """
        value = self.get(*names)
        if value is not None and type(value) is not kind:
            name = next(name for name in names if self.config.get(name) is not None)
            raise UserError(f'this config has {name}={value!r}: {TYPES[kind]} is needed')
        return value

    def any(self, holds) -> bool:
        """Whether there is a key whose name `holds`."""
        found = list(filter(holds, self.config))
        self.read.update(found)
        return bool(found)

    def unread(self) -> dict:
        return {name: value for name, value in sorted(self.config.items())
                if name not in self.read and value and type(value) is not float
                and SUSPICIOUS.search(name) and not HARMLESS.match(name)}

    def of_layer(self, i: int) -> 'Facts':
        """The facts with those that the config gives for layer `i` alone."""
        layers = self.typed(dict, 'per_layer_config') or {}
        if not (all(map(str.isdecimal, layers))
                and all(isinstance(own, dict) for own in layers.values())):
            raise UserError(f'this config has per_layer_config={layers!r}: settings by the number '
                            'of the layer are needed')
        own = next((own for number, own in layers.items() if int(number) == i), None)
        if not own:
            return self
        mine = Facts(self.config | own)
        mine.read = self.read
        return mine


def memory_of(config: dict, complete: bool = True) -> Memory:
    """Read a config.

    config: the contents of config.json, of the text model alone. complete: whether the defaults of
    its class are filled in (`kv.models.config.completed`).

    Raises:
        UserError: if a necessary fact is missing, is no whole number, or contradicts another.
    """
    facts = Facts(config)
    names = 'num_hidden_layers', 'n_layer', 'n_layers', 'num_layers', 'decoder_layers'
    assumed = list(_left_open(facts))
    if facts.typed(bool, 'is_encoder_decoder'):
        names = 'num_decoder_layers', 'decoder_layers', *names
    n_layer = facts.count(*names)
    if config.get('model_type') == 'longcat_flash' and not config.get('num_hidden_layers'):
        n_layer *= 2  # two attentions in each
    if n_layer > MOST_LAYERS:
        raise UserError(f'this config has {n_layer:,} layers: at most {MOST_LAYERS:,} make sense')
    _check_lists(facts, n_layer)
    kinds, windows_assumed = kinds_of(facts, n_layer, complete)
    layers = [store_of(facts, i, kind) for i, kind in enumerate(kinds)]
    readers = {}
    for i, writer in enumerate(writers_of(facts, kinds)):
        readers.setdefault(writer, []).append(i)
    stores = tuple(replace(layers[i], layers=tuple(readers[i])) for i in sorted(readers)
                   if layers[i].parts or layers[i].states)
    return Memory(stores, len(kinds), _query_heads(facts), _width(facts, stores),
                  str(config.get('model_type') or '?'), facts.unread(),
                  (*assumed, *windows_assumed),
                  {name: config[name] for name in sorted(facts.read) if config.get(name)})


def _check_lists(facts: Facts, n_layer: int) -> None:
    """Raise UserError if a setting by layer is not for the layers that there are."""
    for name in PER_LAYER:
        value = facts.config.get(name)
        if isinstance(value, list) and len(value) != n_layer:
            raise UserError(f'this config has {name} for {len(value)} layers, and has {n_layer}')
    for number in facts.typed(dict, 'per_layer_config') or {}:
        if number.isdecimal() and int(number) >= n_layer:
            raise UserError(f'this config has per_layer_config for layer {number!r}, and has '
                            f'{n_layer}')


def _left_open(facts: Facts):
    """Yield what an account of the decoder's own K and V leaves out, in words."""
    if encoder := encoder_in(facts):
        raise UserError(f'this config is of an encoder ({encoder}), which has no KV cache')
    if facts.typed(bool, 'is_encoder_decoder') or facts.get('cross_attention_layers'):
        yield 'K and V of cross-attention are not counted: they depend on the length of its input'
    quantization = facts.get('quantization_config')
    if isinstance(quantization, dict) and quantization.get('kv_cache_scheme'):
        yield 'its quantization_config has a kv_cache_scheme: choose --kv_dtype accordingly'


def writers_of(facts: Facts, kinds: list[str]) -> list[int]:
    """The layer whose K and V each layer reads: itself, or an earlier one of its kind."""
    n = len(kinds)
    sources = facts.get('kv_source_layers')
    if sources is not None:
        if not isinstance(sources, list) or len(sources) != n or any(
                type(j) is not int or not 0 <= j <= i for i, j in enumerate(sources)):
            raise UserError(f'this config has kv_source_layers={sources!r}: {n} layers, each '
                            'itself or an earlier one, are needed')
        return sources
    shared = facts.get('num_kv_shared_layers', default=0)
    if type(shared) is not int or not 0 <= shared < n:
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
    """What layer `i` would store for itself. Hybrid layers have both attention and a state."""
    facts = facts.of_layer(i)
    states = states_of(facts, kind) if kind in STATEFUL else ()
    if kind in CHUNKED:
        return Store(CHUNK, (i,), parts_of(facts, i, kind), facts.count('attention_chunk_size'))
    if kind in WINDOWED:
        window = facts.count('sliding_window', 'sliding_window_size', 'attention_window_size',
                             'window_size')
        return Store(WINDOW, (i,), parts_of(facts, i, kind), window, states)
    if kind in ATTENTION:
        return Store(FULL, (i,), parts_of(facts, i, kind), 0, states)
    return Store(STATE, (i,), states=states)


def parts_of(facts: Facts, i: int, kind: str) -> tuple[Part, ...]:
    """What attention of this kind stores at each position, in layer `i`."""
    if facts.optional('kv_lora_rank'):  # multi-head latent attention
        facts.get('num_key_value_heads')  # says nothing there
        parts = [Part('latent', 1, facts.count('kv_lora_rank')),
                 Part('RoPE key', 1, facts.count('qk_rope_head_dim'))]  # one for all heads
    else:
        parts = keys_and_values(facts, i, local=kind in WINDOWED or kind in CHUNKED)
    if kind == 'indexed_attention':  # DeepSeek sparse attention
        indexers = facts.typed(list, 'indexer_types') or ['full'] * (i + 1)
        if indexers[i] not in ('full', 'shared'):
            raise UserError(f"this config has indexer_types={indexers[i]!r} for layer {i}: "
                            "'full' or 'shared' is needed")
        if indexers[i] == 'full':  # the others share an earlier one's keys
            parts.append(Part('indexer key', 1, facts.count('index_head_dim')))
    return tuple(parts)


def keys_and_values(facts: Facts, i: int, local: bool) -> list[Part]:
    """K and V of layer `i`. local: whether its attention has a window."""
    prefix = 'swa_' if local else 'global_'
    heads = facts.get(f'{prefix}num_key_value_heads', f'num_{prefix}key_value_heads')
    heads = heads or _kv_heads(facts, i)
    width = facts.get(f'{prefix}head_dim') or _head_dim(facts)
    values = facts.get(f'{prefix}v_head_dim', 'v_head_dim', default=width)
    for name, value in (('K/V heads', heads), ('head_dim', width), ('v_head_dim', values)):
        if type(value) is not int or value < 1:
            raise UserError(f'this config has {value!r} for its {name}: a whole number of at '
                            'least 1 is needed')
    n_head = _query_heads(facts)
    if n_head and heads > n_head:
        raise UserError(f'this config has {heads} K/V heads and {n_head} query heads: at most as '
                        'many K/V heads make sense')
    return [Part('K', heads, width), Part('V', heads, values)]


def _query_heads(facts: Facts) -> int:
    names = 'decoder_attention_heads', 'num_attention_heads', 'n_head', 'n_heads', 'num_heads'
    return 0 if isinstance(facts.get(*names), list) else facts.optional(*names)


def _kv_heads(facts: Facts, i: int):
    """K/V heads of layer `i`: by default as many as query heads."""
    attention = facts.typed(dict, 'attn_config') or {}  # MPT, DBRX
    heads = facts.get('num_key_value_heads', 'num_kv_heads', 'n_head_kv', 'num_attention_groups',
                      'num_key_value_heads_per_layer', default=attention.get('kv_n_heads'))
    forms = {'attention_head_type': facts.get('attention_head_type'),
             'attn_type': attention.get('attn_type')}
    for name, form in forms.items():
        if form not in HEAD_FORMS:
            allowed = ', '.join(filter(None, HEAD_FORMS))
            raise UserError(f'this config has {name}={form!r}: known are {allowed}')
    falcon = facts.typed(bool, 'multi_query') and not facts.typed(bool, 'new_decoder_architecture')
    if falcon or any(str(form).startswith('multiquery') for form in forms.values()):
        return 1  # Falcon 7B, StarCoder, SantaCoder, MPT
    if facts.typed(bool, 'multi_query_attention'):  # ChatGLM
        return facts.count('multi_query_group_num')
    if isinstance(heads, list):  # OpenELM, DeciLM
        return heads[i]
    return heads or facts.count('decoder_attention_heads', 'num_attention_heads', 'n_head',
                                'n_heads', 'num_heads')


def _head_dim(facts: Facts):
    width = facts.get('head_dim', 'attention_head_dim', 'kv_channels', 'd_kv')
    if width is not None:
        return width
    hidden, n_head = facts.count('hidden_size', 'n_embd', 'd_model'), _query_heads(facts)
    if not n_head:
        raise UserError('this config has no num_attention_heads or n_head, and no head_dim')
    return width_of_heads(hidden, n_head)


def _width(facts: Facts, stores) -> int:
    """The width of a head: that of most keys, or of values made from latents."""
    if facts.optional('kv_lora_rank'):
        return facts.count('v_head_dim', default=1)
    widths = [store.parts[0].width for store in stores if store.parts]
    return max(widths, key=widths.count, default=0)
