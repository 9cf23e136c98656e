"""Parameters of a model, and FLOPs of its prefill, counted from its plan. Torch is not needed."""
from common.gpt_config import GPTConfig, unknown_field
from kv.plan import KVPlan, Layer


def matrices(config: GPTConfig, plan: KVPlan, layer: Layer) -> list[tuple[int, int]]:
    """(inputs, outputs) of a layer's matrices: c_attn (queries, and what an owner stores), c_proj
    and the two of the MLP, which may have biases; with latents also k_up and v_up, without."""
    C, M, read = config.n_embd, config.resolved_mlp_hidden, plan.n_head * plan.head_dim
    slot = plan.slots[layer.slot]
    n_tensors = 1 if slot.tied else 2
    stored = n_tensors * slot.n_kv_head * slot.head_dim if layer.owns else 0
    ups = [(slot.head_dim, read)] * 2 if slot.latent else []
    return [(C, read + stored), (read, C), (C, M), (M, C), *ups]


def parameters(config: GPTConfig, plan: KVPlan) -> int:
    """Number of parameters, including position embeddings; the output matrix is tied."""
    C, bias = config.n_embd, int(config.bias)
    total = config.vocab_size * C + (1 + bias) * C
    if config.pos_embedding == 'learned':
        total += config.block_size * C
    for layer in plan.layers:
        shapes = matrices(config, plan, layer)
        total += sum(n * m for n, m in shapes) + bias * sum(m for _, m in shapes[:4])
        total += 2 * (1 + bias) * C + plan.n_head * config.attn_sink
        total += plan.n_head * (C + 1) * config.attn_gate
        slot = plan.slots[layer.slot]
        total += config.qk_norm * (plan.head_dim + slot.head_dim * layer.owns)
    return total


def note_uncounted(config: GPTConfig) -> None:
    """Print a note if `parameters` does not know a setting."""
    if unknown := unknown_field(config, 'count'):
        print(f'Note: parameters of {unknown} are not counted: kv.counts does not know them')


def attention_flops(plan: KVPlan, layer: Layer, tokens: int, before: int) -> int:
    """FLOPs of a layer's attention for `tokens` queries that follow `before` tokens: 4 * H * width
    per query and visible key. Queries are multiplied with latents directly."""
    n_keys = total_keys(layer, before + tokens) - total_keys(layer, before)
    return 4 * plan.n_head * plan.slots[layer.slot].head_dim * n_keys


def total_keys(layer: Layer, n: int) -> int:
    """Keys that n queries from the first on see: the i-th sees i keys, up to the window size."""
    growing = min(n, layer.window or n)
    return growing * (growing + 1) // 2 + (n - growing) * layer.window


def prefill_flops(config: GPTConfig, plan: KVPlan, tokens: int, before: int = 0,
                  trim: bool = True) -> int:
    """FLOPs of a prefill of `tokens` tokens after `before` cached ones, with the last logits. The
    last layer that stores K and V projects all tokens, and computes the rest only for the last one.
    trim=False: every token in every layer."""
    total = 2 * config.vocab_size * config.n_embd
    stop = plan.last_owner if trim else len(plan.layers)
    for layer in plan.layers:
        projected = tokens if layer.index <= stop else 1
        whole = tokens if layer.index < stop else 1
        first, *others = (n * m for n, m in matrices(config, plan, layer))
        total += 2 * (projected * first + whole * sum(others))
        total += attention_flops(plan, layer, whole, before + tokens - whole)
    return total
