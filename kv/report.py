"""The KV-cache report: bytes by slot, and the ratio to vanilla GPT-2 by factor. No torch here."""
from kv.plan import KVPlan

REPORTED_DTYPES = ('float32', 'bfloat16', 'float16', 'int8', 'int4')


def account(plan: KVPlan, batch: int, max_seq_len: int, kv_dtype: str,
            allocated: int | None = None) -> dict:
    """Metrics of a cache for `batch` sequences of `max_seq_len` tokens, ready for JSON.

    allocated: bytes of an allocated cache; None = the plan's.
    `kv_ratio` compares to vanilla GPT-2 of the same shape and dtype, `kv_ratio_bf16` to vanilla in
    bf16; heads * window * sharing is the first ratio, and times dtype the second.
    """
    vanilla = plan.vanilla()
    kv_bytes = plan.nbytes(batch, max_seq_len, kv_dtype) if allocated is None else allocated
    same = vanilla.nbytes(batch, max_seq_len, kv_dtype)
    bf16 = vanilla.nbytes(batch, max_seq_len, 'bfloat16')
    further = plan.nbytes(1, max_seq_len + 1, kv_dtype) - plan.nbytes(1, max_seq_len, kv_dtype)
    return {
        'batch': batch, 'max_seq_len': max_seq_len, 'kv_dtype': kv_dtype,
        'kv_bytes': kv_bytes, 'kv_bytes_counted': 'planned' if allocated is None else 'allocated',
        'kv_bytes_vanilla': same, 'kv_bytes_vanilla_bf16': bf16,
        'kv_ratio': same / kv_bytes, 'kv_ratio_bf16': bf16 / kv_bytes,
        'factors': plan.factors(max_seq_len, kv_dtype),
        'n_head': plan.n_head, 'n_kv_head': plan.n_kv_head,
        'bytes_per_token': kv_bytes / (batch * max_seq_len), 'bytes_per_further_token': further,
        'slots': [slot_row(plan, slot, batch, max_seq_len, kv_dtype) for slot in plan.slots],
    }


def slot_row(plan, slot, batch, max_seq_len, kv_dtype) -> dict:
    """One slot: kind, layers (the owner first), shape of K and of V, bytes of both with scales."""
    capacity = slot.capacity(max_seq_len)
    shape = [batch, slot.n_kv_head, capacity, slot.head_dim]
    return {'slot': slot.index, 'kind': slot.kind, 'owner': slot.owner, 'layers': list(slot.layers),
            'tied': slot.tied, 'latent': slot.latent, 'capacity': capacity, 'shape': shape,
            'dtype': kv_dtype, 'bytes_per_position': slot.position_nbytes(kv_dtype),
            'bytes': slot.nbytes(batch, max_seq_len, kv_dtype)}
