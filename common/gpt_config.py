"""A model's shape: nanoGPT's seven fields and those for the KV cache. Does not need torch."""
import dataclasses
import functools
from dataclasses import dataclass, field

from common.errors import UserError, at_least, shown

MAX_NUMBER = 2 ** 31 - 1
MAX_MATRIX = 2 ** 40  # elements; torch counts bytes in 63 bits
MAX_LAYERS = 10_000  # also the letters of a pattern


def _key(default, meaning, choices=(), tries=(), trained='', known=()):
    """A field, with all that other code needs to know of it.

    meaning: its description in `--help`. choices: the allowed values; () = any.
    tries: values beside the default that tests and `lab.conform` try; a bool or a field with
        choices needs none.
    trained: whether a trained model may change it, because no weight depends on it: 'free', or
        'memory' if `interop.convert` may, too; 'pooled' = only `interop.convert` can; '' = nobody.
    known: programs that have learned what it means, of 'fast' (decode steps beside model.py's, and
        attention of training in C++), 'export' and 'count' (of parameters, `kv.weights`); all
        others refuse it where it is not the default.
    """
    if isinstance(default, bool):
        tries = (not default,)
    tries = tries or tuple(choice for choice in choices if choice != default)
    return field(default=default, metadata=dict(meaning=meaning, choices=choices, tries=tries,
                                                trained=trained, known=known))


_known = functools.partial(_key, known=('fast', 'export', 'count'))


@dataclass
class GPTConfig:
    """The shape and KV cache of a GPT. The defaults are vanilla GPT-2, as in nanoGPT.

    Notation in this project: B batch, T sequence length, W window_size, C n_embd, H n_head,
    Hkv n_kv_head, D head_dim.

    Raises UserError (a ValueError) if a value is out of range or contradicts another.
    """
    block_size: int = _known(1024, 'context length T: tokens in a training sequence')
    vocab_size: int = _known(
        50304, "number of token ids (GPT-2's 50257, padded to a multiple of 64)")
    n_layer: int = _known(12, 'transformer blocks')
    n_head: int = _known(12, 'query heads', tries=(1, 2, 4, 6))
    n_embd: int = _known(768, 'width of the residual stream, C')
    dropout: float = _known(
        0.0, 'dropout probability on attention, residuals and embeddings', trained='free')
    bias: bool = _known(True, 'biases in Linear and LayerNorm, as in GPT-2')
    # fields that nanoGPT does not have
    n_kv_head: int = _known(
        0, 'key/value heads: 0 = n_head (MHA), 1 = MQA, between = GQA', tries=(1, 2, 3),
        trained='pooled')
    head_dim: int = _known(0, 'width of a head, D: 0 = n_embd / n_head', tries=(4, 6, 8))
    layer_pattern: str = _known(
        'G', "layers, repeated over n_layer: G global, L local (sliding window), as 'LLLLLG'",
        tries=('LLLLLG', 'LG', 'GL', 'LLG', 'L', 'LLLGGGG', 'GGL'), trained='memory')
    window_size: int = _known(
        0, 'W: keys that a local layer attends to, itself included', tries=(1, 2, 3, 5, 8, 33),
        trained='memory')
    kv_share: str = _known(
        '', "aligned with layer_pattern: equal letters in a period share a KV cache, as 'AABBBC'",
        trained='pooled')
    share_global_kv: bool = _known(
        False, 'global layers of all periods share one KV cache', trained='pooled')
    pos_embedding: str = _known('learned', 'position encoding', ('learned', 'rope'))
    rope_theta: float = _known(
        10000.0, 'base of the rotary angles', tries=(50.0,), trained='memory')
    rope_theta_global: float = _known(
        0.0, 'base of the angles in global layers: 0 = rope_theta', tries=(700.0,),
        trained='memory')
    qk_norm: bool = _known(False, 'RMS norm on queries and keys before RoPE')
    mlp_hidden: int = _known(0, 'hidden width of the MLP: 0 = 4 * n_embd', tries=(7,))
    gelu: str = _known(
        'exact', "'exact' as in nanoGPT, 'tanh' as in Hugging Face's GPT-2; 'relu2' = ReLU squared "
        'instead', ('exact', 'tanh', 'relu2'), trained='free')
    kv_quant_train: str = _known(
        '', 'round K and V in training as an int8 cache does', ('', 'int8'), trained='memory')
    attn_sink: bool = _known(False, 'a learned logit per head in the denominator of the softmax')
    rope_fraction_global: float = _known(
        1.0, 'share of the pairs of dimensions (rounded) that RoPE rotates in global layers: '
        '0 = none (NoPE)', tries=(0.5, 0.0), trained='memory')
    key_offset: bool = _known(
        False, 'half of the dimensions of a global key come from the token before')
    kv_tied: str = _known(
        '', "layers where K = V, stored once: 'global', 'all'; '' = none", ('', 'global', 'all'))
    kv_latent: int = _known(
        0, 'global layers store a latent of this width in place of K and V (NoPE-MLA): 0 = none',
        tries=(4, 8, 12, 16))
    window_pattern: str = _key(
        '', 'aligned with layer_pattern: the window of each layer, 0 for a G, in place of '
        "window_size, as '16,16,64,16,16,0'", trained='memory', known=('fast', 'count'))
    kv_head_pattern: str = _key(
        '', 'aligned with layer_pattern: the K/V heads of each layer, 0 = n_kv_head, as '
        "'1,1,1,1,1,4'", trained='pooled', known=('fast', 'count'))
    attn_gate: bool = _known(
        False, "a gate on each head's output: the sigmoid of a linear map of the layer's input")

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, choices = getattr(self, f.name), f.metadata['choices']
            if isinstance(value, str) and len(value) > MAX_LAYERS:
                raise UserError(f'{f.name} has {len(value):,} characters; allowed are '
                                f'{MAX_LAYERS:,}')
            if isinstance(value, (int, float)) and not abs(value) <= MAX_NUMBER:  # NaN included
                raise UserError(f'{f.name}={shown(value)}: must be a number up to {MAX_NUMBER:,}')
            if choices and value not in choices:
                raise UserError(f'{f.name}={shown(value)}: allowed are '
                                f'{", ".join(map(repr, choices))}')
        for name in ('window_pattern', 'kv_head_pattern'):
            setattr(self, name, getattr(self, name).replace(' ', ''))
        at_least(self, block_size=1, vocab_size=1, n_layer=1, n_head=1, n_embd=1, n_kv_head=0,
                 head_dim=0, window_size=0, mlp_hidden=0, rope_theta_global=0, kv_latent=0,
                 rope_fraction_global=0)
        rope = self.pos_embedding == 'rope'
        self._refuse('n_layer', self.n_layer > MAX_LAYERS, f'must be at most {MAX_LAYERS:,}')
        self._refuse('dropout', not 0 <= self.dropout < 1, 'must be at least 0 and below 1')
        self._refuse('n_embd', not self.head_dim and self.n_embd % self.n_head,
                     f'must be a multiple of n_head={self.n_head}, unless head_dim is set')
        if rope and self.resolved_head_dim % 2:
            raise UserError(f"head_dim={self.resolved_head_dim} is odd: pos_embedding='rope' "
                            'rotates pairs, so it must be even')
        self._refuse('rope_theta', rope and self.rope_theta <= 0, 'must be positive')
        self._refuse('rope_theta_global', self.rope_theta_global and not rope,
                     f"needs pos_embedding='rope' (it is {self.pos_embedding!r})")
        rows = max(self.vocab_size, 3 * self.n_head * self.resolved_head_dim,
                   self.resolved_mlp_hidden, 0 if rope else self.block_size)
        self._refuse('n_embd', self.n_embd * rows > MAX_MATRIX, 'a matrix of the model would have '
                     f'{rows:,} rows of that size; allowed are {MAX_MATRIX:,} elements')
        self._check_layers()
        self._check_mechanisms()

    def _refuse(self, name, wrong, why):
        if wrong:
            raise UserError(f'{name}={getattr(self, name)!r}: {why}')

    def _check_layers(self):
        pattern, share = self.layer_pattern, self.kv_share
        unknown = sorted(set(pattern) - {'G', 'L'})
        what = f'unknown letter {unknown[0]!r}' if unknown else 'empty'
        self._refuse('layer_pattern', not pattern or unknown,
                     f'{what}, use G (global) and L (local)')
        self._refuse('n_head', self.n_kv_head and self.n_head % self.n_kv_head,
                     f'must be a multiple of n_kv_head={self.n_kv_head}')
        self._refuse('window_size', 'L' in pattern and not self.window_pattern
                     and self.window_size < 1,
                     f'with local layers in layer_pattern={pattern!r}, it is the number of keys '
                     'that they see, 1 or more')
        self._refuse('kv_share', share and len(share) != len(pattern),
                     f'needs one letter per layer of the period, and has {len(share)} letters for '
                     f'the {len(pattern)} of layer_pattern={pattern!r}')
        kinds = {}
        for letter, kind in zip(share, pattern):
            self._refuse('kv_share', kinds.setdefault(letter, kind) != kind,
                         f'{letter!r} joins layers of different kind in layer_pattern='
                         f'{pattern!r}; layers that share a KV cache are all G or all L')
        self._check_numbers()

    def _check_numbers(self):
        """Check the patterns of numbers, which must agree within a slot."""
        pattern, windows, heads = self.layer_pattern, self.windows, self.kv_heads
        for kind, window, n in zip(pattern, windows, heads):
            self._refuse('window_pattern', (window == 0) != (kind == 'G'),
                         f'{window} for a layer {kind!r} of layer_pattern={pattern!r}; an L needs '
                         '1 or more, a G has 0')
            self._refuse('n_head', self.n_head % n, f'must be a multiple of {n}, which '
                         f'kv_head_pattern={self.kv_head_pattern!r} has')
        letters = self.kv_share or range(len(pattern))
        slots = [None if kind == 'G' and self.share_global_kv else letter
                 for kind, letter in zip(pattern, letters)]
        for name, numbers in (('window_pattern', windows), ('kv_head_pattern', heads)):
            of_slot = {}
            for slot, n in zip(slots, numbers):
                self._refuse(name, of_slot.setdefault(slot, n) != n,
                             f'{of_slot[slot]} and {n} for layers that share a KV cache')

    def _numbers(self, name) -> list[int]:
        """The numbers of a pattern, as many as layer_pattern has letters."""
        found, n = getattr(self, name).split(','), len(self.layer_pattern)
        for each in found:
            self._refuse(name, not each.isdecimal() or len(each) > 10 or int(each) > MAX_NUMBER,
                         f'{each!r} is no number, or too large: allowed are up to {MAX_NUMBER:,}')
        self._refuse(name, len(found) != n, f'has {len(found)} numbers for the {n} layers of '
                     f'layer_pattern={self.layer_pattern!r}')
        return [int(each) for each in found]

    def _check_mechanisms(self):
        rope, fraction = self.pos_embedding == 'rope', self.rope_fraction_global
        D, no_global = self.resolved_head_dim, 'G' not in self.layer_pattern

        def refuse(name, wrong, why):
            self._refuse(name, getattr(self, name) and wrong, why)
        for_global = f'is for global layers; layer_pattern={self.layer_pattern!r} has none'
        self._refuse('rope_fraction_global', not (fraction == 1 or 0 <= fraction < 1 and rope),
                     "must be from 0 to 1, and below 1 needs pos_embedding='rope' "
                     f'(it is {self.pos_embedding!r})')
        self._refuse('rope_fraction_global', fraction < 1 and no_global, for_global)
        refuse('rope_theta_global', rope and not fraction, 'rope_fraction_global=0 has no angles')
        for name in ('key_offset', 'kv_latent'):
            refuse(name, no_global, for_global)
            refuse(name, self.kv_tied, f'does not go with kv_tied={self.kv_tied!r}')
        refuse('kv_tied', self.kv_tied == 'global' and no_global, for_global)
        refuse('key_offset', D % 4, f'needs head_dim (it is {D}) to be a multiple of 4')
        refuse('key_offset', self.kv_latent, f'does not go with kv_latent={self.kv_latent}')
        if self.kv_head_pattern:
            heads = zip(self._numbers('kv_head_pattern'), self.layer_pattern)
            refuse('kv_latent', any(n and kind == 'G' for n, kind in heads),
                   f'a latent has no K/V heads; kv_head_pattern={self.kv_head_pattern!r} has some '
                   'in a global layer')
        refuse('kv_latent', self.kv_latent % D, f'must be a multiple of head_dim={D}')
        refuse('kv_latent', rope and fraction, 'a latent has no RoPE: set rope_fraction_global=0 '
               f'(it is {fraction}) or learned positions')

    @property
    def windows(self) -> list[int]:
        """The window of each layer of the period; 0 = global."""
        if self.window_pattern:
            return self._numbers('window_pattern')
        return [0 if kind == 'G' else self.window_size for kind in self.layer_pattern]

    @property
    def kv_heads(self) -> list[int]:
        """The K/V heads of each layer of the period, those of latents left aside."""
        usual = self.n_kv_head or self.n_head
        if self.kv_head_pattern:
            return [n or usual for n in self._numbers('kv_head_pattern')]
        return [usual] * len(self.layer_pattern)

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def resolved_mlp_hidden(self) -> int:
        return self.mlp_hidden or 4 * self.n_embd


def fields_with(name: str, *values) -> tuple[str, ...]:
    """The names of the fields whose metadata `name` is one of the values, or contains one."""
    return tuple(f.name for f in dataclasses.fields(GPTConfig) if f.metadata[name] in values
                 or set(values) & set(f.metadata[name]))


def unknown_field(config: GPTConfig, program: str) -> str:
    """'name=value' of a field that is not `known` to the program nor at its default; '' = none."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if value != f.default and program not in f.metadata.get('known', ()):
            return f'{f.name}={value!r}'
    return ''


# the `model_args` of nanoGPT's checkpoints
NANOGPT_FIELDS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')


def model_args(config: GPTConfig) -> dict:
    """Return the dict stored in a checkpoint: nanoGPT's seven fields, and others if not default.
    nanoGPT can therefore load the checkpoints of vanilla models."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if f.name in NANOGPT_FIELDS or getattr(config, f.name) != f.default}
