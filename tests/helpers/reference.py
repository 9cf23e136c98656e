"""The complete model again, dense and in float64, written only from DESIGN's rules: the reference
for every faster implementation.

Nothing here comes from attention/, kv/ or model.py: masks are explicit (T, T) matrices, K/V heads
are repeated, rotations are complex multiplications, and each layer computes its own kind, window
and KV owner. """
import dataclasses
import math

import torch


def is_local(config, i):
    return config.layer_pattern[i % len(config.layer_pattern)] == 'L'


def of_layer(config, i, name, default):
    """The number that a pattern has for layer `i`, or the default without a pattern."""
    numbers = getattr(config, name).split(',')
    return default if numbers == [''] else int(numbers[i % len(numbers)])


def kv_owner(config, i):
    """The layer that owns the K/V which layer `i` attends over."""
    def one_cache(j):
        period = len(config.layer_pattern)
        tied = config.share_global_kv and not is_local(config, i) and not is_local(config, j)
        share = config.kv_share
        lettered = share and i // period == j // period and share[i % period] == share[j % period]
        return i == j or tied or bool(lettered)
    return min(j for j in range(i + 1) if one_cache(j))


def visible(n_positions, window):
    """(T, T) bool, row = query, written out pair by pair. window 0: all previous positions."""
    return torch.tensor([[j <= i and (window == 0 or j > i - window) for j in range(n_positions)]
                         for i in range(n_positions)])


def dense_attention(q, k, v, window=0, sink=None):
    """float64 attention of q (B, H, t, D) over k, v (B, Hkv, S, D); the last query has the position
    of the last key. sink (H,): e**sink is added to the denominators."""
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    scores = torch.einsum('bhtd,bhsd->bhts', q, k) / math.sqrt(q.size(-1))
    seen = visible(k.size(2), window)[k.size(2) - q.size(2):]
    scores = scores.masked_fill(~seen, -math.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, sink.to(torch.float64)[:, None, None])
    return torch.einsum('bhts,bhsd->bhtd', (scores - total).exp(), v)


def rotate(x, positions, theta, fraction=1.0):
    """Rotate half-split pairs of x (..., T, D), as complex numbers, by pos * theta**(-2d/D); only
    the first `fraction` of the pairs."""
    D = x.size(-1)
    speed = torch.tensor([theta ** (-2 * d / D) * (d < round(fraction * D / 2))
                          for d in range(D // 2)], dtype=torch.float64)
    angle = torch.as_tensor(positions, dtype=torch.float64)[:, None] * speed
    z = torch.complex(x[..., :D // 2], x[..., D // 2:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def rms_norm(x, gain):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def layer_norm(x, gain, bias):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    return y if bias is None else y + bias


def gelu(x, form):
    if form == 'relu2':
        return torch.where(x > 0, x * x, 0.0)
    if form == 'tanh':
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def int8_rounded(x):
    """x rounded as if stored in int8 with an fp16 scale per position and head; straight-through
    gradient."""
    scale = (x.detach().abs().amax(-1, keepdim=True) / 127).half().double()
    return x + ((x / scale).round().clamp(-127, 127) * scale - x).detach()


class Reference:
    """logits = Reference(state_dict, config)(idx): (B, T) -> (B, T, V) in float64, differentiable
    in the state dict."""

    def __init__(self, state, config):
        for f in dataclasses.fields(config):
            if 'fast' not in f.metadata['known']:
                assert getattr(config, f.name) == f.default, f'{f.name}: the reference lacks it'
        self.state = {name: x.to(torch.float64) for name, x in state.items()}
        self.config = config
        self.head_dim = config.head_dim or config.n_embd // config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head

    def linear(self, x, name):
        y = x @ self.state[name + '.weight'].T
        return y + self.state.get(name + '.bias', 0)

    def norm(self, x, name):
        return layer_norm(x, self.state[name + '.weight'], self.state[name + '.bias']
                          if self.config.bias else None)

    def positioned(self, x, i, gain):
        """q or k (B, h, T, D) of layer `i` after QK-norm and RoPE."""
        if self.config.qk_norm:
            x = rms_norm(x, self.state[f'transformer.h.{i}.attn.{gain}.weight'])
        return self.rotated(x, i)

    def rotated(self, x, i, direction=1):
        c = self.config
        if c.pos_embedding != 'rope' or (c.kv_latent and not is_local(c, i)):
            return x
        if is_local(c, i):
            return rotate(x, range(0, direction * x.size(2), direction), c.rope_theta)
        return rotate(x, range(0, direction * x.size(2), direction),
                      c.rope_theta_global or c.rope_theta, c.rope_fraction_global)

    def attention(self, x, i, held):
        B, T, _ = x.shape
        c, prefix = self.config, f'transformer.h.{i}.attn.'
        D, n_q = self.head_dim, c.n_head
        n_kv = of_layer(c, i, 'kv_head_pattern', 0) or self.n_kv_head
        local = is_local(c, i)
        latent = c.kv_latent * (not local)
        tied = c.kv_tied == 'all' or bool(c.kv_tied and not local)
        rows = self.linear(x, prefix + 'c_attn')
        q = rows[..., :n_q * D].view(B, T, n_q, D).transpose(1, 2)
        q, rest = self.positioned(q, i, 'q_norm'), rows[..., n_q * D:]
        owner = kv_owner(c, i)
        if owner == i:
            heads = rest.view(B, T, -1, latent or D).transpose(1, 2)
            k = self.positioned(heads[:, :1 if latent else n_kv], i, 'k_norm')
            if c.key_offset and not local:
                before = torch.zeros_like(k)
                before[:, :, 1:] = k[:, :, :-1]
                from_before = torch.tensor([d % (D // 2) >= D // 4 for d in range(D)])
                k = torch.where(from_before, before, k)
            v = k if tied or latent else heads[:, n_kv:]
            assert rest.size(-1) == (latent or n_kv * D * (1 if tied else 2))
            held[i] = (int8_rounded(k), int8_rounded(v)) if c.kv_quant_train else (k, v)
        else:
            assert rest.size(-1) == 0
        k, v = held[owner]
        if latent:
            k, v = ((each[:, 0] @ self.state[prefix + name].T).view(B, T, n_q, D).transpose(1, 2)
                    for each, name in ((k, 'k_up'), (v, 'v_up')))
        sink = self.state[prefix + 'sink'] if c.attn_sink else None
        y = dense_attention(q, k, v, of_layer(c, i, 'window_pattern', c.window_size * local), sink)
        if tied:
            y = self.rotated(y, i, direction=-1)
        if c.attn_gate:
            y = y * self.linear(x, prefix + 'gate').sigmoid().transpose(1, 2)[..., None]
        return self.linear(y.transpose(1, 2).reshape(B, T, -1), f'transformer.h.{i}.attn.c_proj')

    def mlp(self, x, i):
        hidden = gelu(self.linear(x, f'transformer.h.{i}.mlp.c_fc'), self.config.gelu)
        return self.linear(hidden, f'transformer.h.{i}.mlp.c_proj')

    def __call__(self, idx):
        x = self.state['transformer.wte.weight'][idx]
        if self.config.pos_embedding == 'learned':
            x = x + self.state['transformer.wpe.weight'][:idx.size(1)]
        held = {}
        for i in range(self.config.n_layer):
            x = x + self.attention(self.norm(x, f'transformer.h.{i}.ln_1'), i, held)
            x = x + self.mlp(self.norm(x, f'transformer.h.{i}.ln_2'), i)
        return self.norm(x, 'transformer.ln_f') @ self.state['transformer.wte.weight'].T


def cross_entropy(logits, targets):
    """Mean over the targets that are not -1."""
    kept = targets != -1
    logits, targets = logits[kept], targets[kept]
    return (logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]).mean()
