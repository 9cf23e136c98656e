"""The complete model again, dense and in float64, written only from DESIGN's rules: the reference
for every faster implementation.

Nothing here comes from attention/, kv/ or model.py: masks are explicit (T, T) matrices, K/V heads
are repeated, rotations are complex multiplications, and each layer computes its own kind, window
and KV owner. """
import math

import torch


def is_local(config, i):
    return config.layer_pattern[i % len(config.layer_pattern)] == 'L'


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


def dense_attention(q, k, v, window=0):
    """float64 attention of q (B, H, t, D) over k, v (B, Hkv, S, D); the last query has the position
    of the last key."""
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    scores = torch.einsum('bhtd,bhsd->bhts', q, k) / math.sqrt(q.size(-1))
    seen = visible(k.size(2), window)[k.size(2) - q.size(2):]
    return torch.einsum('bhts,bhsd->bhtd', scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def rotate(x, positions, theta):
    """Rotate half-split pairs of x (..., T, D), as complex numbers, by pos * theta**(-2d/D)."""
    D = x.size(-1)
    speed = torch.tensor([theta ** (-2 * d / D) for d in range(D // 2)], dtype=torch.float64)
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
        self.state = {name: x.to(torch.float64) for name, x in state.items()}
        self.config = config
        self.head_dim = config.head_dim or config.n_embd // config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head

    def linear(self, x, name):
        y = x @ self.state[name + '.weight'].T
        return y + self.state[name + '.bias'] if self.config.bias else y

    def norm(self, x, name):
        return layer_norm(x, self.state[name + '.weight'], self.state[name + '.bias']
                          if self.config.bias else None)

    def positioned(self, x, i, gain):
        """q or k (B, h, T, D) of layer `i` after QK-norm and RoPE."""
        c = self.config
        if c.qk_norm:
            x = rms_norm(x, self.state[f'transformer.h.{i}.attn.{gain}.weight'])
        if c.pos_embedding == 'rope':
            theta = c.rope_theta if is_local(c,
                                             i) or not c.rope_theta_global else c.rope_theta_global
            x = rotate(x, range(x.size(2)), theta)
        return x

    def attention(self, x, i, held):
        B, T, _ = x.shape
        D, n_q, n_kv = self.head_dim, self.config.n_head, self.n_kv_head
        rows = self.linear(x, f'transformer.h.{i}.attn.c_attn').view(B, T, -1, D).transpose(1, 2)
        q = self.positioned(rows[:, :n_q], i, 'q_norm')
        owner = kv_owner(self.config, i)
        if owner == i:
            k, v = self.positioned(rows[:, n_q:n_q + n_kv], i, 'k_norm'), rows[:, n_q + n_kv:]
            held[i] = (int8_rounded(k), int8_rounded(v)) if self.config.kv_quant_train else (k, v)
        assert rows.size(1) == n_q + (2 * n_kv if owner == i else 0)
        y = dense_attention(q, *held[owner], self.config.window_size if is_local(self.config, i)
                            else 0)
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
