"""Which kind of attention or state each layer of a Hugging Face model has, by `layer_types` and the
older keys that say the same. No torch here."""
import re

from config.errors import UserError

# Names of kinds: what transformers writes today, and what older files have. A hybrid layer has
# attention and a state.
ATTENTION = {'full_attention', 'attention', 'global', 'global_attention', 'full', 'hybrid',
             'indexed_attention', 'sparse'}
WINDOWED = {'sliding_attention', 'local', 'local_attention', 'sliding', 'hybrid_sliding'}
CHUNKED = {'chunked_attention'}
STATEFUL = {'linear_attention', 'mamba', 'mamba2', 'recurrent', 'conv', 'hybrid', 'hybrid_sliding'}
EMPTY = {'mlp', 'moe', 'dense', 'dummy'}

# what else a config with `layer_types` may have, saying the same
REPEATED = {'sliding_window_pattern', '_sliding_window_pattern', 'full_attention_interval',
            'layers_block_type', 'block_types', 'hybrid_layer_ids', 'hybrid_override_pattern',
            'attn_layer_indices', 'attn_layer_period', 'attn_layer_offset', 'full_attn_idxs',
            'kv_sharing_modes', 'attn_type_list', 'linear_attn_config', 'sliding_window',
            'global_attn_every_n_layers'}
OVERRIDES = {'M': 'mamba', '*': 'attention', '-': 'mlp', 'E': 'moe'}  # Nemotron-H
# model types without a causal mask, unless their config says otherwise
ENCODERS = re.compile('(?i:.*bert.*|big_bird|canine|data2vec.*|electra|ernie(_m)?|esmc?|fnet|funnel'
                      '|gte|jina_embeddings.*|layoutlm.*|longformer|luke|mpnet|mra|nezha'
                      '|nystromformer|perceiver|reformer|roformer|tapas|xlm|xmod|yoso'
                      '|beit|clip.*|deit|dinov.*|siglip.*|swin.*|vit.*|unispeech.*|wav2vec.*'
                      '|wavlm|.*(MaskedLM|EncoderModel))')
LETTERS = {'L': 'local', 'G': 'full_attention'}


def encoder_in(facts) -> str:
    """The model type or architecture by which the config is of an encoder; '' for a decoder."""
    names = [facts.get('model_type', default=''), *(facts.typed(list, 'architectures') or [])]
    found = [str(name) for name in names if ENCODERS.fullmatch(str(name))]
    is_decoder = (facts.typed(bool, 'is_decoder') or facts.typed(bool, 'causal')
                  or any('decoder' in name.lower() for name in found))
    return '' if is_decoder else ', '.join(found)


def kinds_of(facts, n_layer: int, complete: bool) -> tuple[list[str], tuple[str, ...]]:
    """The kind of each layer, as `layer_types` names them, and what had to be assumed.

    facts: `kv.models.memory.Facts`. complete: whether the defaults of the config's class are
    filled in. Raises UserError if a kind is unknown, or their number is not that of the layers.
    """
    kinds, assumed = facts.get('layer_types', 'layers_block_type'), ()
    if kinds is not None:
        facts.read |= REPEATED
    else:
        kinds = _by_older_keys(facts, n_layer)
    if kinds is None:
        local = _local(facts)
        if local != 'full_attention' and not complete:
            assumed = (f'it has windows ({_size(facts)}), but does not say in which layers: all '
                       'are counted as if they had none, which is an upper bound',)
            local = 'full_attention'
        kinds = [local] * n_layer
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f'this config has layer_types={kinds!r}: a list of names is needed')
    if len(kinds) != n_layer:
        raise UserError(f'this config has num_hidden_layers={n_layer}, but layer_types for '
                        f'{len(kinds)} of them')
    known = ATTENTION | WINDOWED | CHUNKED | STATEFUL | EMPTY
    for kind in kinds:
        if kind not in known:
            raise UserError(f'this config has a layer of type {kind!r}, which is not accounted '
                            f"for; known are {', '.join(sorted(known))}")
    return kinds, assumed


def _size(facts):
    return facts.get('sliding_window', 'sliding_window_size', 'attention_chunk_size')


def _local(facts) -> str:
    """The kind of layers with a window; 'full_attention' if the config has none."""
    if facts.optional('sliding_window', 'sliding_window_size'):
        return 'sliding_attention'
    return 'chunked_attention' if facts.optional('attention_chunk_size') else 'full_attention'


def _by_older_keys(facts, n: int) -> list[str] | None:
    """The kinds of layers by keys older than `layer_types`; None without them."""
    for read in (_by_pattern, _by_list, _by_interval):
        kinds = read(facts, n)
        if kinds:
            return kinds
    if facts.typed(bool, 'use_sliding_window') is False:
        return ['full_attention'] * n
    if facts.get('use_sliding_window') and 'max_window_layers' in facts.config:
        first = facts.optional('max_window_layers')  # Qwen 2: windows from there on
        if first > n:
            raise UserError(f'this config has max_window_layers={first} of {n} layers')
        return ['full_attention' if i < first else _local(facts) for i in range(n)]
    if facts.get('state_size', 'ssm_state_size') and not facts.get('num_key_value_heads'):
        return ['linear_attention'] * n  # Mamba
    return None


def _by_pattern(facts, n: int) -> list[str] | None:
    """A pattern that is repeated over the layers, or has a letter for each."""
    letters = facts.typed(str, 'hybrid_override_pattern')
    if letters:
        return [OVERRIDES.get(letter, letter) for letter in letters]
    blocks = facts.typed(list, 'block_types')
    if blocks == []:
        raise UserError('this config has block_types=[]: a list is needed')
    if blocks:  # RecurrentGemma, whose attention has windows
        window = 'local' if facts.get('attention_window_size') else 'attention'
        return [window if blocks[i % len(blocks)] == 'attention' else blocks[i % len(blocks)]
                for i in range(n)]
    pattern = facts.get('sliding_window_pattern', '_sliding_window_pattern')
    if isinstance(pattern, str) and pattern:  # 'LLLG'
        kinds = [LETTERS.get(pattern[i % len(pattern)], pattern[i % len(pattern)])
                 for i in range(n)]
        return [_local(facts) if kind == 'local' else kind for kind in kinds]
    return None


def _by_list(facts, n: int) -> list[str] | None:
    """A list of layers, or of a number for each."""
    types = facts.typed(list, 'attn_type_list')
    if types is not None:  # MiniMax
        if any(kind not in (0, 1) for kind in types):
            raise UserError(f'this config has attn_type_list={types!r}: a 0 or 1 for each layer '
                            'is needed')
        return ['full_attention' if kind else 'linear_attention' for kind in types]
    for name, chosen, others in (('full_attn_idxs', 'full_attention', 'conv'),
                                 ('attn_layer_indices', 'full_attention', 'mamba'),
                                 ('hybrid_layer_ids', 'hybrid', 'mamba')):
        layers = facts.typed(list, name)
        if layers is not None:  # LFM2, Bamba, Zamba2
            wrong = [i for i in layers if type(i) is not int or not 0 <= i < n]
            if wrong or len(set(layers)) != len(layers):
                raise UserError(f'this config has {name}={layers!r}: different numbers of layers, '
                                f'from 0 to {n - 1}, are needed')
            return [chosen if i in layers else others for i in range(n)]
    return None


def _by_interval(facts, n: int) -> list[str] | None:
    """Every n-th layer has full attention."""
    for name, others in (('sliding_window_pattern', _local(facts)),
                         ('_sliding_window_pattern', _local(facts)),
                         ('full_attention_interval', 'linear_attention')):
        if facts.get(name) is not None:
            every = facts.count(name)
            return ['full_attention' if (i + 1) % every == 0 else others for i in range(n)]
    if facts.get('attn_layer_period') is not None:  # Jamba
        period, offset = facts.count('attn_layer_period'), facts.optional('attn_layer_offset')
        if offset >= period:
            raise UserError(f'this config has attn_layer_offset={offset}: must be below '
                            f'attn_layer_period={period}')
        return ['attention' if i % period == offset else 'mamba' for i in range(n)]
    return None
