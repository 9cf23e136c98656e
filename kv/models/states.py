"""What layers hold that do not store positions: recurrent states, and the last inputs of their
short convolutions. No torch here. By the keys of the config that say so:

    linear_num_value_heads      gated DeltaNet: a matrix per head (Yang et al. 2024; Qwen3-Next)
    linear_num_heads            Kimi delta attention, lightning: a square matrix per head
    linear_attn_*_factor        lightning attention (MiniMax): the same, without a convolution
    (mamba_)n_heads, d_head     Mamba 2: d_head x d_state numbers per head (Dao & Gu 2024)
    expand, (mamba_d_)state     Mamba: d_state numbers per channel (Gu & Dao 2023)
    lru_width                   RG-LRU: one number per channel (De et al. 2024; RecurrentGemma)
    conv_L_cache                a short convolution alone (LFM2)
"""
import math
from dataclasses import dataclass

from config.errors import UserError

CONV, RECURRENT = 'conv', 'recurrent'
ALWAYS_FLOAT32 = 'float32'


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


def conv(channels: int, kernel: int, spare: int = 1) -> State:
    return State(CONV, (channels, kernel - 1), spare=spare)


def width_of_heads(width: int, heads: int) -> int:
    if width % heads:
        raise UserError(f'this config has a width of {width}, which is not a multiple of its '
                        f'{heads} heads, and no head_dim')
    return width // heads


def states_of(facts, kind: str) -> tuple[State, ...]:
    """The states of a layer of this kind. facts: `kv.models.memory.Facts`.

    Raises:
        UserError: if the config has no known facts about them, or contradictory ones.
    """
    for name, read in FORMS.items():
        if facts.get(name):
            return read(facts)
    if facts.any(lambda name: name.startswith(('linear_attn_', 'linear_full_attn_'))):
        heads = facts.count('num_attention_heads')
        width = (facts.count('head_dim') if facts.get('head_dim')
                 else width_of_heads(facts.count('hidden_size'), heads))
        return (State(RECURRENT, (heads, width, width)),)
    raise UserError(f'this config has layers of type {kind!r}, and nothing known about their '
                    f"state: looked for {', '.join(FORMS)}")


def _gated_delta(facts):
    values, keys = facts.count('linear_num_value_heads'), facts.count('linear_num_key_heads')
    key, value = facts.count('linear_key_head_dim'), facts.count('linear_value_head_dim')
    channels = 2 * keys * key + values * value
    return (conv(channels, facts.count('linear_conv_kernel_dim')),
            State(RECURRENT, (values, key, value), ALWAYS_FLOAT32))


def _square(facts):
    heads, width = facts.count('linear_num_heads'), facts.count('linear_head_dim')
    kernel = facts.count('linear_conv_kernel_dim', 'short_conv_kernel_size')
    return (conv(3 * heads * width, kernel),
            State(RECURRENT, (heads, width, width), ALWAYS_FLOAT32))


def _rg_lru(facts):
    width = facts.count('lru_width')
    return (conv(width, facts.count('conv1d_width'), spare=0),
            State(RECURRENT, (width,), ALWAYS_FLOAT32))


def _short_conv(facts):
    return (conv(facts.count('conv_dim', 'hidden_size'), facts.count('conv_L_cache')),)


def _mamba(facts):
    """Mamba 2 where the config has a width of heads, otherwise Mamba."""
    state = facts.count('mamba_d_state', 'ssm_state_size', 'state_size')
    kernel = facts.count('mamba_d_conv', 'conv_kernel')
    inner = facts.optional('mamba_d_ssm') or (
        facts.count('mamba_expand', 'expand') * facts.count('hidden_size'))
    groups = facts.optional('mamba_n_groups', 'n_groups', 'mamba_ngroups')
    names = 'mamba_n_heads', 'mamba_num_heads', 'n_mamba_heads', 'num_heads'
    facts.get(*names)
    if not groups:  # zamba's heads are of Mamba, whose states are one array
        return (conv(inner, kernel), State(RECURRENT, (inner, state), ALWAYS_FLOAT32))
    heads = facts.count(*names)
    names = 'mamba_d_head', 'mamba_head_dim', 'mamba_headdim', 'head_dim'
    derived = facts.get(*names) in (None, 'auto')
    width = width_of_heads(inner, heads) if derived else facts.count(*names)
    return (conv(heads * width + 2 * groups * state, kernel),
            State(RECURRENT, (heads, width, state), ALWAYS_FLOAT32))


# the key that says which form it is -> how it is read
FORMS = {'linear_num_value_heads': _gated_delta, 'linear_num_heads': _square,
         'lru_width': _rg_lru, 'conv_L_cache': _short_conv, 'mamba_d_state': _mamba,
         'ssm_state_size': _mamba, 'state_size': _mamba}
