"""Bytes read by a decoding step, and the number of sequences that fit into a KV budget.

A step of B sequences with n tokens each, the new one included, must read:
    K/V      sum over layers of min(n, window) (n in global layers) * bytes of a position * B;
             a shared slot is read by each of its layers
    weights  every parameter once, but only the looked-up rows of the embeddings; a matrix that is
             also the output layer (tied `wte`) is read in full

Activations and rotary tables are small beside these and not counted.
"""
from config.errors import UserError
from engine.weights import stored_tensors
from kv.parts import tensor_nbytes
from kv.plan import KVPlan
from lab.benchmarks.setting import make_cache


def kv_read_per_step(plan: KVPlan, kv_dtype: str, batch: int, held: int, steps: int) -> float:
    """Mean bytes of K/V read by `steps` steps, the first of which finds `held` tokens cached."""
    if steps < 1:
        raise UserError(f'steps={steps}: must be at least 1')
    lengths = range(held + 1, held + 1 + steps)
    return sum(plan.read_nbytes(batch, n, kv_dtype) for n in lengths) / steps


def weight_read_bytes(model, batch: int) -> int:
    """Bytes of weights read by one step. All rows are equally long: one row of `wpe` is read."""
    head = {id(p) for p in model.lm_head.parameters()}
    looked_up = {}  # id of an embedding -> rows read, at most
    for name, rows in (('wte', batch), ('wpe', 1)):
        module = model.transformer[name] if name in model.transformer else None
        weight = getattr(module, 'weight', None)
        if weight is not None and id(weight) not in head:
            looked_up[id(weight)] = min(rows, weight.size(0))
    total = 0
    for x in stored_tensors(model):
        nbytes = tensor_nbytes(x)
        if id(x) in looked_up:
            nbytes = nbytes * looked_up[id(x)] // x.size(0)
        total += nbytes
    return total


def most_sequences(model, budget: int, max_seq_len: int, kv_dtype: str, text: str) -> dict:
    """The largest batch whose allocated cache for `max_seq_len` tokens takes at most `budget`
    bytes; the plan's arithmetic only says where to begin.

    text: the budget as the user wrote it.
    Raises:
        UserError: not even one sequence fits.
    """
    def allocated(batch: int) -> int:
        return make_cache(model, batch, max_seq_len, kv_dtype).nbytes

    planned = model.plan.nbytes(1, max_seq_len, model.resolved_kv_dtype(kv_dtype))
    batch = max(budget // planned, 1)
    while batch > 1 and allocated(batch) > budget:
        batch -= 1
    nbytes = allocated(batch)
    if nbytes > budget:
        raise UserError(f'budget={text!r}: one sequence of {max_seq_len} tokens takes {nbytes:,} '
                        'bytes of KV; give at least that, or smaller contexts')
    one_more = allocated(batch + 1)
    while one_more <= budget:
        batch, nbytes = batch + 1, one_more
        one_more = allocated(batch + 1)
    return {'sequences': batch, 'kv_bytes': nbytes, 'kv_bytes_of_one_more': one_more}
