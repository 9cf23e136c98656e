"""Small random models with attention so sharp that a single wrong key shows, and ways to feed them
tokens through a cache."""
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from config.gpt_config import GPTConfig
from model import GPT

VOCAB = 23
PUBLISHED = dict(layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, n_kv_head=1,
                 pos_embedding='rope', qk_norm=True)
# one period plus one layer, small enough to run token by token
FULL_STACK = dict(PUBLISHED, n_layer=7, n_head=4, n_embd=24, head_dim=6, window_size=5,
                  block_size=64, vocab_size=VOCAB, rope_theta=100.0)


def random_model(config, dtype=torch.float64, seed=0):
    """An eval-mode GPT with weights far larger than initial ones."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            gain = p.dim() == 1 and name.endswith('weight')
            p.copy_(1 + 0.3 * noise if gain else 0.3 * noise)
    return model.to(dtype).eval()


def tokens(batch, length, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_logits(model, idx):
    return model(idx, all_logits=True)[0]


@torch.no_grad()
def feed(model, cache, idx, chunks):
    """All logits of idx (B, T), which is fed to the cache chunk by chunk."""
    assert sum(chunks) == idx.size(1)
    return torch.cat([model(piece, cache=cache, all_logits=True)[0]
                      for piece in idx.split(list(chunks), dim=1)], dim=1)


def max_gap(a, b):
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


class Largest(TorchDispatchMode):
    """`n`: elements of the largest floating-point tensor that an operation returned."""
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.n = max(self.n, x.numel())
        return out


@st.composite
def mechanisms(draw, pattern, rope, head_dim):
    """Settings beyond the plan, as they go with a layer pattern, RoPE or not, and a head_dim."""
    fields = dict(attn_sink=draw(st.booleans()), act_clamp=draw(st.sampled_from([0.0, 0.0, 1.5])),
                  gelu=draw(st.sampled_from(['exact', 'tanh', 'relu2'])))
    if rope and 'G' in pattern:
        fields['rope_fraction_global'] = draw(st.sampled_from([1.0, 1.0, 0.5, 0.0]))
    stored = [{}, {}, dict(kv_tied='all')]
    if 'G' in pattern:
        stored.append(dict(kv_tied='global'))
        if head_dim % 4 == 0:
            stored.append(dict(key_offset=True))
        if not fields.get('rope_fraction_global'):
            stored += [dict(kv_latent=head_dim), dict(kv_latent=2 * head_dim)]
    return fields | draw(st.sampled_from(stored))


@st.composite
def configs(draw, windows=(1, 2, 3, 5, 8, 33), **fixed):
    """All kinds of plans, at least one period plus one layer deep."""
    pattern = draw(st.sampled_from(['LLLLLG', 'LG', 'GL', 'LLG', 'G', 'L', 'LLLGGGG'])
                   | st.text('GL', min_size=1, max_size=4))
    share = ''.join(draw(st.sampled_from('AB' if kind == 'L' else 'XY')) for kind in pattern)
    n_head = draw(st.sampled_from([1, 2, 4, 6]))
    kv_heads = [0] + [n for n in range(1, n_head + 1) if n_head % n == 0]
    window = draw(st.sampled_from(windows)) if 'L' in pattern else 0
    rope = draw(st.booleans())
    head_dim = draw(st.sampled_from([4, 6] + [0] * (12 // n_head % 2 == 0)))
    fields = draw(mechanisms(pattern, rope, head_dim or 12 // n_head))
    if draw(st.booleans()):  # layers that differ, but for those that may share
        numbers = {letter: (0 if letter in 'XY' else draw(st.sampled_from(windows)),
                            0 if fields.get('kv_latent') else draw(st.sampled_from(kv_heads)))
                   for letter in sorted(set(share.replace('Y', 'X')))}
        each = [numbers[letter] for letter in share.replace('Y', 'X')]
        window = max(n for n, _ in each)
        fields['window_pattern'] = draw(st.sampled_from(['', ','.join(str(n) for n, _ in each)]))
        fields['kv_head_pattern'] = ','.join(str(n) for _, n in each)
    has_angles = rope and fields.get('rope_fraction_global', 1)
    return GPTConfig(**dict(dict(
        block_size=160, vocab_size=VOCAB, n_layer=len(pattern) + draw(st.integers(1, 3)),
        n_head=n_head, n_embd=12, n_kv_head=draw(st.sampled_from(kv_heads)),
        head_dim=head_dim, bias=draw(st.booleans()), layer_pattern=pattern,
        window_size=window,
        kv_share=draw(st.sampled_from([share, ''])), share_global_kv=draw(st.booleans()),
        pos_embedding='rope' if rope else 'learned', rope_theta=50.0,
        rope_theta_global=draw(st.sampled_from([0.0, 700.0])) if has_angles else 0.0,
        qk_norm=draw(st.booleans()), mlp_hidden=draw(st.sampled_from([0, 7])),
        **fields), **fixed))


@st.composite
def chunkings(draw, total):
    """One chunk, single tokens, or any cuts (a resumed turn is single tokens, then a chunk)."""
    way = draw(st.sampled_from(['one shot', 'single tokens', 'any', 'any', 'any', 'resumed']))
    if way == 'one shot':
        return [total]
    if way == 'single tokens':
        return [1] * total
    if way == 'resumed':
        first, single = total // 3, total // 4
        return [first] + [1] * single + [total - first - single]
    chunks = []
    while sum(chunks) < total:
        chunks.append(draw(st.integers(1, min(total - sum(chunks), 40))))
    return chunks
