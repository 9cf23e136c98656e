"""GPT with a small memory: nanoGPT's model, plus the settings that decide what it must remember.

With the default config this *is* nanoGPT: the same parameters under the same names, the same logits. What differs by
layer (window, KV slot, who owns it) comes from the plan (`kv/plan.py`), what attention does from `attention/`.

    model = GPT(GPTConfig(n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True,
                          window_size=256, pos_embedding='rope', qk_norm=True))
    logits, loss = model(idx, targets)               # training, as in nanoGPT
    cache = model.new_cache(batch_size=1, max_seq_len=1024)
    logits, _ = model(idx, cache=cache)              # appends idx to the cache; logits of the last position
"""
import dataclasses
import functools
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from attention import cached_attention, causal_attention
from attention.backends import BACKENDS, choose
from attention.masks import block_mask
from attention.qk import norm_and_rotate, suits_write_qkv, write_qkv
from attention.rope import RotaryTable
from config.errors import UserError
from config.gpt_config import GPTConfig, model_args
from engine.linear import Linear
from kv.cache import KVCache
from kv.paged import PAGE_SIZE, PagedKVCache
from kv.plan import GLOBAL, LOCAL, Layer, plan_kv
from kv.quant import fake_quantize_int8
from kv.static import StaticCache

__all__ = ['GPT', 'GPTConfig', 'model_args']


def cross_entropy(logits, targets, ignore_index: int = -1) -> torch.Tensor:
    """Mean over the targets that are not `ignore_index`, in float32 at least. logits (N, V), targets (N,) int64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=ignore_index)


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias, under nanoGPT's parameter names."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if weight.dtype != x.dtype and x.dtype == torch.float32:  # FSDP2 gathers a block in half precision
            weight, bias = weight.float(), None if bias is None else bias.float()
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Attention of one layer. An owner computes K and V; a layer that reads another's KV has only the query rows."""

    def __init__(self, config: GPTConfig, layer: Layer, n_kv_head: int):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head, self.head_dim = layer, config.n_head, n_kv_head, config.resolved_head_dim
        self.dropout, self.kv_quant_train, self.backend = config.dropout, config.kv_quant_train, 'auto'
        self.rows = [self.n_head] + [n_kv_head] * 2 * layer.owns  # heads of q | k | v among the rows of c_attn
        self.c_attn = Linear(config.n_embd, sum(self.rows) * self.head_dim, bias=config.bias)
        self.c_proj = Linear(self.n_head * self.head_dim, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm and layer.owns else None

    def forward(self, x, rope=None, kv=None, cache=None):
        """x (B, t, C) -> (B, t, C) and the K, V (each (B, Hkv, t, D)) that later layers of this slot read.

        rope: (cos, sin) for these positions, or None. kv: the owner's K, V, in layers that do not own theirs.
        """
        B, t, _ = x.shape
        qkv = self.c_attn(x).view(B, t, -1, self.head_dim)                               # heads of q | k | v
        if isinstance(cache, StaticCache) and suits_write_qkv(qkv, cache, self.kv_quant_train):
            target = cache.target(self.layer.slot) if self.layer.owns else None
            q = write_qkv(qkv, self.n_head, self.q_norm, self.k_norm, rope, target)
            return self._projected(cached_attention(q, cache.view(self.layer.slot), self.layer.window)), None
        q, *kv_rows = qkv.transpose(1, 2).split(self.rows, dim=1)
        q = norm_and_rotate(q, self.q_norm, rope)                                        # (B, H, t, D)
        if self.layer.owns:
            k, v = norm_and_rotate(kv_rows[0], self.k_norm, rope), kv_rows[1]            # (B, Hkv, t, D)
            if self.kv_quant_train == 'int8' and (cache is None or cache.kv_dtype != 'int8'):
                k, v = fake_quantize_int8(k), fake_quantize_int8(v)
            kv = k, v
        if cache is None:
            y = causal_attention(q, *kv, self.layer.window, self.dropout if self.training else 0.0, self.backend)
        else:
            view = cache.append(self.layer.slot, *kv) if self.layer.owns else cache.view(self.layer.slot)
            y = cached_attention(q, view, self.layer.window)
        return self._projected(y), kv

    def _projected(self, y):
        """y (B, H, t, D) -> (B, t, C)."""
        y = self.c_proj(y.transpose(1, 2).flatten(2))
        return self.resid_dropout(y) if self.training else y


class MLP(nn.Module):

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.resolved_mlp_hidden, bias=config.bias)
        self.gelu = nn.GELU(approximate='tanh' if config.gelu == 'tanh' else 'none')
        self.c_proj = Linear(config.resolved_mlp_hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        y = self.c_proj(self.gelu(self.c_fc(x)))
        return self.dropout(y) if self.training else y  # a call that does nothing is felt in a decode step


class Block(nn.Module):

    def __init__(self, config: GPTConfig, layer: Layer, n_kv_head: int):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer, n_kv_head)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, kv=None, cache=None):
        y, kv = self.attn(self.ln_1(x), rope, kv, cache)
        x = x + y
        return x + self.feed_forward(x), kv

    def feed_forward(self, x):
        return self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's GPT plus every field of `GPTConfig`.

    Raises:
        UserError (a ValueError): from the config or its KV plan.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.plan = plan_kv(config)
        # training may hand in a loss of (x, weight, targets) that never holds all logits, and a way
        # to run the blocks that keeps fewer activations (`training.loss`, `training.recompute`)
        self.loss_fn = self.recompute = None
        self.captured = True  # decode steps are replayed as CUDA graphs where they can be (engine/captured.py)
        rope = config.pos_embedding == 'rope'
        # registration order is nanoGPT's: the optimizer state of a checkpoint is indexed by it
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            **({} if rope else dict(wpe=nn.Embedding(config.block_size, config.n_embd))),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config, layer, self.plan.n_kv_head) for layer in self.plan.layers]),
            ln_f=LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # https://paperswithcode.com/method/weight-tying
        theta = {LOCAL: config.rope_theta, GLOBAL: config.rope_theta_global or config.rope_theta}
        tables = {base: RotaryTable(self.plan.head_dim, base) for base in theta.values()}
        self.rotary = {kind: tables[base] for kind, base in theta.items()} if rope else None

        self.apply(self._init_weights)
        for name, p in self.named_parameters():  # residual projections are scaled down, per the GPT-2 paper
            if name.endswith('c_proj.weight'):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def get_num_params(self, non_embedding=True):
        """Number of parameters; as in nanoGPT `non_embedding` leaves out only the position embeddings."""
        n_params = sum(p.numel() for p in self.parameters())
        if non_embedding and self.rotary is None:
            n_params -= self.transformer.wpe.weight.numel()
        return n_params

    @property
    def device(self):
        return self.lm_head.weight.device

    def forward(self, idx, targets=None, *, cache: KVCache | None = None, lens=None, rows=None, all_logits=False):
        """Logits and loss, as in nanoGPT; with a cache, of tokens appended behind what it holds.

        Args:
            idx: (B, t) int64.
            targets: (B, t), -1 = ignored; then logits are (B, t, V) and loss is the mean cross-entropy, in float32. Not with
                a cache. With a `loss_fn`, logits are None.
            cache: from `new_cache`; any t >= 1.
            lens: with a cache, row b appends only its first lens[b] tokens (0 = untouched; its logits mean nothing).
            rows: with a cache, the numbers of the cache rows that the B rows of idx are; None = all of them, in order.
            all_logits: (B, t, V) also without targets; otherwise (B, 1, V), of each row's last token.
        Raises:
            UserError (a ValueError): a sequence longer than block_size with learned positions, or than the cache holds.
        """
        B, t = idx.shape
        if t == 0:
            raise UserError('idx has no tokens (t=0): give at least one')
        if cache is not None and (targets is not None or self.training):
            raise UserError('a cache is for inference: call model.eval(), and give no targets')
        for name, given in (('lens', lens), ('rows', rows)):
            if cache is None and given is not None:
                raise UserError(f'{name}={list(given)} is about the rows of a cache, but there is no cache')
        step = None if cache is None else self._begin(cache, B, t, lens, rows)
        try:
            x, rope = self._embed(idx, step)
        except Exception:  # such as an id outside of the vocabulary: nothing has been written yet
            if cache is not None:
                cache.abandon()
            raise
        blocks = functools.partial(self._blocks, rope=rope, cache=cache)
        if self.recompute is not None and self.training:
            x = self.recompute(blocks, len(self.plan.layers), x)
        else:
            x, _ = blocks(0, len(self.plan.layers), x, {})
        x = self.transformer.ln_f(x)
        if cache is not None:
            cache.commit()
        if targets is not None:
            if self.loss_fn is not None:
                return None, self.loss_fn(x.flatten(0, 1), self.lm_head.weight, targets.reshape(-1))
            logits = self.lm_head(x)
            return logits, cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
        if not all_logits:
            x = x[:, -1:] if step is None or step.uniform or step.t == 1 else self._last(x, step)
        return self.lm_head(x), None

    def _blocks(self, first, last, x, kvs, rope, cache):
        """The blocks first to last - 1. kvs: slot -> K, V of its owner, for the layers that read them; returns x and those of
        them that later blocks read."""
        layers, kvs = self.plan.layers, dict(kvs)
        for block, layer in zip(self.transformer.h[first:last], layers[first:last]):
            x, kvs[layer.slot] = block(x, rope.get(layer.kind), kvs.get(layer.slot), cache)
        return x, {layer.slot: kvs[layer.slot] for layer in layers[last:] if not layer.owns and layer.slot in kvs}

    @property
    def attention_backend(self) -> str:
        """What computes attention over whole sequences: one of `attention.backends.BACKENDS`."""
        return self.transformer.h[0].attn.backend

    @attention_backend.setter
    def attention_backend(self, name: str):
        if name not in BACKENDS:
            raise UserError(f"attention_backend={name!r}: allowed are {', '.join(map(repr, BACKENDS))}")
        for block in self.transformer.h:
            block.attn.backend = name

    def _begin(self, cache, B, t, lens, rows):
        if rows is None and B != cache.batch_size:
            raise UserError(f'idx has {B} rows and the cache has batch_size={cache.batch_size}')
        if rows is not None and B != len(rows):
            raise UserError(f'idx has {B} rows and rows={list(rows)} names {len(rows)}')
        return cache.begin(t, lens, rows)

    def _embed(self, idx, step):
        """(B, t, C) token (+ position) embeddings, and the rotary tables of this step by kind of layer."""
        t, end = idx.size(1), idx.size(1) if step is None else step.end
        start = end - t
        positions = step.positions() if step is not None and not step.uniform else None
        x = self.transformer.wte(idx)  # (B, t, C)
        if self.rotary is not None:
            dtype = self.lm_head.weight.dtype
            made = {table: table(start, end, idx.device, dtype) if positions is None else table.at(positions, end, dtype)
                    for table in self.rotary.values()}
            return self.transformer.drop(x), {kind: made[table] for kind, table in self.rotary.items()}
        if end > self.config.block_size and (step is None or step.uniform):
            raise UserError(f'a sequence of {end} tokens is longer than block_size={self.config.block_size}, '
                            "for which pos_embedding='learned' has positions")
        if positions is None:
            positions = torch.arange(start, end, device=idx.device)
        # padding of a ragged step may stand past the table
        return self.transformer.drop(x + self.transformer.wpe(positions.clamp(max=self.config.block_size - 1))), {}

    @staticmethod
    def _last(x, step):
        last = torch.tensor([max(n - 1, 0) for n in step.lens], device=x.device)
        return x[torch.arange(x.size(0), device=x.device), last][:, None]

    def prepare(self, n_positions: int) -> None:
        """Build what sequences of `n_positions` need and a compiled forward should find: rotary tables, block masks."""
        dtype = self.lm_head.weight.dtype
        for table in (self.rotary or {}).values():
            table(0, n_positions, self.device, dtype)
        for layer in self.plan.layers:
            # without dropout: evaluation has none, whatever training does
            if (self.attention_backend in ('auto', 'flex')
                    and choose(layer.kind, self.attention_backend, self.device, dtype, self.plan.head_dim) == 'flex'):
                block_mask(n_positions, min(layer.window or n_positions, n_positions), self.device)

    def new_cache(self, batch_size: int, max_seq_len: int, kv_dtype: str = 'auto', *, n_pages: int = 0,
                  page_size: int = PAGE_SIZE) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `max_seq_len` tokens.

        kv_dtype: 'auto' (that of the parameters), 'float32', 'bfloat16', 'float16' or 'int8'.
        n_pages: global slots share a pool of so many pages of `page_size` positions (`kv.paged`); 0 = contiguous ones.

        Raises:
            UserError (a ValueError): max_seq_len over block_size with learned positions; an unknown kv_dtype.
        """
        if self.rotary is None and max_seq_len > self.config.block_size:
            raise UserError(f'max_seq_len={max_seq_len} is more than block_size={self.config.block_size}, '
                            "for which pos_embedding='learned' has positions")
        kinds = dict(kv_dtype=self.resolved_kv_dtype(kv_dtype), compute_dtype=self.lm_head.weight.dtype, device=self.device)
        if n_pages:
            return PagedKVCache(self.plan, batch_size, max_seq_len, n_pages, page_size, **kinds)
        return KVCache(self.plan, batch_size, max_seq_len, **kinds)

    def resolved_kv_dtype(self, kv_dtype: str) -> str:
        """What 'auto' stands for: the dtype of the parameters."""
        return str(self.lm_head.weight.dtype).removeprefix('torch.') if kv_dtype == 'auto' else kv_dtype

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """GPT-2's weights: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl' from the hub, or a folder; see
        `interop.huggingface`. override_args may have 'dropout' and 'gelu'."""
        from interop.huggingface import from_pretrained
        return from_pretrained(model_type, override_args)

    def crop_block_size(self, block_size):
        """Shorten the context, in place: later positions are cut off.

        Raises:
            UserError (a ValueError): a block_size below 1 or above the model's.
        """
        if not 1 <= block_size <= self.config.block_size:
            raise UserError(f'block_size={block_size}: can only be cropped, to 1 to {self.config.block_size}')
        self.config = dataclasses.replace(self.config, block_size=block_size)
        self.plan = plan_kv(self.config)
        if self.rotary is None:
            wpe = self.transformer.wpe
            wpe.weight, wpe.num_embeddings = nn.Parameter(wpe.weight.detach()[:block_size].clone()), block_size

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, *, stop_tokens=()):
        """idx (B, t) -> (B, t + max_new_tokens), drawn from the global RNG as in nanoGPT; less where all rows have ended on
        one of `stop_tokens`. See `engine.generate`."""
        from engine.generate import generate
        return generate(self, idx, max_new_tokens, temperature, top_k, stop_tokens)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW with nanoGPT's two groups (matrices decay, vectors do not); see `training.optim`."""
        from training.optim import configure_optimizers
        return configure_optimizers(self, weight_decay, learning_rate, betas, device_type)

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        """nanoGPT's model FLOPs utilisation, in units of an A100's 312 TFLOPS; see `training.flops`."""
        from training.flops import estimate_mfu
        return estimate_mfu(self, fwdbwd_per_iter, dt)
