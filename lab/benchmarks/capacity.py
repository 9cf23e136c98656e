"""How many sequences a budget of KV memory holds: caches are allocated to find out, the plan's arithmetic only says where
to begin."""
from config.errors import UserError
from lab.benchmarks.setting import make_cache


def most_sequences(model, budget: int, max_seq_len: int, kv_dtype: str, text: str) -> dict:
    """The largest batch whose cache for `max_seq_len` tokens allocates at most `budget` bytes; one row more does not fit.

    text: the budget as the user wrote it.
    Raises:
        UserError: not even one sequence fits.
    """
    def allocated(batch: int) -> int:
        return make_cache(model, batch, max_seq_len, kv_dtype).nbytes  # and freed again

    batch = max(budget // model.plan.nbytes(1, max_seq_len, model.resolved_kv_dtype(kv_dtype)), 1)
    while batch > 1 and allocated(batch) > budget:
        batch -= 1
    held = allocated(batch)
    if held > budget:
        raise UserError(f'budget={text!r}: one sequence of {max_seq_len} tokens takes {held:,} bytes of KV, so give at least '
                        'that, or smaller contexts')
    one_more = allocated(batch + 1)
    while one_more <= budget:
        batch, held, one_more = batch + 1, one_more, allocated(batch + 2)
    return {'sequences': batch, 'kv_bytes': held, 'kv_bytes_of_one_more': one_more}
