"""Bytes read by a decoding step, and the number of sequences that fit into a KV budget.

A step of B sequences must read the K/V of min(n, window) tokens in every layer (shared slots once
for each of their layers) and every parameter, except that embeddings that are not also the output
layer only read the rows looked up. Activations and rotary tables are small and not counted.
"""
from config.errors import UserError
from engine.weights.quantize import stored_tensors
from kv.capacity import read_nbytes
from kv.parts import tensor_nbytes
from kv.plan import KVPlan
from lab.benchmarks import setting


def kv_read_per_step(plan: KVPlan, kv_dtype: str, batch: int, held: int, steps: int) -> float:
    """Mean bytes of K/V read by `steps` steps that start with `held` cached tokens."""
    lengths = range(held + 1, held + 1 + steps)
    return sum(read_nbytes(plan, batch, n, kv_dtype) for n in lengths) / steps


def weight_read_bytes(model, batch: int) -> int:
    """Bytes of weights read by one step. All rows have equal lengths and read one row of `wpe`."""
    total = sum(map(tensor_nbytes, stored_tensors(model)))
    for name, rows in (('wte', batch), ('wpe', 1)):
        module = model.transformer[name] if name in model.transformer else None
        x = getattr(module, 'weight', None)
        if x is not None and all(x is not p for p in model.lm_head.parameters()):
            nbytes = tensor_nbytes(x)
            total -= nbytes - nbytes * min(rows, x.size(0)) // x.size(0)
    return total


def most_sequences(model, budget: int, max_seq_len: int, kv_dtype: str, text: str) -> dict:
    """Find the largest batch whose allocated cache for `max_seq_len` tokens takes at most `budget`
    bytes; the plan's arithmetic only gives the starting point.

    text: the budget as the user wrote it.
    Raises:
        UserError: if not even one sequence fits.
    """
    def allocated(batch: int) -> int:
        return setting.make_cache(model, batch, max_seq_len, kv_dtype).nbytes

    planned = model.plan.nbytes(1, max_seq_len, model.resolved_kv_dtype(kv_dtype))
    batch = max(budget // planned, 1)
    while batch > 1 and allocated(batch) > budget:
        batch -= 1
    while allocated(batch + 1) <= budget:
        batch += 1
    nbytes = allocated(batch)
    if nbytes > budget:
        raise UserError(f'budget={text!r}: one sequence of {max_seq_len} tokens takes {nbytes:,} '
                        'bytes of KV; give at least that, or smaller contexts')
    return {'sequences': batch, 'kv_bytes': nbytes, 'kv_bytes_of_one_more': allocated(batch + 1)}
