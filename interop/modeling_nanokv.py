"""nanoKV's GPT for Hugging Face transformers. `python -m interop.export` copies this file and
nanokv_vllm/config.py, as configuration_nanokv.py, next to the weights, so that they can be used
with trust_remote_code=True, without nanoKV.

Keys and values are kept in transformers' own caches: by `layer_types`, local layers keep a window;
by `kv_sharing_modes`, layers that read another layer's K and V keep nothing. Where one tensor is
both (K = V, or a latent), it is the cache's K, and the cache's V has width 0.

Copyright (c) 2026 the nanoKV authors, MIT License.
"""
import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ReLUSquaredActivation
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from .configuration_nanokv import NanoKVConfig


class RotaryTable:
    """cos and sin of position * theta**(-2d/D): computed in float64 on the CPU, kept in float32
    (float64 in a float64 model). Not a module, so that no cast of the model rounds them. The pairs
    d beyond `fraction` of them are not rotated."""

    def __init__(self, head_dim: int, theta: float, fraction: float = 1.0):
        self.head_dim, self.theta, self.n_rotated = head_dim, theta, round(fraction * head_dim / 2)
        self.tables = {}

    def __call__(self, position_ids, end: int, dtype):
        """cos and sin, each (B, 1, t, D), for position_ids (B, t), all below `end`."""
        dtype = torch.promote_types(dtype, torch.float32)
        key = position_ids.device, dtype
        if key not in self.tables or self.tables[key][0].size(0) < end:
            n = max(256, 1 << (end - 1).bit_length())  # grows by doubling
            with torch.inference_mode(False):  # the tables may be used in training later
                d = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device='cpu')
                positions = torch.arange(n, dtype=torch.float64, device='cpu')
                angles = positions[:, None] * self.theta ** (-d / self.head_dim)
                angles[:, self.n_rotated:] = 0
                cos, sin = angles.cos(), angles.sin()  # signs for rotate():
                tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
                self.tables[key] = [table.to(*key) for table in tables]
        return [table[position_ids][:, None] for table in self.tables[key]]


def rotate(x, cos, sin):
    """Rotate the pairs (d, d + D/2) of x (B, h, t, D), in the dtype of the tables."""
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


def norm_and_rotate(x, norm, rope):
    if norm is not None:
        x = norm(x.to(norm.weight.dtype)).to(x.dtype)  # weights stay float32 under autocast
    return x if rope is None else rotate(x, *rope)


def offset_keys(k):
    """Keys (B, Hkv, S, D) whose slower rotated half is that of the token before, 0 at the first."""
    fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)               # (B, Hkv, S, 2, D/4)
    return torch.stack([fast, nn.functional.pad(slow, (0, 0, 0, 0, 1, -1))], -2).flatten(-3)


def without_slow_half(k, kept):
    """Keys (B, Hkv, t, D) with the half that goes to the next token only where `kept` (B, t)."""
    fast, slow = k.unflatten(-1, (2, 2, -1)).unbind(-2)
    return torch.stack([fast, slow * kept[:, None, :, None, None]], -2).flatten(-3)


def fake_quantize_int8(x):
    """Round x like nanoKV's int8 cache; gradients pass straight through."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp(2 ** -24, 65504).half()
    rounded = (wide / scale).round().clamp(-127, 127) * scale
    return rounded.to(x.dtype) + (x - x.detach())


class NanoKVAttention(nn.Module):
    """An owner computes K and V; a layer that reads another's has only the query rows of c_attn."""

    def __init__(self, config: NanoKVConfig, layer: int):
        super().__init__()
        n_head, head_dim = config.num_attention_heads, config.head_dim
        self.owns = config.kv_owners[layer] == layer
        self.head_dim, self.dropout = head_dim, config.field('dropout')
        self.quantize = config.field('kv_quant_train') == 'int8'
        local = config.is_local(layer)
        self.window = config.sliding_window if local else None
        self.latent, self.tied = config.latent(layer), config.tied(layer)
        self.offset = config.field('key_offset') and not local
        # read by transformers' attention functions
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_key_value_groups = n_head // (1 if self.latent else config.num_key_value_heads)
        n_own = self.latent // head_dim or config.num_key_value_heads
        own = [n_own] if self.tied else [n_own, n_own]
        self.head_counts = [n_head, *own] if self.owns else [n_head]
        width, bias = config.hidden_size, config.field('bias')
        self.c_attn = nn.Linear(width, sum(self.head_counts) * head_dim, bias=bias)
        self.c_proj = nn.Linear(n_head * head_dim, width, bias=bias)
        self.gate = nn.Linear(width, n_head) if config.field('attn_gate') else None
        self.resid_dropout = nn.Dropout(self.dropout)
        qk_norm = config.field('qk_norm')
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6) if qk_norm else None
        width_of_k = self.latent or head_dim
        self.k_norm = nn.RMSNorm(width_of_k, eps=1e-6) if qk_norm and self.owns else None
        self.sink = nn.Parameter(torch.zeros(n_head)) if config.field('attn_sink') else None
        if self.latent:
            self.k_up = nn.Parameter(torch.empty(n_head * head_dim, self.latent))
            self.v_up = nn.Parameter(torch.empty(n_head * head_dim, self.latent))

    def forward(self, x, kv=None, rope=None, past_key_values=None, mask=None, kept=None, **kwargs):
        """x (B, t, C) -> (B, t, C), the K and V (B, Hkv, S, D) that this layer's readers use, and
        the attention weights, if the attention function returns them."""
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim))
        q, *own = heads.transpose(1, 2).split(self.head_counts, dim=1)
        q = norm_and_rotate(q, self.q_norm, rope)
        if self.owns:
            kv = self.keys_and_values(own, rope, past_key_values, kept)
        if self.latent:  # (q k_up) c = q (k_up c): multi-query attention to the latents
            q = q @ self.k_up.unflatten(0, (-1, self.head_dim))
        attend = eager_attention  # the only one here that has sinks
        if self.sink is None:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention)
        dropout = self.dropout if self.training else 0.0
        y, weights = attend(self, q, *kv, mask, dropout=dropout, scaling=self.head_dim ** -0.5,
                            sliding_window=self.window, **kwargs)
        y = y.transpose(1, 2)                                         # (B, H, t, D)
        if self.latent:
            y = y @ self.v_up.unflatten(0, (-1, self.head_dim)).transpose(1, 2)
        if self.tied and rope is not None:  # V is rotated: rotate back
            y = rotate(y, rope[0], -rope[1])
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        y = y.transpose(1, 2).flatten(2)
        return self.resid_dropout(self.c_proj(y)), kv, weights

    def keys_and_values(self, own, rope, cache, kept):
        """Append an owner's K and V to the cache, and return those of all S positions."""
        k = own[0].transpose(1, 2).flatten(2)[:, None] if self.latent else own[0]
        k = norm_and_rotate(k, self.k_norm, rope)
        v = k[..., :0] if self.tied else own[1]
        if self.quantize and not self.offset:
            k = fake_quantize_int8(k)
        if self.quantize and not self.tied:
            v = fake_quantize_int8(v)
        if self.offset and kept is not None:
            k = without_slow_half(k, kept)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if self.offset:  # of all S: a cache has no place for the last token's other half
            k = offset_keys(k)
            k = fake_quantize_int8(k) if self.quantize else k
        return k, k if self.tied else v


def eager_attention(attn, q, k, v, mask, dropout=0.0, scaling=1.0, **kwargs):
    """q (B, H, t, D), k, v (B, Hkv, S, D), mask (B, 1, t, S), additive or bool, or None = causal
    -> (B, t, H, D), weights (B, H, t, S)."""
    k, v = (x.repeat_interleave(attn.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scaling
    if mask is None and q.size(2) > 1:  # of sdpa, which starts at the first key
        mask = scores.new_ones(scores.shape[2:], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if attn.sink is not None:  # a logit in the denominator, for weight that goes to no key
        sink = attn.sink.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., :k.size(2)]
    weights = nn.functional.dropout(weights, dropout, attn.training)
    return (weights @ v).transpose(1, 2), weights


def read_by_next(mask, past: int, t: int):
    """Whether the token after each of t new ones attends to it, (B, t): not to padding or to
    another of the packed texts. None = always. The last one: whether it attends to itself.

    mask: (B, 1, t, S), additive or bool, or None = causal; the new tokens are at `past`."""
    if mask is None:
        return None
    own = mask[:, 0, :, past:past + t]
    seen = own if own.dtype == torch.bool else own == 0
    return torch.cat([seen.diagonal(-1, 1, 2), seen[:, -1:, -1]], dim=1)


class NanoKVMLP(nn.Module):
    def __init__(self, config: NanoKVConfig):
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.field('bias')
        self.c_fc = nn.Linear(width, hidden, bias=bias)
        self.gelu = {'exact': nn.GELU(), 'tanh': nn.GELU(approximate='tanh'),
                     'relu2': ReLUSquaredActivation()}[config.field('gelu')]
        self.c_proj = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(config.field('dropout'))

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoKVBlock(GradientCheckpointingLayer):
    def __init__(self, config: NanoKVConfig, layer: int):
        super().__init__()
        width, bias = config.hidden_size, config.field('bias')
        self.ln_1, self.attn = nn.LayerNorm(width, bias=bias), NanoKVAttention(config, layer)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=bias), NanoKVMLP(config)
        self.attn.c_proj.is_residual = self.mlp.c_proj.is_residual = True

    def forward(self, x, k=None, v=None, **kwargs):
        """K and V are positional and apart, because reentrant checkpointing has no gradients for
        tensors in tuples or keywords."""
        y, (k, v), weights = self.attn(self.ln_1(x), (k, v), **kwargs)
        x = x + y
        return x + self.mlp(self.ln_2(x)), k, v, weights


class NanoKVForCausalLM(PreTrainedModel, GenerationMixin):
    """The tensors have nanoGPT's names."""
    config_class = NanoKVConfig
    base_model_prefix = ''
    _no_split_modules = ['NanoKVBlock']
    _tied_weights_keys = {'lm_head.weight': 'transformer.wte.weight'}
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: NanoKVConfig):
        super().__init__(config)
        width, dropout = config.hidden_size, config.field('dropout')
        blocks = [NanoKVBlock(config, layer) for layer in range(config.num_hidden_layers)]
        rope = config.field('pos_embedding') == 'rope'
        wpe = {} if rope else {'wpe': nn.Embedding(config.max_position_embeddings, width)}
        self.transformer = nn.ModuleDict({
            'wte': nn.Embedding(config.vocab_size, width), **wpe, 'drop': nn.Dropout(dropout),
            'h': nn.ModuleList(blocks),
            'ln_f': nn.LayerNorm(width, bias=config.field('bias'))})
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.rotary = {}
        if rope:
            theta, D = config.field('rope_theta'), config.head_dim
            self.rotary = {'sliding_attention': RotaryTable(D, theta)}
            if fraction := config.field('rope_fraction_global'):
                theta_global = config.field('rope_theta_global') or theta
                self.rotary['full_attention'] = RotaryTable(D, theta_global, fraction)
        self.post_init()

    def _init_weights(self, module):
        """nanoGPT's initialization, also for tensors missing from a folder."""
        super()._init_weights(module)
        if getattr(module, 'is_residual', False):  # scaled down, per the GPT-2 paper
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.num_hidden_layers))
        elif isinstance(module, NanoKVAttention):
            if module.sink is not None:
                nn.init.zeros_(module.sink)
            for up in (module.k_up, module.v_up) if module.latent else ():
                nn.init.normal_(up, std=0.02)

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, value):
        self.transformer.wte = value

    def resize_token_embeddings(self, *args, **kwargs):
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.nanokv['vocab_size'] = self.config.vocab_size
        return embeddings

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None,
                past_key_values=None, inputs_embeds=None, labels=None, use_cache=None,
                logits_to_keep=0, output_attentions=None, output_hidden_states=None, **kwargs):
        """input_ids (B, t), attention_mask (B, past + t); labels (B, t) are shifted here.
        ValueError: if a sequence exceeds the learned positions, the chosen attention implementation
        cannot run this model, or there is a cache in training with gradient checkpointing."""
        self._check(past_key_values)
        x = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        end, position_ids_given = past + x.size(1), position_ids is not None
        if not position_ids_given:
            position_ids = torch.arange(past, end, device=x.device)
        position_ids = position_ids.view(-1, x.size(1))
        masks = attention_mask  # by layer type: with a static cache, `generate` passes this dict
        if not isinstance(masks, dict):
            masks = create_masks_for_generate(
                config=self.config, inputs_embeds=x, attention_mask=masks,
                past_key_values=past_key_values, position_ids=position_ids)
        offset = self.config.field('key_offset')
        kept = read_by_next(masks['full_attention'], past, x.size(1)) if offset else None
        longest = self.config.max_position_embeddings
        ropes = {kind: table(position_ids, max(end, longest), self.lm_head.weight.dtype)
                 for kind, table in self.rotary.items()}
        if not ropes:
            if end > longest and position_ids_given:
                end = int(position_ids.max()) + 1  # padding tokens have no position
            if end > longest:
                raise ValueError(f'a sequence of {end} tokens is longer than the {longest} '
                                 'positions that the model has learned')
            x = x + self.transformer.wpe(position_ids)
        x = self.transformer.drop(x)
        kvs, hidden_states, attentions = {}, [], []
        for layer, block in enumerate(self.transformer.h):
            hidden_states.append(x)
            owner, kind = self.config.kv_owners[layer], self.config.layer_types[layer]
            x, k, v, weights = block(
                x, *kvs.get(owner, ()), rope=ropes.get(kind), mask=masks[kind], kept=kept,
                past_key_values=past_key_values, position_ids=position_ids, **kwargs)
            kvs.setdefault(owner, (k, v))
            attentions.append(weights)
        x = self.transformer.ln_f(x)
        hidden_states.append(x)
        keep = logits_to_keep
        logits = self.lm_head(x[:, slice(-keep, None) if isinstance(keep, int) else keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None)

    def _check(self, past_key_values):
        if past_key_values is not None and self.training and self.is_gradient_checkpointing:
            raise ValueError('past_key_values in training with gradient checkpointing, which '
                             'ignores caches: call model.eval(), or set use_cache=False')
        name = self.config._attn_implementation
        for field in ('attn_sink', 'key_offset'):
            if self.config.field(field) and name not in ('eager', 'sdpa'):
                raise ValueError(f'attn_implementation={name!r} does not have {field}=True: use '
                                 "'sdpa' or 'eager'")
