"""The model for Hugging Face transformers: its configuration, and its forward pass on their caches, masks, attention functions.

`interop.export` writes this file, and what it takes from the rest of the project, as one modeling_nanokv.py beside the weights
(`interop.bundle`), so that `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` needs nothing of ours.

Layers that read another layer's K and V hold none, and local layers hold a window: the cache is transformers' own, told so by
`layer_types` and `kv_sharing_modes` in config.json.
"""
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.configuration_utils import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.qk import norm_and_rotate
from config.gpt_config import GPTConfig, model_args
from interop.fields import LAYER_TYPE, checked, follows_from
from kv.plan import LOCAL
from kv.quant import fake_quantize_int8
from model import GPT


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
        super().__init__(**{name: value for name, value in kwargs.items() if name not in follows})

    def gpt_config(self) -> GPTConfig:
        """The model's own configuration."""
        return GPTConfig(**self.nanokv)


class NanoKVForCausalLM(PreTrainedModel, GenerationMixin):
    """`model.GPT`'s weights, under its names, on transformers' caches."""
    config_class = NanoKVConfig
    base_model_prefix = ''
    _no_split_modules = ['Block']
    _tied_weights_keys = {'lm_head.weight': 'transformer.wte.weight'}
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, config: NanoKVConfig):
        super().__init__(config)
        gpt = GPT(config.gpt_config())
        self.transformer, self.lm_head, self.plan, self.rotary = gpt.transformer, gpt.lm_head, gpt.plan, gpt.rotary
        for block, layer in zip(self.transformer.h, self.plan.layers):  # what attention functions ask of a module
            block.attn.config, block.attn.layer_idx, block.attn.is_causal = config, layer.index, True
            block.attn.num_key_value_groups = self.plan.n_head // self.plan.n_kv_head
        self.post_init()

    def _init_weights(self, module):
        GPT._init_weights(self, module)

    def get_input_embeddings(self):
        return self.transformer.wte

    def set_input_embeddings(self, value):
        self.transformer.wte = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, **kwargs):
        """As any causal language model of transformers: input_ids (B, t), attention_mask (B, past + t), labels shifted here.

        Raises:
            ValueError: a sequence longer than there are learned positions.
        """
        x = self.transformer.wte(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache(config=self.config)
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + x.size(1), device=x.device)[None]
        masked = dict(config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
                      position_ids=position_ids)
        make = {'full_attention': create_causal_mask, 'sliding_attention': create_sliding_window_causal_mask}
        masks = {kind: make[kind](**masked) for kind in set(self.config.layer_types)}
        x, ropes = self._with_positions(x, position_ids, past + x.size(1))
        kvs = {}
        for block, layer in zip(self.transformer.h, self.plan.layers):
            mask = masks[LAYER_TYPE[layer.kind == LOCAL]]
            y, kvs[layer.slot] = attend(block.attn, block.ln_1(x), ropes.get(layer.kind), kvs.get(layer.slot), past_key_values,
                                        mask, **kwargs)
            x = x + y
            x = x + block.mlp(block.ln_2(x))
        x = self.transformer.ln_f(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None)

    def _with_positions(self, x, position_ids, end: int):
        """x with its positions, where they are learned; else the rotary tables by kind of layer."""
        if self.rotary is not None:
            dtype = self.lm_head.weight.dtype
            made = {table: table.at(position_ids, end, dtype) for table in self.rotary.values()}
            return self.transformer.drop(x), {kind: made[table] for kind, table in self.rotary.items()}
        if end > self.config.max_position_embeddings:
            raise ValueError(f'a sequence of {end} tokens is longer than the {self.config.max_position_embeddings} positions '
                             'that the model has learned')
        return self.transformer.drop(x + self.transformer.wpe(position_ids)), {}


def attend(attn, x, rope, kv, cache, mask, **kwargs):
    """`model.CausalSelfAttention` on a cache of transformers. x (B, t, C) -> (B, t, C), and the K, V (B, Hkv, S, D) that the
    layers which read this one's see."""
    B, t, _ = x.shape
    q, *kv_rows = attn.c_attn(x).view(B, t, -1, attn.head_dim).transpose(1, 2).split(attn.rows, dim=1)
    q = norm_and_rotate(q, attn.q_norm, rope)
    if attn.layer.owns:
        k, v = norm_and_rotate(kv_rows[0], attn.k_norm, rope), kv_rows[1]
        if attn.kv_quant_train == 'int8':
            k, v = fake_quantize_int8(k), fake_quantize_int8(v)
        kv = (k, v) if cache is None else cache.update(k, v, attn.layer_idx)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attn.config._attn_implementation, sdpa_attention_forward)
    y, _ = function(attn, q, *kv, mask, dropout=attn.dropout if attn.training else 0.0, scaling=attn.head_dim ** -0.5,
                    sliding_window=attn.layer.window or None, **kwargs)
    return attn._projected(y.transpose(1, 2)), kv
