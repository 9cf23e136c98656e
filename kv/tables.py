"""The KV-cache report in a terminal, as rich tables."""
from kv.console import print_table, table_of


def print_report(numbers: dict, console, title: str) -> None:
    """Print a row per slot, the total, and vanilla GPT-2 (usually within 80 columns); then the
    factors and the bytes per token."""
    rows = []
    for slot in numbers['slots']:
        layers = ' '.join(f'{i}*' if i == slot['owner'] else str(i) for i in slot['layers'])
        shape = ' x '.join(map(str, slot['shape']))
        if slot['latent']:
            shape += ' latent'
        elif slot['tied']:
            shape += ' K=V'
        rows.append((str(slot['slot']), slot['kind'], layers, f"{slot['capacity']:,}", shape,
                     slot['dtype'], f"{slot['bytes']:,}"))
    dtype = numbers['kv_dtype']
    rows.append(('', 'total', numbers['kv_bytes_counted'], '', '', dtype,
                 f"{numbers['kv_bytes']:,}"))
    vanilla = {dtype: numbers['kv_bytes_vanilla'], 'bfloat16': numbers['kv_bytes_vanilla_bf16']}
    rows += [('', 'vanilla', 'GPT-2', '', '', name, f'{n:,}') for name, n in vanilla.items()]

    shapes = 'K, V (B x Hkv x S x D)'
    print_table(console, table_of(
        ('slot', 'kind', 'layers', 'holds', shapes, 'dtype', 'bytes'), rows,
        left=('kind', 'layers', shapes, 'dtype'), wrap=('layers',), bold=('total',)), title)
    print(f"* computes K and V, the others read them; vanilla: all global, {numbers['n_head']} "
          'K/V heads')
    f = numbers['factors']
    print(f"\nheads {f['heads']:.3g} * window {f['window']:.3g} * sharing {f['sharing']:.3g} = "
          f"{numbers['kv_ratio']:.1f}x smaller than vanilla {dtype}")
    if dtype != 'bfloat16':
        print(f"   ... * dtype {f['dtype']:.3g} = {numbers['kv_ratio_bf16']:.1f}x smaller than "
              'vanilla bfloat16')
    print(f"{numbers['bytes_per_token']:,.1f} bytes per token over {numbers['max_seq_len']:,} "
          f"tokens; each further token adds {numbers['bytes_per_further_token']:,.10g}")


def dtype_table(numbers: dict[str, dict]):
    """A column per kv_dtype, {kv_dtype: `account`}: bytes, the factors compared to vanilla and,
    with a budget, how many sequences fit."""
    forms = {'bytes': '{kv_bytes:,}', 'bytes per token': '{bytes_per_token:,.1f}',
             'vanilla, same dtype': '{kv_bytes_vanilla:,}',
             '  fewer K/V heads': '{factors[heads]:.3g}x', '  windows': '{factors[window]:.3g}x',
             '  shared slots': '{factors[sharing]:.3g}x', 'smaller, same dtype': '{kv_ratio:.1f}x',
             '  dtype, vs bfloat16': '{factors[dtype]:.3g}x',
             'smaller, vs bfloat16': '{kv_ratio_bf16:.1f}x'}
    if all('fit' in each for each in numbers.values()):
        forms |= {'fit in the budget': '{fit:,}', '  vanilla, same dtype': '{fit_vanilla:,}'}
    rows = [(name, *(form.format(**each) for each in numbers.values()))
            for name, form in forms.items()]
    return table_of(('', *numbers), rows, wrap=('',),
                    bold=('smaller, same dtype', 'smaller, vs bfloat16'))
