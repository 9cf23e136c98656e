"""config.json of an exported model."""
from transformers import PretrainedConfig

# the fields of nanoKV's GPTConfig and their defaults
DEFAULTS = {
    'block_size': 1024, 'vocab_size': 50304, 'n_layer': 12, 'n_head': 12, 'n_embd': 768,
    'dropout': 0.0, 'bias': True, 'n_kv_head': 0, 'head_dim': 0, 'layer_pattern': 'G',
    'window_size': 0, 'kv_share': '', 'share_global_kv': False, 'pos_embedding': 'learned',
    'rope_theta': 10000.0, 'rope_theta_global': 0.0, 'qk_norm': False, 'mlp_hidden': 0,
    'gelu': 'exact', 'kv_quant_train': '', 'attn_sink': False, 'rope_fraction_global': 1.0,
    'key_offset': False, 'kv_tied': '', 'kv_latent': 0, 'act_clamp': 0.0}


class NanoKVConfig(PretrainedConfig):
    """The keys of config.json as attributes; `nanokv` contains the fields of the GPTConfig."""
    model_type = 'nanokv'

    def __init__(self, nanokv=None, **kwargs):
        self.nanokv = nanokv or {}
        for name, value in self.nanokv.items():
            if name not in DEFAULTS:
                raise ValueError(f'config.json: {name}={value!r} is not supported by this version '
                                 'of the plugin for vLLM')
        if self.field('key_offset'):
            raise ValueError("config.json: nanokv.key_offset=True: vLLM's caches have no place for "
                             'the half of a key that the next token needs')
        super().__init__(**kwargs)

    def field(self, name: str):
        return self.nanokv.get(name, DEFAULTS[name])

    def tied(self, layer: int) -> bool:
        """Whether the layer's K is its V."""
        local = self.layer_types[layer] == 'sliding_attention'
        tied = self.field('kv_tied')
        return self.latent(layer) > 0 or tied == 'all' or tied == 'global' and not local

    def latent(self, layer: int) -> int:
        """The width of the latent from which the layer makes K and V, 0 without one."""
        return 0 if self.layer_types[layer] == 'sliding_attention' else self.field('kv_latent')

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors, by their names in the folder."""
        C, D, M = self.hidden_size, self.head_dim, self.intermediate_size
        n_head, n_kv_head = self.num_attention_heads, self.num_key_value_heads
        shapes = {'transformer.wte.weight': (self.vocab_size, C)}
        if self.field('pos_embedding') == 'learned':
            shapes['transformer.wpe.weight'] = self.max_position_embeddings, C

        def add(name, *shape):
            shapes[f'{name}.weight'] = shape
            if self.field('bias'):
                shapes[f'{name}.bias'] = shape[:1]
        add('transformer.ln_f', C)
        for layer, owner in enumerate(self.kv_owners):
            prefix, owns = f'transformer.h.{layer}', owner == layer
            add(f'{prefix}.ln_1', C)
            add(f'{prefix}.ln_2', C)
            latent = self.latent(layer)
            own = owns * (2 - self.tied(layer)) * (latent or n_kv_head * D)
            add(f'{prefix}.attn.c_attn', n_head * D + own, C)
            add(f'{prefix}.attn.c_proj', C, n_head * D)
            add(f'{prefix}.mlp.c_fc', M, C)
            add(f'{prefix}.mlp.c_proj', C, M)
            if self.field('attn_sink'):
                shapes[f'{prefix}.attn.sink'] = n_head,
            if latent:
                shapes |= {f'{prefix}.attn.{x}_up': (n_head * D, latent) for x in 'kv'}
            if self.field('qk_norm'):
                shapes[f'{prefix}.attn.q_norm.weight'] = D,
                if owns:
                    shapes[f'{prefix}.attn.k_norm.weight'] = latent or D,
        return shapes
