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
    further = plan.nbytes(1, max_seq_len + 1, kv_dtype) - plan.nbytes(1, max_seq_len, kv_dtype)
    return {
        'batch': batch, 'max_seq_len': max_seq_len, 'kv_dtype': kv_dtype,
        'kv_bytes': kv_bytes, 'kv_bytes_counted': 'planned' if allocated is None else 'allocated',
        'kv_bytes_vanilla': same, 'kv_bytes_vanilla_bf16': bf16,
        'kv_ratio': same / kv_bytes, 'kv_ratio_bf16': bf16 / kv_bytes,
        'factors': plan.factors(max_seq_len, kv_dtype), 'n_head': plan.n_head, 'n_kv_head': plan.n_kv_head,
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
    for unit, size in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
        if n >= size:
            return f'{n / size:.3g} {unit}' if n < 1000 * size else f'{n / size:,.0f} {unit}'
    return f'{n:.0f} B'


def factor_lines(figures: dict) -> str:
    """The factors that multiply to the ratio: at equal dtype, and against vanilla in bfloat16."""
    f = figures['factors']
    lines = (f"heads {f['heads']:.3g} * window {f['window']:.3g} * sharing {f['sharing']:.3g} = {figures['kv_ratio']:.1f}x "
             f"smaller than vanilla {figures['kv_dtype']}")
    if figures['kv_dtype'] != 'bfloat16':
        lines += f"\n   ... * dtype {f['dtype']:.3g} = {figures['kv_ratio_bf16']:.1f}x smaller than vanilla bfloat16"
    return lines


def slot_table(figures: dict, title: str):
    """A rich table with a row per slot, the total, and vanilla GPT-2 beneath; 80 columns are enough."""
    from rich.table import Table
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name, justify in (('slot', 'right'), ('kind', 'left'), ('layers', 'left'), ('holds', 'right'),
                          ('K, V (B x Hkv x S x D)', 'left'), ('dtype', 'left'), ('bytes', 'right')):
        table.add_column(name, justify=justify, no_wrap=name != 'layers')
    for row in figures['slots']:
        layers = ' '.join(f'{i}*' if i == row['owner'] else str(i) for i in row['layers'])
        table.add_row(str(row['slot']), row['kind'], layers, f"{row['capacity']:,}", ' x '.join(map(str, row['shape'])),
                      row['dtype'], f"{row['bytes']:,}")
    table.add_section()
    table.add_row('', 'total', figures['kv_bytes_counted'], '', '', figures['kv_dtype'], f"{figures['kv_bytes']:,}",
                  style='bold')
    vanilla = {figures['kv_dtype']: figures['kv_bytes_vanilla'], 'bfloat16': figures['kv_bytes_vanilla_bf16']}
    for dtype, n in vanilla.items():
        table.add_row('', 'vanilla', 'GPT-2', '', '', dtype, f'{n:,}')
    return titled(title, table)


def titled(title: str, table):
    """The table beneath its title; rich's own titles end in spaces."""
    from rich.console import Group
    from rich.text import Text
    return Group(Text(title, style='italic'), table)


def print_report(figures: dict, console, title: str) -> None:
    """The table, then the factors and the bytes per token in words."""
    console.print(slot_table(figures, title))
    console.print(f"[dim]* computes K and V, the others read them; vanilla: all global, {figures['n_head']} K/V heads[/dim]")
    console.print(f'\n[bold]{factor_lines(figures)}[/bold]', highlight=False)
    console.print(f"{figures['bytes_per_token']:,.1f} bytes per token over {figures['max_seq_len']:,} tokens; "
                  f"each further token adds {figures['bytes_per_further_token']:,}", highlight=False)


def dtype_table(plan: KVPlan, batch: int, max_seq_len: int, budget: int = 0):
    """A column per kv_dtype: bytes, factor by factor against vanilla and, with a budget, how many sequences fit."""
    from rich.table import Table
    table = Table(box=None, pad_edge=False, header_style='bold')
    table.add_column('')
    for dtype in REPORTED_DTYPES:
        table.add_column(dtype, justify='right')
    figures = [account(plan, batch, max_seq_len, dtype) for dtype in REPORTED_DTYPES]

    def row(name, form, style=None):
        table.add_row(name, *(form(a) for a in figures), style=style)
    row('bytes', lambda a: f"{a['kv_bytes']:,}")
    row('bytes per token', lambda a: f"{a['bytes_per_token']:,.1f}")
    row('vanilla, same dtype', lambda a: f"{a['kv_bytes_vanilla']:,}")
    row('  fewer K/V heads', lambda a: f"{a['factors']['heads']:.3g}x")
    row('  windows', lambda a: f"{a['factors']['window']:.3g}x")
    row('  shared slots', lambda a: f"{a['factors']['sharing']:.3g}x")
    row('smaller, same dtype', lambda a: f"{a['kv_ratio']:.1f}x", style='bold')
    row('  dtype, vs bfloat16', lambda a: f"{a['factors']['dtype']:.3g}x")
    row('smaller, vs bfloat16', lambda a: f"{a['kv_ratio_bf16']:.1f}x", style='bold')
    if budget:
        for name, p in (('fit in the budget', plan), ('  vanilla, same dtype', plan.vanilla())):
            row(name, lambda a, p=p: f"{fitting(p, budget, max_seq_len, a['kv_dtype']):,}")
    return titled(f'\nevery kv_dtype, {batch} x {max_seq_len:,} tokens', table)
