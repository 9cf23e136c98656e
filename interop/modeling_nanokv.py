"""nanoKV's GPT for Hugging Face transformers. `python -m interop.export` copies this file next
to the weights, so that they can be used with trust_remote_code=True, without nanoKV.

Keys and values are kept in transformers' own caches: by `layer_types`, local layers keep a window;
by `kv_sharing_modes`, layers that read another layer's K and V keep nothing.

Copyright (c) 2026 the nanoKV authors, MIT License.
"""
import math

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

# The fields of nanoKV's GPTConfig. The first seven are nanoGPT's and are always saved.
NANOGPT = {'block_size': 1024, 'vocab_size': 50304, 'n_layer': 12, 'n_head': 12, 'n_embd': 768,
           'dropout': 0.0, 'bias': True}
DEFAULTS = NANOGPT | {
    'n_kv_head': 0, 'head_dim': 0, 'layer_pattern': 'G', 'window_size': 0, 'kv_share': '',
    'share_global_kv': False, 'pos_embedding': 'learned', 'rope_theta': 10000.0,
    'rope_theta_global': 0.0, 'qk_norm': False, 'mlp_hidden': 0, 'gelu': 'exact',
    'kv_quant_train': ''}
CHOICES = {'pos_embedding': ('learned', 'rope'), 'gelu': ('exact', 'tanh'),
           'kv_quant_train': ('', 'int8')}
LAYER_TYPES = {'G': 'full_attention', 'L': 'sliding_attention'}
MASKS = {'full_attention': create_causal_mask,
         'sliding_attention': create_sliding_window_causal_mask}


class NanoKVConfig(PretrainedConfig):
    """`nanokv` contains the GPTConfig; all other keys about the model are derived from it for other
    programs. ValueError: if a field is unknown or out of range, or a derived key contradicts it.
    """
    model_type = 'nanokv'
    keys_to_ignore_at_inference = ['past_key_values']

    def __init__(self, nanokv: dict | None = None, use_cache: bool = True, **kwargs):
        fields = check_fields(nanokv or {})
        self.nanokv = {name: value for name, value in fields.items()
                       if name in NANOGPT or value != DEFAULTS[name]}
        self.use_cache = use_cache
        for name, value in derived_keys(fields).items():
            given = kwargs.pop(name, value)
            if given != value:
                raise ValueError(f'config.json: {name}={given!r}, but by nanokv it is {value!r}')
            setattr(self, name, value)
        ids = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
        super().__init__(**(ids | kwargs))

    def field(self, name: str):
        return self.nanokv.get(name, DEFAULTS[name])


def check_fields(nanokv: dict) -> dict:
    """All fields of the GPTConfig, defaults included."""
    if not isinstance(nanokv, dict):
        raise ValueError(f'config.json: nanokv={nanokv!r} is not an object')
    for name, value in nanokv.items():
        if name not in DEFAULTS:
            raise ValueError(f'config.json: nanokv.{name} is unknown to this version')
        expected = type(DEFAULTS[name])
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise ValueError(f'config.json: nanokv.{name}={value!r} is not {expected.__name__}')
    fields = DEFAULTS | nanokv
    n_head, n_kv_head = fields['n_head'], fields['n_kv_head']
    pattern, share = fields['layer_pattern'], fields['kv_share']
    rules = [(name, fields[name] in choices, f'allowed are {choices}')
             for name, choices in CHOICES.items()]
    rules += [(name, fields[name] >= 1, 'must be at least 1')
              for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd')]
    rules += [
        ('n_kv_head', n_kv_head == 0 or n_kv_head > 0 and n_head % n_kv_head == 0,
         f'must divide n_head={n_head}'),
        ('layer_pattern', pattern and not pattern.strip('GL'), 'allowed are G and L'),
        ('kv_share', len(share) in (0, len(pattern)), f'not as long as layer_pattern={pattern!r}'),
        ('window_size', 'L' not in pattern or fields['window_size'] >= 1,
         'must be at least 1 with local layers')]
    for name, is_valid, rule in rules:
        if not is_valid:
            raise ValueError(f'config.json: nanokv.{name}={fields[name]!r}: {rule}')
    return fields


def derived_keys(fields: dict) -> dict:
    """The fields under transformers' names. `kv_owners`: the layer whose K and V a layer reads."""
    pattern, share, n_layer = fields['layer_pattern'], fields['kv_share'], fields['n_layer']
    layer_types, kv_owners, owner_of = [], [], {}
    for layer in range(n_layer):
        period, place = divmod(layer, len(pattern))
        group = (period, share[place]) if share else layer
        if pattern[place] == 'G' and fields['share_global_kv']:
            group = 'global'
        layer_types.append(LAYER_TYPES[pattern[place]])
        kv_owners.append(owner_of.setdefault(group, layer))
    return {
        'vocab_size': fields['vocab_size'], 'hidden_size': fields['n_embd'],
        'num_hidden_layers': n_layer, 'num_attention_heads': fields['n_head'],
        'num_key_value_heads': fields['n_kv_head'] or fields['n_head'],
        'head_dim': fields['head_dim'] or fields['n_embd'] // fields['n_head'],
        'intermediate_size': fields['mlp_hidden'] or 4 * fields['n_embd'],
        'max_position_embeddings': fields['block_size'],
        'layer_types': layer_types,
        'sliding_window': fields['window_size'] if 'sliding_attention' in layer_types else None,
        'kv_sharing_modes': ['store' if owner == layer else 'reuse'
                             for layer, owner in enumerate(kv_owners)],
        'kv_owners': kv_owners, 'tie_word_embeddings': True}


class RotaryTable:
    """cos and sin of position * theta**(-2d/D): computed in float64 on the CPU, kept in float32
    (float64 in a float64 model). Not a module, so that no cast of the model rounds them."""

    def __init__(self, head_dim: int, theta: float):
        self.head_dim, self.theta = head_dim, theta
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
                cos, sin = angles.cos(), angles.sin()  # signs for rotate():
                tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
                self.tables[key] = [table.to(*key) for table in tables]
        return [table[position_ids][:, None] for table in self.tables[key]]


def rotate(x, cos, sin):
    """Rotate the pairs (d, d + D/2) of x (B, h, t, D), in the dtype of the tables."""
    wide = x.to(cos.dtype)
    return (wide * cos + wide.roll(x.size(-1) // 2, -1) * sin).to(x.dtype)


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
        n_head, n_kv_head = config.num_attention_heads, config.num_key_value_heads
        self.owns = config.kv_owners[layer] == layer
        self.head_dim, self.dropout = config.head_dim, config.field('dropout')
        self.quantize = config.field('kv_quant_train') == 'int8'
        local = config.layer_types[layer] == 'sliding_attention'
        self.window = config.sliding_window if local else None
        # read by transformers' attention functions
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_key_value_groups = n_head // n_kv_head
        self.head_counts = [n_head, n_kv_head, n_kv_head] if self.owns else [n_head]
        width, bias = config.hidden_size, config.field('bias')
        self.c_attn = nn.Linear(width, sum(self.head_counts) * self.head_dim, bias=bias)
        self.c_proj = nn.Linear(n_head * self.head_dim, width, bias=bias)
        self.resid_dropout = nn.Dropout(self.dropout)
        qk_norm = config.field('qk_norm')
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if qk_norm and self.owns else None

    def forward(self, x, kv=None, rope=None, past_key_values=None, mask=None, **kwargs):
        """x (B, t, C) -> (B, t, C), the K and V (B, Hkv, S, D) that this layer's readers use, and
        the attention weights, if the attention function returns them."""
        heads = self.c_attn(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, *own = heads.split(self.head_counts, dim=1)
        q = self.norm_and_rotate(q, self.q_norm, rope)
        if self.owns:
            k, v = self.norm_and_rotate(own[0], self.k_norm, rope), own[1]
            if self.quantize:
                k, v = fake_quantize_int8(k), fake_quantize_int8(v)
            kv = k, v
            if past_key_values is not None:
                kv = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention)
        dropout = self.dropout if self.training else 0.0
        y, weights = attend(self, q, *kv, mask, dropout=dropout, scaling=self.head_dim ** -0.5,
                            sliding_window=self.window, **kwargs)
        return self.resid_dropout(self.c_proj(y.flatten(2))), kv, weights

    @staticmethod
    def norm_and_rotate(x, norm, rope):
        if norm is not None:
            x = norm(x.to(norm.weight.dtype)).to(x.dtype)  # weights stay float32 under autocast
        return x if rope is None else rotate(x, *rope)


def eager_attention(attn, q, k, v, mask, dropout=0.0, scaling=1.0, **kwargs):
    """q (B, H, t, D), k, v (B, Hkv, S, D), additive mask (B, 1, t, S) or None
    -> (B, t, H, D), weights (B, H, t, S)."""
    k, v = (x.repeat_interleave(attn.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, dropout, attn.training)
    return (weights @ v).transpose(1, 2), weights


class NanoKVMLP(nn.Module):
    def __init__(self, config: NanoKVConfig):
        super().__init__()
        width, hidden, bias = config.hidden_size, config.intermediate_size, config.field('bias')
        self.c_fc = nn.Linear(width, hidden, bias=bias)
        self.gelu = nn.GELU(approximate='tanh' if config.field('gelu') == 'tanh' else 'none')
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

    def forward(self, x, kv, **kwargs):
        y, kv, weights = self.attn(self.ln_1(x), kv, **kwargs)
        x = x + y
        return x + self.mlp(self.ln_2(x)), kv, weights


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
        self.rotary = None
        if rope:
            theta = config.field('rope_theta')
            theta_global = config.field('rope_theta_global') or theta
            self.rotary = {'full_attention': RotaryTable(config.head_dim, theta_global),
                           'sliding_attention': RotaryTable(config.head_dim, theta)}
        self.post_init()

    def _init_weights(self, module):
        """nanoGPT's initialization, also for tensors missing from a folder."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if getattr(module, 'is_residual', False):  # scaled down, per the GPT-2 paper
                std /= math.sqrt(2 * self.config.num_hidden_layers)
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
        if getattr(module, 'bias', None) is not None:
            nn.init.zeros_(module.bias)

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
        ValueError: if a sequence exceeds the learned positions."""
        x = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        end, position_ids_given = past + x.size(1), position_ids is not None
        if not position_ids_given:
            position_ids = torch.arange(past, end, device=x.device)
        position_ids = position_ids.view(-1, x.size(1))
        masks = self._masks(x, attention_mask, position_ids, past_key_values)
        longest, ropes = self.config.max_position_embeddings, {}
        if self.rotary is not None:
            ropes = {kind: table(position_ids, max(end, longest), self.lm_head.weight.dtype)
                     for kind, table in self.rotary.items()}
        else:
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
            x, kvs[owner], weights = block(
                x, kvs.get(owner), rope=ropes.get(kind), mask=masks[kind],
                past_key_values=past_key_values, position_ids=position_ids, **kwargs)
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

    def _masks(self, x, attention_mask, position_ids, past_key_values) -> dict:
        """Layer type -> mask. With a static cache, `generate` passes this dict itself."""
        if isinstance(attention_mask, dict):
            return attention_mask
        return {kind: MASKS[kind](config=self.config, inputs_embeds=x,
                                  attention_mask=attention_mask, past_key_values=past_key_values,
                                  position_ids=position_ids)
                for kind in set(self.config.layer_types)}
