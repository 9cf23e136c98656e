"""Parameters of a model, and FLOPs of its prefill, counted from its plan. Torch is not needed."""
import math

from common.gpt_config import GPTConfig
from kv.plan import KVPlan, Layer
from kv.weights import HEAD, layer_shapes, shapes


def parameters(config: GPTConfig, plan: KVPlan) -> int:
    """Number of parameters, including position embeddings; the output matrix is tied."""
    return sum(math.prod(shape) for name, shape in shapes(config, plan).items() if name != HEAD)


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
        first, *others = (math.prod(shape) for shape in layer_shapes(config, plan, layer).values()
                          if len(shape) == 2)
        total += 2 * (projected * first + whole * sum(others))
        total += attention_flops(plan, layer, whole, before + tokens - whole)
    return total
