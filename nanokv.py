"""nanoKV in one file: a GPT that remembers little, trained on a text and sampled from its cache.

    python nanokv.py shakespeare.txt     # any text file; 1 to 2 minutes on 2 CPU cores

It prints the loss in training (4.2 to about 1.9), 200 characters that the model writes, the bytes
of its cache beside those of a GPT-2 of this shape, and how far its logits are from those without.

What is a KV cache? To write a token, a GPT attends to the keys and values (K and V) of all tokens
before it, in every layer. nanoGPT recomputes them for each new token. But attention is causal, so
they never change: one can keep them, in a KV cache, and compute only the new token. GPT-2 keeps K
and V of width n_embd in each layer, 36,864 bytes for a token in bfloat16. Every text that is being
written has a cache of its own, and each new token reads all of it. So the cache limits how many
texts fit in memory, how long they can get, and how fast they are written.

This model remembers less. In its pattern LLLLLG, a local layer (L) attends to the last W tokens
only, a global layer (G) to all. Layers share *slots* of K and V: the first layer of a slot computes
them (*), the others only read them. Layers of one letter share a slot in each repetition of the
pattern; the global layers of all repetitions share one.

    layer            0   1   2   3   4   5  |  6   7   8   9  10  11
    layer_pattern    L   L   L   L   L   G  |  L   L   L   L   L   G
    kv_share         A   A   B   B   B   C  |  A   A   B   B   B   C
    slot             0*  0   1*  1   1   2* |  3*  3   4*  4   4   2

The cache of T tokens then has this many pairs of a K and a V of one head:   T = 200, W = 32
    GPT-2: 12 layers, 4 heads           12 * T * 4                                     9,600
    one K/V head for all query heads    12 * T                                         2,400
    windows in local layers             10 * W + 2 * T                                   720
    shared slots                         4 * W + 1 * T                                   328

Read next: model.py, this model with all options (its GPT loads these weights as they are), then
kv/plan.py, which turns a pattern into slots, and kv/cache.py, the cache of many texts at once.
"""
import argparse
import math
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int = 128          # tokens in a training sequence, T
    n_layer: int = 12
    n_head: int = 4                # query heads; there is one K/V head
    n_embd: int = 128              # C
    layer_pattern: str = 'LLLLLG'  # repeated over the layers
    kv_share: str = 'AABBBC'       # equal letters of a repetition share a slot
    window_size: int = 32          # tokens that a local layer attends to, itself included, W


# window: infinite in a global layer. owns: whether the layer computes the K and V of its slot
Layer = namedtuple('Layer', 'slot window owns')


def plan(config):
    """The slot and the window of each layer: the table at the top of this file."""
    layers, slots = [], {}
    for i in range(config.n_layer):
        repetition, place = divmod(i, len(config.layer_pattern))
        if config.layer_pattern[place] == 'G':
            key, window = 'G', math.inf
        else:
            key, window = (repetition, config.kv_share[place]), config.window_size
        owns = key not in slots
        slot = slots.setdefault(key, len(slots))  # slots are numbered in the order of their owners
        layers.append(Layer(slot, window, owns))
    return layers


class KVCache:
    """K and V of texts that are written one token at a time.

    A local slot is a ring: position p is stored at index p % W, over position p - W, which has just
    left the window. So a full ring is the window, and attention needs no mask. (Several tokens at
    once would have to attend before they overwrite: the first still sees what the last replaces.)
    """

    def __init__(self, config, batch_size, max_len, dtype):
        self.length, self.max_len, self.slots = 0, max_len, []
        for layer in plan(config):
            if layer.owns:
                capacity, head_dim = min(layer.window, max_len), config.n_embd // config.n_head
                self.slots.append(torch.zeros(2, batch_size, 1, capacity, head_dim, dtype=dtype))

    def append(self, slot, k, v):
        """k, v (B, 1, 1, hs) of the new token -> K and V that it attends to, (2, B, 1, S, hs)."""
        stored = self.slots[slot]
        capacity = stored.size(3)
        stored[:, :, :, self.length % capacity] = torch.stack([k, v])[:, :, :, 0]

        # a ring is out of order, which does no harm: K has been rotated by its position
        return stored[:, :, :, :self.length + 1]


def rotate(x, positions):
    """RoPE: turn each pair (d, d + hs/2) of x (B, h, T, hs) by an angle of its position."""
    d = torch.arange(0, x.size(-1), 2, dtype=torch.float64)
    angles = positions[:, None] * 10000.0 ** (-d / x.size(-1))      # (T, hs/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)                                       # (B, h, T, hs/2) each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.head_dim = config.n_embd // config.n_head
        n_heads = config.n_head + 2 if layer.owns else config.n_head  # of q, k and v, or of q
        self.c_attn = nn.Linear(config.n_embd, n_heads * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6)  # keeps the training of MQA stable
        if layer.owns:
            self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def forward(self, x, positions, kvs, cache):
        B, T, C = x.size()
        heads = self.c_attn(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(heads[:, :self.n_head]), positions)  # (B, nh, T, hs)

        slot = self.layer.slot
        if self.layer.owns:
            k, v = heads[:, self.n_head:].chunk(2, dim=1)           # (B, 1, T, hs) each
            k = rotate(self.k_norm(k), positions)
            kvs[slot] = (k, v) if cache is None else cache.append(slot, k, v)
        k, v = kvs[slot]                                            # (B, 1, S, hs)

        # all query heads attend to the one K/V head; a cache holds just what its token sees
        seen = None
        if cache is None:
            distance = positions[:, None] - positions               # (T, T), from query to key
            seen = (distance >= 0) & (distance < self.layer.window)
        y = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = nn.ModuleDict(dict(
            c_fc=nn.Linear(config.n_embd, 4 * config.n_embd, bias=False),
            c_proj=nn.Linear(4 * config.n_embd, config.n_embd, bias=False),
        ))

    def forward(self, x, positions, kvs, cache):
        x = x + self.attn(self.ln_1(x), positions, kvs, cache)
        hidden = F.gelu(self.mlp.c_fc(self.ln_2(x)))                # (B, T, 4 * C)
        return x + self.mlp.c_proj(hidden)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList(Block(config, layer) for layer in plan(config)),
            ln_f=nn.LayerNorm(config.n_embd, bias=False),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if name.endswith('c_proj.weight'):  # these add to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, cache=None):
        """idx (B, T) -> logits (B, T, V); with a cache, idx (B, 1) follows what it holds."""
        T = idx.size(1)
        start = 0 if cache is None else cache.length
        if cache is not None and (T > 1 or start == cache.max_len):
            raise ValueError(f'{T} tokens after {start}: a cache takes 1, up to {cache.max_len}')

        x = self.transformer.wte(idx)                               # (B, T, C)
        positions = torch.arange(start, start + T)
        kvs = {}  # slot -> its K and V, from the layer that computes them to those that read them
        for block in self.transformer.h:
            x = block(x, positions, kvs, cache)
        if cache is not None:
            cache.length += 1
        return self.lm_head(self.transformer.ln_f(x))


def train(model, tokens, steps, batch_size=12, learning_rate=3e-3):
    T = model.config.block_size
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95))
    for step in range(steps):
        starts = torch.randint(len(tokens) - T, (batch_size,))
        batch = torch.stack([tokens[i:i + T + 1] for i in starts])  # (B, T + 1)
        logits = model(batch[:, :-1])                               # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        for group in optimizer.param_groups:  # warmup, then linear decay
            group['lr'] = learning_rate * min((step + 1) / 20, 1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f'step {step}: loss {loss.item():.3f}', flush=True)


@torch.no_grad()
def write(model, cache, first, n, temperature=0.8):
    """Returns `first` and n tokens after it, (n + 1,), and their logits, (n, V)."""
    tokens, logits = [first], []
    for _ in range(n):
        logits.append(model(torch.tensor([tokens[-1:]]), cache)[0, 0])
        probs = F.softmax(logits[-1] / temperature, dim=-1)
        tokens.append(torch.multinomial(probs, 1).item())
    return torch.tensor(tokens), torch.stack(logits)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description='Train a GPT with a small KV cache on a text.')
    parser.add_argument('file', help='a text file')
    parser.add_argument('--steps', type=int, default=300)
    args = parser.parse_args()
    if not Path(args.file).is_file():
        sys.exit(f'{args.file}: no such file')
    text = Path(args.file).read_text(encoding='utf-8', errors='replace')
    chars = sorted(set(text))  # a token is a character
    id_of = {c: i for i, c in enumerate(chars)}
    tokens = torch.tensor([id_of[c] for c in text])
    config = GPTConfig(vocab_size=len(chars))
    if len(tokens) <= config.block_size:
        sys.exit(f'{args.file} has {len(tokens)} characters, fewer than {config.block_size + 1}')
    torch.manual_seed(1337)
    model = GPT(config)
    train(model, tokens, args.steps)

    cache = KVCache(config, batch_size=1, max_len=200, dtype=torch.float32)
    written, cached = write(model, cache, tokens[0].item(), 200)
    print(''.join(chars[i] for i in written[1:]))

    nbytes = sum(slot.nbytes for slot in cache.slots)
    gpt2 = 2 * config.n_layer * config.n_embd * 200 * 4  # K and V; 4 bytes a number
    print(f'cache: {nbytes:,} bytes; GPT-2 of this shape: {gpt2:,}, {gpt2 / nbytes:.1f} times that')
    difference = (cached - model(written[None, :-1])[0]).abs().max().item()
    print(f'logits differ from those without a cache by {difference:.0e}')
