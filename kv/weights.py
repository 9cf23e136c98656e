"""Names and shapes of a model's weights, which are nanoGPT's, by its plan. No torch here."""
import re

from common.gpt_config import GPTConfig
from kv.plan import KVPlan, Layer

EMBEDDING, HEAD = 'transformer.wte.weight', 'lm_head.weight'  # one matrix
POSITIONS = 'transformer.wpe.weight'  # missing with RoPE
# in files of GPT-2 by OpenAI and Hugging Face, these have input rows first (Conv1D)
TRANSPOSED = ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')
# causal masks, which nanoGPT without flash attention and old versions of transformers also save
MASKS = re.compile(r'(transformer\.)?h\.\d+\.attn\.(masked_)?bias')

Shapes = dict[str, tuple[int, ...]]


def c_attn_rows(plan: KVPlan, layer: Layer) -> list[int]:
    """The numbers of rows of a layer's c_attn: [q, k, v] of an owner, [q, k] where K is V or both
    are of a latent, [q] of a layer that reads."""
    slot = plan.slots[layer.slot]
    stored = [slot.n_kv_head * slot.head_dim] * (1 if slot.tied else 2)
    return [plan.n_head * plan.head_dim, *(stored if layer.owns else [])]


def shapes(config: GPTConfig, plan: KVPlan) -> Shapes:
    """{name: shape} of all weights. They include HEAD, which is EMBEDDING."""
    found = {EMBEDDING: (config.vocab_size, config.n_embd)}
    if config.pos_embedding == 'learned':
        found[POSITIONS] = config.block_size, config.n_embd
    for layer in plan.layers:
        own = layer_shapes(config, plan, layer)
        found |= {f'transformer.h.{layer.index}.{name}': shape for name, shape in own.items()}
    found |= _with_bias('transformer.ln_f', (config.n_embd,), config.bias)
    return found | {HEAD: found[EMBEDDING]}


def layer_shapes(config: GPTConfig, plan: KVPlan, layer: Layer) -> Shapes:
    """{name in the layer: shape}; c_attn is the first matrix."""
    C, hidden, slot = config.n_embd, config.resolved_mlp_hidden, plan.slots[layer.slot]
    read = plan.n_head * plan.head_dim
    modules = {'ln_1': (C,), 'attn.c_attn': (sum(c_attn_rows(plan, layer)), C),
               'attn.c_proj': (C, read), 'ln_2': (C,), 'mlp.c_fc': (hidden, C),
               'mlp.c_proj': (C, hidden)}
    found = {}
    for module, shape in modules.items():
        found |= _with_bias(module, shape, config.bias)
    if config.attn_gate:
        found |= _with_bias('attn.gate', (plan.n_head, C), True)
    if config.qk_norm:
        found['attn.q_norm.weight'] = plan.head_dim,
    if config.qk_norm and layer.owns:
        found['attn.k_norm.weight'] = slot.head_dim,
    if config.attn_sink:
        found['attn.sink'] = plan.n_head,
    if slot.latent:
        found |= dict.fromkeys(('attn.k_up', 'attn.v_up'), (read, slot.head_dim))
    return found


def _with_bias(module: str, shape: tuple[int, ...], bias: bool) -> Shapes:
    own = {f'{module}.weight': shape}
    return own | {f'{module}.bias': shape[:1]} if bias else own
