"""The model for Hugging Face transformers: its configuration, and its forward pass on their caches, masks, attention functions.

`interop.export` writes this file, and what it takes from the rest of the project, as one modeling_nanokv.py beside the weights
(`interop.bundle`), so that `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` needs nothing of ours.

Layers that read another layer's K and V hold none, and local layers hold a window: the cache is transformers' own, told so by
`layer_types` and `kv_sharing_modes` in config.json.
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

from attention.rope import norm_and_rotate
from config.gpt_config import model_args
from interop.fields import LAYER_TYPE, checked, follows_from
from kv.int8 import fake_quantize_int8
from kv.plan import LOCAL
from model import GPT, LayerNorm


class NanoKVConfig(PretrainedConfig):
    """`nanokv` has the fields of a GPTConfig that are not its defaults; all other keys about the model follow from them, and
    are there for other programs.

    Raises:
        ValueError: a field of `nanokv` that is unknown or out of its range, or another key that contradicts it.
    """
    model_type = 'nanokv'
    keys_to_ignore_at_inference = ['past_key_values']

    def __init__(self, nanokv: dict | None = None, use_cache: bool = True, **kwargs):
        config = checked(nanokv or {}, kwargs)
        self.nanokv, self.use_cache = model_args(config), use_cache
        follows = follows_from(config)
        for name, value in follows.items():
            setattr(self, name, value)
        tokens = {name: kwargs.pop(name, None) for name in ('bos_token_id', 'eos_token_id', 'pad_token_id')}
        super().__init__(**tokens, **{name: value for name, value in kwargs.items() if name not in follows})


class NanoKVBlock(GradientCheckpointingLayer):
    """`model.Block`, its parts taken over."""

    def __init__(self, block, config: NanoKVConfig, layer: int):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = block.ln_1, block.attn, block.ln_2, block.mlp
        self.attn.c_proj.is_residual = self.mlp.c_proj.is_residual = True
        # what attention functions ask of a module
        self.attn.config, self.attn.layer_idx, self.attn.is_causal = config, layer, True
        self.attn.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

    def forward(self, x, kv, rope=None, past_key_values=None, mask=None, **kwargs):
        """x (B, t, C), and K, V of the layer that this one reads, if it has been -> x, K and V (B, Hkv, S, D), weights."""
        y, kv, weights = attend(self.attn, self.ln_1(x), kv, rope, past_key_values, mask, **kwargs)
        x = x + y
        return x + self.mlp(self.ln_2(x)), kv, weights


class NanoKVForCausalLM(PreTrainedModel, GenerationMixin):
    """`model.GPT`'s weights, under its names, on transformers' caches."""
    config_class = NanoKVConfig
    base_model_prefix = ''
    _no_split_modules = ['NanoKVBlock']
    _tied_weights_keys = {'lm_head.weight': 'transformer.wte.weight'}
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: NanoKVConfig):
        super().__init__(config)
        gpt = GPT(checked(config.nanokv, {}))
        self.transformer, self.lm_head, self.plan, self.rotary = gpt.transformer, gpt.lm_head, gpt.plan, gpt.rotary
        self.transformer.h = nn.ModuleList(NanoKVBlock(block, config, i) for i, block in enumerate(gpt.transformer.h))
        self.post_init()

    def _init_weights(self, module):
        """Also of what a folder lacks."""
        GPT._init_weights(self, module)
        if isinstance(module, (LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)
        elif getattr(module, 'is_residual', False):  # scaled down, per the GPT-2 paper
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.num_hidden_layers))

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, value):
        self.transformer.wte = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def resize_token_embeddings(self, *args, **kwargs):
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.nanokv['vocab_size'] = self.config.vocab_size
        return embeddings

    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, output_attentions=None, output_hidden_states=None, **kwargs):
        """As any causal language model of transformers: input_ids (B, t), attention_mask (B, past + t), labels shifted here.

        Raises:
            ValueError: a sequence longer than there are learned positions.
        """
        x = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        told = position_ids is not None
        if not told:
            position_ids = torch.arange(past, past + x.size(1), device=x.device)
        position_ids = position_ids.view(-1, x.size(1))
        masks = self._masks(x, attention_mask, position_ids, past_key_values)
        x, ropes = self._with_positions(x, position_ids, past + x.size(1), told)
        kvs, states, weights = {}, [], []
        given = dict(kwargs, past_key_values=past_key_values, position_ids=position_ids)
        for block, layer in zip(self.transformer.h, self.plan.layers):
            states.append(x)
            x, kvs[layer.slot], seen = block(x, kvs.get(layer.slot), rope=ropes.get(layer.kind),
                                             mask=masks[LAYER_TYPE[layer.kind == LOCAL]], **given)
            weights.append(seen)
        x = self.transformer.ln_f(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        wanted = {name: getattr(self.config, name) if value is None else value for name, value in (
            ('output_attentions', output_attentions), ('output_hidden_states', output_hidden_states))}
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None,
                                      hidden_states=(*states, x) if wanted['output_hidden_states'] else None,
                                      attentions=tuple(weights) if wanted['output_attentions'] else None)

    def _masks(self, x, attention_mask, position_ids, past_key_values) -> dict:
        """By type of layer; `generate` makes them itself where a cache is static."""
        if isinstance(attention_mask, dict):
            return attention_mask
        masked = dict(config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
                      position_ids=position_ids)
        make = {'full_attention': create_causal_mask, 'sliding_attention': create_sliding_window_causal_mask}
        return {kind: make[kind](**masked) for kind in set(self.config.layer_types)}

    def _with_positions(self, x, position_ids, end: int, told: bool):
        """x with its positions, where they are learned; else the rotary tables by kind of layer."""
        longest = self.config.max_position_embeddings
        if self.rotary is not None:
            dtype = self.lm_head.weight.dtype
            made = {table: table.at(position_ids, max(end, longest), dtype) for table in self.rotary.values()}
            return self.transformer.drop(x), {kind: made[table] for kind, table in self.rotary.items()}
        if end > longest and told:  # some may be of padding
            end = int(position_ids.max()) + 1
        if end > longest:
            raise ValueError(f'a sequence of {end} tokens is longer than the {longest} positions that the model has learned')
        return self.transformer.drop(x + self.transformer.wpe(position_ids)), {}


def attend(attn, x, kv, rope, cache, mask, **kwargs):
    """`model.CausalSelfAttention` on a cache of transformers. x (B, t, C) -> (B, t, C), the K, V (B, Hkv, S, D) that the
    layers which read this one's see, and the attention's weights, if its function gives them."""
    B, t, _ = x.shape
    q, *kv_rows = attn.c_attn(x).view(B, t, -1, attn.head_dim).transpose(1, 2).split(attn.head_counts, dim=1)
    q = norm_and_rotate(q, attn.q_norm, rope)
    if attn.layer.owns:
        k, v = norm_and_rotate(kv_rows[0], attn.k_norm, rope), kv_rows[1]
        if attn.kv_quant_train == 'int8':
            k, v = fake_quantize_int8(k), fake_quantize_int8(v)
        kv = (k, v) if cache is None else cache.update(k, v, attn.layer_idx)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attn.config._attn_implementation, eager_attention)
    y, weights = function(attn, q, *kv, mask, dropout=attn.dropout if attn.training else 0.0, scaling=attn.head_dim ** -0.5,
                          sliding_window=attn.layer.window or None, **kwargs)
    return attn.project(y.transpose(1, 2)), kv, weights


def eager_attention(attn, q, k, v, mask, dropout=0.0, scaling=1.0, **kwargs):
    """Attention written out. q (B, H, t, D), k, v (B, Hkv, S, D), mask (B, 1, t, S) to be added -> (B, t, H, D), weights."""
    k, v = (x.repeat_interleave(attn.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, dropout, attn.training)
    return (weights @ v).transpose(1, 2), weights
