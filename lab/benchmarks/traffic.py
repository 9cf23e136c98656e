"""Bytes that one decoding step must read: weights and K/V. What is small beside them (activations, rotary tables) is left out.

B sequences that hold n tokens, the new one included:
    K/V      sum over layers of min(n, window) (n in global layers) * bytes of a position * B: a shared slot is read by
             each of its layers
    weights  every parameter once, but of the embeddings only the rows that are looked up; a matrix that is also the
             output layer (`wte`, tied) is read in full by that
"""
from config.errors import UserError
from engine.weights import stored_tensors
from kv.parts import tensor_nbytes
from kv.plan import KVPlan


def kv_read_bytes(plan: KVPlan, kv_dtype: str, batch: int, held: int) -> int:
    """Of one step, in which each row's new token is its `held`-th (it attends to itself too)."""
    return plan.read_nbytes(batch, held, kv_dtype)


def kv_read_per_step(plan: KVPlan, kv_dtype: str, batch: int, held: int, steps: int) -> float:
    """Mean over `steps` steps, the first of which finds `held` tokens in the cache."""
    if steps < 1:
        raise UserError(f'steps={steps}: must be at least 1')
    return sum(kv_read_bytes(plan, kv_dtype, batch, held + 1 + j) for j in range(steps)) / steps


def weight_read_bytes(model, batch: int) -> int:
    """Of one step. Rows are equally long here, so that one row of `wpe` is looked up."""
    looked_up = {'wte': batch, 'wpe': 1}  # rows; of wte at most, where tokens coincide
    head = {id(p) for p in model.lm_head.parameters()}
    total = 0
    embeddings = {}
    for name, rows in looked_up.items():
        weight = getattr(model.transformer[name], 'weight', None) if name in model.transformer else None
        if weight is not None and id(weight) not in head:
            embeddings[id(weight)] = min(rows, weight.size(0))
    for x in stored_tensors(model):
        total += tensor_nbytes(x) * embeddings[id(x)] // x.size(0) if id(x) in embeddings else tensor_nbytes(x)
    return total
