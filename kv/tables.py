"""The KV-cache report in a terminal, as rich tables."""
from rich.table import Table

from kv.capacity import fitting
from kv.console import print_table
from kv.plan import KVPlan
from kv.report import REPORTED_DTYPES, account


def slot_table(numbers: dict) -> Table:
    """A row per slot, the total, and vanilla GPT-2; usually fits in 80 columns."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name, justify in (
            ('slot', 'right'), ('kind', 'left'), ('layers', 'left'), ('holds', 'right'),
            ('K, V (B x Hkv x S x D)', 'left'), ('dtype', 'left'), ('bytes', 'right')):
        table.add_column(name, justify=justify, no_wrap=name != 'layers')
    for row in numbers['slots']:
        layers = ' '.join(f'{i}*' if i == row['owner'] else str(i) for i in row['layers'])
        shape = ' x '.join(map(str, row['shape']))
        shape += ' latent' if row['latent'] else ' K=V' * row['tied']
        table.add_row(str(row['slot']), row['kind'], layers, f"{row['capacity']:,}", shape,
                      row['dtype'], f"{row['bytes']:,}")
    table.add_section()
    table.add_row('', 'total', numbers['kv_bytes_counted'], '', '', numbers['kv_dtype'],
                  f"{numbers['kv_bytes']:,}", style='bold')
    vanilla = {numbers['kv_dtype']: numbers['kv_bytes_vanilla'],
               'bfloat16': numbers['kv_bytes_vanilla_bf16']}
    for dtype, n in vanilla.items():
        table.add_row('', 'vanilla', 'GPT-2', '', '', dtype, f'{n:,}')
    return table


def factor_lines(numbers: dict) -> str:
    """The factors whose product is the ratio: at equal dtype, and to vanilla in bfloat16."""
    f = numbers['factors']
    lines = (f"heads {f['heads']:.3g} * window {f['window']:.3g} * sharing {f['sharing']:.3g} = "
             f"{numbers['kv_ratio']:.1f}x smaller than vanilla {numbers['kv_dtype']}")
    if numbers['kv_dtype'] != 'bfloat16':
        lines += (f"\n   ... * dtype {f['dtype']:.3g} = {numbers['kv_ratio_bf16']:.1f}x smaller "
                  'than vanilla bfloat16')
    return lines


def print_report(numbers: dict, console, title: str) -> None:
    """Print the table, then the factors and the bytes per token as text."""
    print_table(console, slot_table(numbers), title)
    console.print('[dim]* computes K and V, the others read them; vanilla: all global, '
                  f"{numbers['n_head']} K/V heads[/dim]")
    console.print(f'\n[bold]{factor_lines(numbers)}[/bold]', highlight=False)
    console.print(f"{numbers['bytes_per_token']:,.1f} bytes per token over "
                  f"{numbers['max_seq_len']:,} tokens; each further token adds "
                  f"{numbers['bytes_per_further_token']:,}", highlight=False)


def dtype_table(plan: KVPlan, batch: int, max_seq_len: int, budget: int = 0) -> Table:
    """A column per kv_dtype: bytes, the factors compared to vanilla and, with a budget, how many
    sequences fit."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    table.add_column('')
    for dtype in REPORTED_DTYPES:
        table.add_column(dtype, justify='right')
    numbers = [account(plan, batch, max_seq_len, dtype) for dtype in REPORTED_DTYPES]

    def row(name, form, style=None):
        table.add_row(name, *(form(a) for a in numbers), style=style)
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
    return table
