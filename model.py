"""GPT with a small KV cache: nanoGPT's model, plus the settings that shrink the cache.

With the default config this *is* nanoGPT: the same parameters under the same names, the same
logits. The plan (`kv/plan.py`) specifies each layer's window, KV slot and owner; `attention/`
computes attention; the cache (`kv/cache.py`) stores K and V during inference.

    model = GPT(GPTConfig(n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC',
                          share_global_kv=True, window_size=256, pos_embedding='rope',
                          qk_norm=True))
    logits, loss = model(idx, targets)               # training, as in nanoGPT
    cache = model.eval().new_cache(batch_size=1, max_seq_len=1024)
    logits, _ = model(idx, cache=cache)              # appends idx; logits of the last position
"""
import functools
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from attention import causal_attention
from attention.rope import RotaryTable, apply_rope, norm_and_rotate, offset_keys, split_by_speed
from common.errors import UserError
from common.gpt_config import GPTConfig, model_args
from kv.cache import KVCache
from kv.plan import GLOBAL, LOCAL, Layer, Slot, plan_kv
from kv.quantize import fake_quantize_int8

__all__ = ['GPT', 'GPTConfig', 'model_args']


def cross_entropy(logits, targets, ignore_index: int = -1) -> torch.Tensor:
    """logits (N, V), targets (N,) int64 -> mean over targets not ignored, in at least float32."""
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
        if weight.dtype != x.dtype and x.dtype == torch.float32:  # FSDP2 gathers half precision
            weight, bias = weight.float(), None if bias is None else bias.float()
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """Attention of one layer. An owner computes K and V; a layer that reads those of another layer
    has only the query rows of `c_attn`."""

    def __init__(self, config: GPTConfig, layer: Layer, slot: Slot):
        super().__init__()
        self.layer, self.slot, self.head_dim = layer, slot, config.resolved_head_dim
        self.n_head, self.dropout = config.n_head, config.dropout
        self.kv_quant_train = config.kv_quant_train
        # training may replace these functions
        self.backend, self.attend, self.norm_and_rotate = 'auto', causal_attention, norm_and_rotate

        # c_attn computes the heads of q | k | v, or of q | k; a latent is as wide as several heads
        self.head_counts = [self.n_head]
        if layer.owns:
            n_stored = slot.n_kv_head * slot.head_dim // self.head_dim
            self.head_counts += [n_stored] if slot.tied else [n_stored, n_stored]
        n_out = sum(self.head_counts) * self.head_dim
        self.c_attn = nn.Linear(config.n_embd, n_out, bias=config.bias)
        self.c_proj = nn.Linear(self.n_head * self.head_dim, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

        self.gate = nn.Linear(config.n_embd, self.n_head) if config.attn_gate else None
        self.q_norm = self.k_norm = self.sink = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6)
            if layer.owns:
                self.k_norm = nn.RMSNorm(slot.head_dim, eps=1e-6)
        if config.attn_sink:
            self.sink = nn.Parameter(torch.zeros(self.n_head))

    def queries_keys_values(self, x, rope=None, cache=None):
        """x (B, t, C) -> q (B, H, t, D), and in an owner its (K, V), each (B, Hkv, t, D), otherwise
        None. rope: (cos, sin) for these positions, or None."""
        heads = self.c_attn(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        q, *own = heads.split(self.head_counts, dim=1)                # (B, H, t, D)
        kv = self.keys_and_values(own, rope, cache) if self.layer.owns else None
        return self.norm_and_rotate(q, self.q_norm, rope), kv

    def forward(self, q, kv, rope=None, cache=None, x=None):
        """q (B, H, t, D) -> (B, t, C), after attention.

        kv: (K, V) of the slot's owner. With a cache, which stores them, a reading layer has None.
        rope: (cos, sin) for the positions of q, or None. x: (B, t, C), the input, for a gate.
        """
        if cache is None:
            y = self.attend_to_sequence(q, *kv)
        else:
            y = self.attend_to_cache(q, kv, cache)
        if self.slot.tied and rope:  # V is rotated: rotate back, so that only distances matter
            cos, sin = rope
            y = apply_rope(y, cos, -sin)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().transpose(1, 2)[..., None]  # (B, H, t, D)
        return self.project(y)

    def keys_and_values(self, own, rope, cache):
        """The K and V that an owner stores, each (B, Hkv, t, D), from c_attn's output."""
        k = self.norm_and_rotate(self.stored_heads(own[0]), self.k_norm, rope)
        if self.slot.offset:
            fast, slow = split_by_speed(k)
            before = None if cache is None else cache.previous_key(self.layer, slow)
            k = offset_keys(fast, slow, before)
        kv = [k] if self.slot.tied else [k, own[1]]
        # an int8 cache quantizes by itself
        if self.kv_quant_train == 'int8' and (cache is None or cache.kv_dtype != 'int8'):
            kv = [fake_quantize_int8(x) for x in kv]
        return kv[0], kv[-1]

    def stored_heads(self, k):
        """c_attn's keys (B, heads, t, D), as the slot stores them: (B, Hkv, t, slot's D)."""
        return k

    def attend_to_sequence(self, q, k, v):
        """Attention within whole sequences, without a cache."""
        dropout_p = self.dropout if self.training else 0.0
        window = self.layer.mask or self.layer.window
        return self.attend(q, k, v, window, dropout_p, self.backend, self.sink)

    def attend_to_cache(self, q, kv, cache):
        """Attention to everything in the cache, after it has stored kv (None in a reader)."""
        return cache.attend(self.layer, q, kv, self.sink)

    def project(self, y):
        """y (B, H, t, D) -> (B, t, C)."""
        y = self.c_proj(y.transpose(1, 2).flatten(2))
        return self.resid_dropout(y) if self.training else y


class LatentAttention(CausalSelfAttention):
    """Attention whose slot stores one latent c per token, from which K and V of all heads are made:
    multi-head latent attention (DeepSeek-V2, 2024)."""

    def __init__(self, config: GPTConfig, layer: Layer, slot: Slot):
        super().__init__(config, layer, slot)
        shape = self.n_head * self.head_dim, slot.head_dim
        self.k_up = nn.Parameter(torch.randn(shape) * 0.02)
        self.v_up = nn.Parameter(torch.randn(shape) * 0.02)

    def stored_heads(self, k):
        return k.transpose(1, 2).flatten(2)[:, None]                  # (B, 1, t, dc)

    def attend_to_sequence(self, q, k, v):
        k, v = self.heads_from(k, self.k_up), self.heads_from(v, self.v_up)
        return super().attend_to_sequence(q, k, v)

    def heads_from(self, latent, up):
        """latent (B, 1, t, dc), up (H * D, dc) -> (B, H, t, D)."""
        return F.linear(latent[:, 0], up).unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def attend_to_cache(self, q, kv, cache):
        """(q k_up) c = q (k_up c): multi-query attention to the latents themselves."""
        k_up = self.k_up.view(self.n_head, self.head_dim, -1)
        v_up = self.v_up.view(self.n_head, self.head_dim, -1)
        scale = (self.slot.head_dim / self.head_dim) ** 0.5  # attention scales by the width of c
        return super().attend_to_cache(q @ (k_up * scale), kv, cache) @ v_up.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.resolved_mlp_hidden, bias=config.bias)
        self.gelu = nn.GELU(approximate='tanh' if config.gelu == 'tanh' else 'none')
        self.relu2 = config.gelu == 'relu2'  # ReLU squared (Primer, So et al. 2021)
        self.c_proj = nn.Linear(config.resolved_mlp_hidden, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        y = self.c_proj(F.relu(x).square() if self.relu2 else self.gelu(x))
        return self.dropout(y) if self.training else y  # call overhead matters in decoding


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: Layer, slot: Slot):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        attention = LatentAttention if slot.latent else CausalSelfAttention
        self.attn = attention(config, layer, slot)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, rope, kv=None, cache=None, trim=None):
        """x (B, t, C) -> the block's output, the (K, V) that later layers of its slot read (None
        with a cache, which stores them), and rope.

        rope: kind of layer -> (cos, sin) for these positions; kinds without positions are missing.
        kv: in a layer that reads, its owner's (K, V). trim: the cache's step if only each row's
        last token is needed once K and V are stored; then output and rope are of those.
        """
        kind = self.attn.layer.kind
        normed = self.ln_1(x)
        q, own = self.attn.queries_keys_values(normed, rope.get(kind), cache)
        if own is not None:
            kv = own
        if trim:
            x, q, normed = trim.last(x), trim.last(q), trim.last(normed)
            rope = {kind: [trim.last(table) for table in both] for kind, both in rope.items()}
        x = x + self.attn(q, kv, rope.get(kind), cache, normed)
        return x + self.feed_forward(x), kv if cache is None else None, rope

    def feed_forward(self, x):
        return self.mlp(self.ln_2(x))


def rotary_tables(config: GPTConfig, head_dim: int) -> dict[str, RotaryTable | None]:
    """Kind of layer -> its rotary table; None = layers of this kind have no positions (NoPE)."""
    theta, fraction = config.rope_theta_global or config.rope_theta, config.rope_fraction_global
    table = RotaryTable(head_dim, config.rope_theta)
    if fraction == 0.0:
        return {LOCAL: table, GLOBAL: None}
    if (theta, fraction) == (config.rope_theta, 1.0):
        return {LOCAL: table, GLOBAL: table}
    return {LOCAL: table, GLOBAL: RotaryTable(head_dim, theta, fraction)}


class GPT(nn.Module):
    """nanoGPT's GPT plus every field of `GPTConfig`.

    Raises UserError (a ValueError) if the config or its KV plan is invalid.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.plan = plan_kv(config)
        # Training may set a loss of (x, weight, targets) that never materializes all logits
        # (`training.step.loss`), and a function that runs the blocks with recomputation
        # (`training.memory.recompute`).
        self.loss_fn = self.recompute = None
        rope = config.pos_embedding == 'rope'
        wpe = {} if rope else dict(wpe=nn.Embedding(config.block_size, config.n_embd))
        slots = self.plan.slots
        # registration order is nanoGPT's: the optimizer state of a checkpoint is indexed by it
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            **wpe,
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, layer, slots[layer.slot]) for layer in self.plan.layers),
            ln_f=LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying (Press & Wolf 2017)
        self.rotary = rotary_tables(config, self.plan.head_dim) if rope else None

        self.apply(self._init_weights)
        for name, p in self.named_parameters():  # residual projections, as in the GPT-2 paper
            if name.endswith('c_proj.weight'):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def get_num_params(self, non_embedding=True):
        """Number of parameters; as in nanoGPT, `non_embedding` leaves out only the position
        embeddings."""
        n_params = sum(p.numel() for p in self.parameters())
        if non_embedding and self.rotary is None:
            n_params -= self.transformer.wpe.weight.numel()
        return n_params

    @property
    def device(self):
        return self.transformer.ln_f.weight.device

    @property
    def dtype(self):
        """The compute dtype: the dtype of the parameters that are never quantized."""
        return self.transformer.ln_f.weight.dtype

    def forward(self, idx, targets=None, *, cache: KVCache | None = None, lens=None, rows=None,
                all_logits=False):
        """Logits and loss, as in nanoGPT; with a cache, idx is appended to its tokens.

        Args:
            idx: (B, t) int64.
            targets: (B, t), -1 = ignored; then logits are (B, t, V) and loss is the mean
                cross-entropy, in float32. Not with a cache. With a `loss_fn`, logits are None.
            cache: from `new_cache`; any t >= 1.
            lens: with a cache, row b appends only its first lens[b] tokens; the rest is padding
                (any valid ids). 0 = the row is untouched and its logits are undefined.
            rows: with a cache, the cache row of each row of idx; None = all, in order.
            all_logits: (B, t, V) also without targets; otherwise (B, 1, V), of each row's last
                token.
        Raises:
            UserError (a ValueError): if a sequence is longer than the cache or, with learned
                positions, than block_size.
        """
        step = self._begin(idx, targets, cache, lens, rows)
        try:
            x, rope = self._embed(idx, step)
        except Exception:  # e.g. an id outside the vocabulary: nothing has been written yet
            if cache is not None:
                cache.abandon()
            raise

        trim = None if step is None or step.t == 1 or all_logits else step
        blocks = functools.partial(self._blocks, rope=rope, cache=cache, trim=trim)
        if self.recompute is not None and self.training:
            x = self.recompute(blocks, len(self.plan.layers), x)
        else:
            x, _ = blocks(0, len(self.plan.layers), x, {})
        x = self.transformer.ln_f(x)

        if targets is not None:
            return self._logits_and_loss(x, targets)
        logits = self.lm_head(x if all_logits else x[:, -1:])
        if cache is not None:
            cache.commit()
        return logits, None

    def _logits_and_loss(self, x, targets):
        """x (B, t, C), targets (B, t) -> logits (B, t, V), or None with a `loss_fn`, and loss."""
        targets = targets.reshape(-1)
        if self.loss_fn is not None:
            return None, self.loss_fn(x.flatten(0, 1), self.lm_head.weight, targets)
        logits = self.lm_head(x)
        return logits, cross_entropy(logits.flatten(0, 1), targets)

    def _begin(self, idx, targets, cache, lens, rows):
        """Check the arguments. Returns the cache's step, or None without a cache."""
        B, t = idx.shape
        if t == 0:
            raise UserError('idx has no tokens (t=0): give at least one')
        if cache is None:
            for name, given in (('lens', lens), ('rows', rows)):
                if given is not None:
                    raise UserError(f'{name}={list(given)} is about the rows of a cache, '
                                    'but there is no cache')
            return None
        if targets is not None or self.training:
            raise UserError('a cache is for inference: call model.eval(), and give no targets')
        if rows is None and B != cache.batch_size:
            raise UserError(f'idx has {B} rows and the cache has batch_size={cache.batch_size}')
        if rows is not None and B != len(rows):
            raise UserError(f'idx has {B} rows and rows={list(rows)} names {len(rows)}')
        return cache.begin(t, lens, rows)

    def _embed(self, idx, step):
        """(B, t, C) token (+ position) embeddings, and the rotary tables by kind of layer."""
        t = idx.size(1)
        end = t if step is None else step.end
        ragged = step is not None and not step.uniform
        x = self.transformer.wte(idx)                                 # (B, t, C)
        if self.rotary is not None:
            made = {}
            for table in set(filter(None, self.rotary.values())):
                if ragged:
                    made[table] = table.at(step.positions, end, self.dtype)
                else:
                    made[table] = table(end - t, end, idx.device, self.dtype)
            rope = {kind: made[table] for kind, table in self.rotary.items() if table}
            return self.transformer.drop(x), rope

        block_size = self.config.block_size
        longest = end if step is None else step.longest
        if longest > block_size:
            raise UserError(f'a sequence of {longest} tokens is longer than block_size='
                            f"{block_size}, for which pos_embedding='learned' has positions")
        positions = step.positions if ragged else torch.arange(end - t, end, device=idx.device)
        # the padding of a ragged step may extend past the table
        x = x + self.transformer.wpe(positions.clamp(max=block_size - 1))
        return self.transformer.drop(x), {}

    def _blocks(self, first, last, x, kvs, rope, cache, trim=None):
        """x after blocks first to last - 1, and the K, V that later blocks read.

        kvs: slot -> (K, V) of its owner. trim: the cache's step if only logits of last tokens are
        needed; the other tokens are dropped once the last K and V are stored.
        """
        layers, kvs = self.plan.layers, dict(kvs)
        for block, layer in zip(self.transformer.h[first:last], layers[first:last]):
            trim_here = trim if layer.index == self.plan.last_owner else None
            x, kvs[layer.slot], rope = block(x, rope, kvs.get(layer.slot), cache, trim_here)
        later = {layer.slot for layer in layers[last:] if not layer.owns}
        return x, {slot: kv for slot, kv in kvs.items() if slot in later}

    @property
    def attention_backend(self) -> str:
        """The backend for entire sequences: one of `attention.kernels.choose.BACKENDS`."""
        return self.transformer.h[0].attn.backend

    @attention_backend.setter
    def attention_backend(self, name: str):
        for block in self.transformer.h:
            block.attn.backend = name

    def new_cache(self, batch_size: int, max_seq_len: int, kv_dtype: str = 'auto',
                  cache_class=KVCache, **kwargs) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `max_seq_len` tokens.

        Args:
            kv_dtype: 'auto' (the parameters' dtype), 'float32', ... 'int8', 'int4'.
            cache_class: `KVCache` or a subclass, which also gets `kwargs`.
        Raises:
            UserError (a ValueError): if max_seq_len exceeds block_size with learned positions, or
                kv_dtype is unknown.
        """
        block_size = self.config.block_size
        if self.rotary is None and max_seq_len > block_size:
            raise UserError(f'max_seq_len={max_seq_len} is more than block_size={block_size}, for '
                            "which pos_embedding='learned' has positions")
        return cache_class(self.plan, batch_size, max_seq_len, device=self.device,
                           kv_dtype=self.resolved_kv_dtype(kv_dtype), compute_dtype=self.dtype,
                           **kwargs)

    def resolved_kv_dtype(self, kv_dtype: str) -> str:
        """`kv_dtype`, with 'auto' resolved to the dtype of the parameters."""
        return str(self.dtype).removeprefix('torch.') if kv_dtype == 'auto' else kv_dtype

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """GPT-2's weights: 'gpt2', ... 'gpt2-xl' from the hub, or from a folder; override_args may
        contain 'dropout'. See `interop.huggingface`."""
        from interop.huggingface import from_pretrained
        return from_pretrained(model_type, override_args)

    def crop_block_size(self, block_size):
        """Shorten the context in place, as in nanoGPT: `training.checkpoint.adapt`."""
        from training.checkpoint.adapt import crop_block_size
        crop_block_size(self, block_size)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, *, stop_tokens=()):
        """idx (B, t) -> (B, t + max_new_tokens), sampled with the global RNG as in nanoGPT; shorter
        if all rows have ended on one of `stop_tokens`. See `generate.generate`; sample.py and the
        engine decode faster (`engine.steps.decode`)."""
        from generate import generate
        return generate(self, idx, max_new_tokens, temperature, top_k, stop_tokens)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW in nanoGPT's two groups (matrices decay, vectors do not): `training.step.optim`."""
        from training.step.optim import configure_optimizers
        return configure_optimizers(self, weight_decay, learning_rate, betas, device_type)

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        """nanoGPT's model FLOPs utilization, of an A100's 312 TFLOPS: `training.step.flops`."""
        from training.step.flops import estimate_mfu
        return estimate_mfu(self, fwdbwd_per_iter, dt)
