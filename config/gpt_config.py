"""What a model is: nanoGPT's seven fields and the ones that decide what it remembers. No torch here."""
import dataclasses
from dataclasses import dataclass, field

from config.errors import UserError


def _key(default, meaning, choices=()):
    return field(default=default, metadata={'meaning': meaning, 'choices': choices})


@dataclass
class GPTConfig:
    """Shape and memory of a GPT. The defaults are vanilla GPT-2, field by field nanoGPT's.

    Notation in this project: B batch, T sequence length, W window_size, C n_embd, H n_head, Hkv n_kv_head, D head_dim.
    Combinations that decide the KV cache (pattern, sharing, windows) are checked by `kv.plan.plan_kv`.

    Raises:
        UserError (a ValueError): a value outside its range, or a combination that makes no sense; both are named.
    """
    block_size: int = _key(1024, 'context length T: tokens a training sequence holds')
    vocab_size: int = _key(50304, "number of token ids (GPT-2's 50257 rounded up to a multiple of 64)")
    n_layer: int = _key(12, 'transformer blocks')
    n_head: int = _key(12, 'query heads')
    n_embd: int = _key(768, 'width of the residual stream, C')
    dropout: float = _key(0.0, 'dropout probability on attention, residuals and embeddings')
    bias: bool = _key(True, 'biases in Linear and LayerNorm, as in GPT-2')
    # from here on: what nanoGPT does not have
    n_kv_head: int = _key(0, 'key/value heads: 0 = n_head (MHA), 1 = multi-query, between = grouped-query')
    head_dim: int = _key(0, 'width of a head, D: 0 = n_embd / n_head')
    layer_pattern: str = _key('G', "kinds of layer, repeated over n_layer: G global, L local (sliding window); 'LLLLLG'")
    window_size: int = _key(0, 'W: keys that a local layer sees, itself included')
    kv_share: str = _key('', "aligned with layer_pattern: equal letters in a period share one KV cache; 'AABBBC'")
    share_global_kv: bool = _key(False, 'the global layers of all periods share one KV cache')
    pos_embedding: str = _key('learned', 'how positions enter the model', ('learned', 'rope'))
    rope_theta: float = _key(10000.0, 'base of the rotary angles')
    rope_theta_global: float = _key(0.0, 'base of the rotary angles in global layers: 0 = rope_theta')
    qk_norm: bool = _key(False, 'RMS norm on queries and keys before RoPE')
    mlp_hidden: int = _key(0, 'hidden width of the MLP: 0 = 4 * n_embd')
    gelu: str = _key('exact', "form of GELU: 'exact' is nanoGPT's, 'tanh' is Hugging Face GPT-2's", ('exact', 'tanh'))
    kv_quant_train: str = _key('', 'round K and V in training as an int8 cache would', ('', 'int8'))

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata['choices'] and value not in f.metadata['choices']:
                raise UserError(f'{f.name}={value!r}: allowed are {", ".join(map(repr, f.metadata["choices"]))}')
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}={getattr(self, name)}: must be at least 1')
        for name in ('n_kv_head', 'head_dim', 'window_size', 'mlp_hidden', 'rope_theta_global'):
            if getattr(self, name) < 0:
                raise UserError(f'{name}={getattr(self, name)}: must be 0 (the default) or more')
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f'dropout={self.dropout}: must be at least 0 and below 1')
        if self.head_dim == 0 and self.n_embd % self.n_head:
            raise UserError(f'n_embd={self.n_embd} is not a multiple of n_head={self.n_head}: change one, or set head_dim')
        self._check_positions()

    def _check_positions(self):
        if self.pos_embedding == 'rope':
            if self.resolved_head_dim % 2:
                raise UserError(f"head_dim={self.resolved_head_dim} is odd: pos_embedding='rope' rotates pairs, "
                                'so it must be even')
            if self.rope_theta <= 0:
                raise UserError(f'rope_theta={self.rope_theta}: must be positive')
        elif self.rope_theta_global:
            raise UserError(f"rope_theta_global={self.rope_theta_global} needs pos_embedding='rope' "
                            f'(it is {self.pos_embedding!r})')

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def resolved_mlp_hidden(self) -> int:
        return self.mlp_hidden or 4 * self.n_embd


# nanoGPT writes exactly these into a checkpoint's `model_args`, and reads no others
NANOGPT_FIELDS = ('n_layer', 'n_head', 'n_embd', 'block_size', 'bias', 'vocab_size', 'dropout')


def model_args(config: GPTConfig) -> dict:
    """The dict stored in a checkpoint: nanoGPT's seven fields always, the others only where they are not vanilla.

    So nanoGPT itself can load what a vanilla model of ours wrote.
    """
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if f.name in NANOGPT_FIELDS or getattr(config, f.name) != f.default}
