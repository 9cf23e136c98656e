"""What config.json says of a model."""
from transformers import PretrainedConfig

# the fields of nanoKV's GPTConfig; what a field means that is not here nobody can know
FIELDS = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'n_kv_head', 'head_dim',
          'layer_pattern', 'window_size', 'kv_share', 'share_global_kv', 'pos_embedding', 'rope_theta', 'rope_theta_global',
          'qk_norm', 'mlp_hidden', 'gelu', 'kv_quant_train'}


class NanoKVConfig(PretrainedConfig):
    """Keys of an exported config.json (`interop/fields.py` of nanoKV) as attributes; `nanokv` has the fields of a GPTConfig
    that are not its defaults.

    Raises:
        ValueError: one of these that is unknown.
    """
    model_type = 'nanokv'

    def __init__(self, nanokv=None, **kwargs):
        self.nanokv = nanokv or {}
        for name in self.nanokv:
            if name not in FIELDS:
                raise ValueError(f'config.json: nanokv has {name!r}, which this version of the plugin does not know')
        super().__init__(**kwargs)

    def field(self, name, default):
        """A field of the GPTConfig."""
        return self.nanokv.get(name, default)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's tensors, by their names in the folder."""
        C, D, M, bias = self.hidden_size, self.head_dim, self.intermediate_size, self.field('bias', True)
        found = {'transformer.wte.weight': (self.vocab_size, C)}
        if self.field('pos_embedding', 'learned') == 'learned':
            found['transformer.wpe.weight'] = self.max_position_embeddings, C

        def add(name, *shape):
            found[f'{name}.weight'] = shape
            if bias:
                found[f'{name}.bias'] = shape[:1]
        add('transformer.ln_f', C)
        for layer, owner in enumerate(self.kv_owners):
            at, owns = f'transformer.h.{layer}', owner == layer
            add(f'{at}.ln_1', C)
            add(f'{at}.ln_2', C)
            add(f'{at}.attn.c_attn', (self.num_attention_heads + 2 * self.num_key_value_heads * owns) * D, C)
            add(f'{at}.attn.c_proj', C, self.num_attention_heads * D)
            add(f'{at}.mlp.c_fc', M, C)
            add(f'{at}.mlp.c_proj', C, M)
            if self.field('qk_norm', False):
                found |= {f'{at}.attn.{x}_norm.weight': (D,) for x in ('q', 'k')[:1 + owns]}
        return found
