"""The tensors of an exported model, without vLLM."""
from .config import NanoKVConfig


def shapes(config: NanoKVConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors, by their names in the folder. ValueError: if vLLM cannot
    run the model."""
    if config.field('key_offset'):
        raise ValueError("config.json: nanokv.key_offset=True: vLLM's caches have no place for "
                         'the half of a key that the next token needs')
    C, D, M = config.hidden_size, config.head_dim, config.intermediate_size
    n_head, n_kv_head = config.num_attention_heads, config.num_key_value_heads
    found = {'transformer.wte.weight': (config.vocab_size, C)}
    if config.field('pos_embedding') == 'learned':
        found['transformer.wpe.weight'] = config.max_position_embeddings, C

    def add(name, *shape, bias=config.field('bias')):
        found[f'{name}.weight'] = shape
        if bias:
            found[f'{name}.bias'] = shape[:1]
    add('transformer.ln_f', C)
    for layer, owner in enumerate(config.kv_owners):
        prefix, owns = f'transformer.h.{layer}', owner == layer
        add(f'{prefix}.ln_1', C)
        add(f'{prefix}.ln_2', C)
        latent = config.latent(layer)
        own = (latent or n_kv_head * D) * (1 if config.tied(layer) else 2) if owns else 0
        add(f'{prefix}.attn.c_attn', n_head * D + own, C)
        add(f'{prefix}.attn.c_proj', C, n_head * D)
        if config.field('attn_gate'):
            add(f'{prefix}.attn.gate', n_head, C, bias=True)
        add(f'{prefix}.mlp.c_fc', M, C)
        add(f'{prefix}.mlp.c_proj', C, M)
        if config.field('attn_sink'):
            found[f'{prefix}.attn.sink'] = n_head,
        if latent:
            found |= {f'{prefix}.attn.{x}_up': (n_head * D, latent) for x in 'kv'}
        if config.field('qk_norm'):
            found[f'{prefix}.attn.q_norm.weight'] = D,
            if owns:
                found[f'{prefix}.attn.k_norm.weight'] = latent or D,
    return found
