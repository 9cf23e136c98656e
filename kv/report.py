"""The KV-cache report: what each slot takes, what vanilla GPT-2 would, and the factors in between. No torch here."""
from kv.plan import KVPlan

REPORTED_DTYPES = ('float32', 'bfloat16', 'float16', 'int8')


def account(plan: KVPlan, batch: int, max_seq_len: int, kv_dtype: str, allocated: int | None = None) -> dict:
    """The figures of a cache for `batch` sequences of `max_seq_len` tokens, ready for JSON.

    allocated: bytes counted from a live cache; None = a plan without one, and the plan's arithmetic stands for them.
    `kv_ratio` is against vanilla GPT-2 of the same shape in the same dtype, `kv_ratio_bf16` against it in bf16; the
    factors heads * window * sharing make the first, times dtype the second.
    """
    vanilla = plan.vanilla()
    kv_bytes = plan.nbytes(batch, max_seq_len, kv_dtype) if allocated is None else allocated
    same, bf16 = (vanilla.nbytes(batch, max_seq_len, dtype) for dtype in (kv_dtype, 'bfloat16'))
    further = sum(plan.slot_nbytes(slot, 1, max_seq_len + 1, kv_dtype) - plan.slot_nbytes(slot, 1, max_seq_len, kv_dtype)
                  for slot in plan.slots)
    return {
        'batch': batch, 'max_seq_len': max_seq_len, 'kv_dtype': kv_dtype,
        'kv_bytes': kv_bytes, 'kv_bytes_counted': 'planned' if allocated is None else 'allocated',
        'kv_bytes_vanilla': same, 'kv_bytes_vanilla_bf16': bf16,
        'kv_ratio': same / kv_bytes, 'kv_ratio_bf16': bf16 / kv_bytes,
        'factors': plan.factors(max_seq_len, kv_dtype),
        'bytes_per_token': kv_bytes / (batch * max_seq_len), 'bytes_per_further_token': further,
        'slots': [slot_row(plan, slot, batch, max_seq_len, kv_dtype) for slot in plan.slots],
    }


def slot_row(plan, slot, batch, max_seq_len, kv_dtype) -> dict:
    """One slot: kind, layers served (the owner first), capacity, shape of K and of V, bytes of both with scales."""
    capacity = slot.capacity(max_seq_len)
    return {'slot': slot.index, 'kind': slot.kind, 'owner': slot.owner, 'layers': list(slot.layers),
            'capacity': capacity, 'shape': [batch, plan.n_kv_head, capacity, plan.head_dim], 'dtype': kv_dtype,
            'bytes_per_position': plan.position_nbytes(kv_dtype),
            'bytes': plan.slot_nbytes(slot, batch, max_seq_len, kv_dtype)}


def fitting(plan: KVPlan, budget: int, max_seq_len: int, kv_dtype: str) -> int:
    """How many sequences of `max_seq_len` tokens fit into `budget` bytes of KV."""
    return budget // plan.nbytes(1, max_seq_len, kv_dtype)


def nice_bytes(n: float) -> str:
    """1,048,576 -> '1.05 MB' (decimal units)."""
    for unit, size in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n >= size:
            return f'{n / size:.3g} {unit}' if n < 1000 * size or unit == 'GB' else f'{n / size:,.0f} {unit}'
    return f'{n:.0f} B'


def factor_line(figures: dict) -> str:
    """'heads 12x * window 2.67x * sharing 2.25x = 72x at equal dtype; ...'"""
    f = figures['factors']
    return (f"heads {f['heads']:.3g}x * window {f['window']:.3g}x * sharing {f['sharing']:.3g}x = "
            f"{figures['kv_ratio']:.1f}x at equal dtype ({figures['kv_dtype']}); "
            f"* dtype {f['dtype']:.3g}x = {figures['kv_ratio_bf16']:.1f}x against bfloat16")


def slot_table(figures: dict, title: str):
    """A rich table with a row per slot, the total, and vanilla GPT-2 beneath."""
    from rich.table import Table
    table = Table(title=title, title_justify='left', show_footer=False)
    for name, justify in (('slot', 'right'), ('kind', 'left'), ('layers (* owns)', 'left'), ('holds', 'right'),
                          ('K and V, each', 'left'), ('dtype', 'left'), ('bytes', 'right')):
        table.add_column(name, justify=justify, no_wrap=name != 'layers (* owns)')
    for row in figures['slots']:
        layers = ' '.join(f'{i}*' if i == row['owner'] else str(i) for i in row['layers'])
        table.add_row(str(row['slot']), row['kind'], layers, f"{row['capacity']:,}", ' x '.join(map(str, row['shape'])),
                      row['dtype'], f"{row['bytes']:,}")
    table.add_section()
    table.add_row('', 'total', figures['kv_bytes_counted'], '', '', figures['kv_dtype'], f"{figures['kv_bytes']:,}",
                  style='bold')
    table.add_row('', 'vanilla', 'GPT-2 of this shape', '', '', figures['kv_dtype'], f"{figures['kv_bytes_vanilla']:,}")
    table.add_row('', '', '', '', '', 'bfloat16', f"{figures['kv_bytes_vanilla_bf16']:,}")
    return table


def print_report(figures: dict, console, title: str) -> None:
    """The table, then the factors and the bytes per token in words."""
    console.print(slot_table(figures, title))
    console.print(f'smaller than vanilla GPT-2: {factor_line(figures)}', highlight=False, soft_wrap=True)
    console.print(f"{figures['bytes_per_token']:,.1f} bytes per token over {figures['max_seq_len']:,} tokens; "
                  f"each further token adds {figures['bytes_per_further_token']:,}", highlight=False, soft_wrap=True)


def dtype_table(plan: KVPlan, batch: int, max_seq_len: int, budget: int = 0):
    """Every kv_dtype: bytes, ratios, factors and, with a budget, how many sequences fit for this plan and vanilla."""
    from rich.table import Table
    table = Table(title=f'every kv_dtype, {batch} x {max_seq_len:,} tokens', title_justify='left')
    names = ['kv_dtype', 'bytes', 'bytes/token', 'vanilla', 'heads', 'window', 'sharing', '= equal dtype', 'dtype',
             '= vs bf16'] + ['fit in budget', 'vanilla fits'] * bool(budget)
    for name in names:
        table.add_column(name, justify='left' if name == 'kv_dtype' else 'right')
    for dtype in REPORTED_DTYPES:
        a = account(plan, batch, max_seq_len, dtype)
        f = a['factors']
        row = [dtype, f"{a['kv_bytes']:,}", f"{a['bytes_per_token']:,.1f}", f"{a['kv_bytes_vanilla']:,}",
               f"{f['heads']:.3g}x", f"{f['window']:.3g}x", f"{f['sharing']:.3g}x", f"{a['kv_ratio']:.1f}x",
               f"{f['dtype']:.3g}x", f"{a['kv_ratio_bf16']:.1f}x"]
        if budget:
            row += [f'{fitting(p, budget, max_seq_len, dtype):,}' for p in (plan, plan.vanilla())]
        table.add_row(*row)
    return table


