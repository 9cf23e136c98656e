"""The account of a model's memory in a terminal, as rich tables."""
from itertools import groupby

from common.sizes import nice_bytes
from kv.console import print_table, table_of


def print_account(found: dict, console) -> None:
    """Print the tables and notes of `kv.models.account.account`."""
    print_table(console, store_table(found), (
        f"{found['model_type']}: {found['n_layer']} layers, {found['batch']} x "
        f"{found['max_seq_len']:,} tokens, K and V in {found['kv_dtype']}"))
    print(f"{found['bytes_per_token']:,.1f} bytes per token; each further token adds "
          f"{found['bytes_per_further_token']:,.10g}\n")
    by_dtype = found['by_dtype']
    print_table(console, table_of(('K and V in', *by_dtype),
                                  [('bytes', *(f'{n:,}' for n in by_dtype.values()))],
                                  left=('K and V in',)))

    base, fit = by_dtype[found['dtype']], found.get('fit')
    sizes = {'needed': base, **found['engines']}
    if found['kv_dtype'] != found['dtype']:
        sizes = {f"needed, {found['kv_dtype']}": found['bytes'], **sizes}
    header, rows = ['', 'bytes', 'of needed'], []
    for name, n in sizes.items():
        rows.append([name, '-', '-'] if n is None else [name, f'{n:,}', f'{n / base:.2f}x'])
        if fit:
            rows[-1].append('-' if n is None else f'{fit[name]:,}')
    if fit:
        header.append('fit in the budget')
    print_table(console, table_of(header, rows),
                f"\nwhat engines allocate for K and V in {found['dtype']}")
    if found['defaults']:
        print(f"Note: what the config leaves out has the defaults of {found['defaults']}.")
    for line in found['assumed']:
        print(f'Note: {line}.')
    if like := found.get('like'):
        print(f"\nwith nanoKV's plan (LLLLLG/AABBBC, one slot for all global layers, "
              f"W={like['window']:,}, one K/V head of {like['head_dim']}, int8): "
              f"{like['bytes']:,} bytes ({nice_bytes(like['bytes'])}), {like['smaller']:.0f}x "
              "smaller. This plan's loss was measured on small models only (README's ladder).")


def store_table(found: dict):
    """A row per kind of store; layers with equal stores are one row."""
    def form(row):
        return (row['kind'], row['holds'], str(row['parts']), str(row['states']),
                len(row['layers']) > 1)
    rows = []
    for (kind, holds, *_), group in groupby(sorted(found['stores'], key=form), form):
        group = list(group)
        layers = ranges([row['layers'][0] for row in group])
        if readers := [i for row in group for i in row['layers'][1:]]:
            layers += f', read by {ranges(readers)}'
        parts = ', '.join(f'{name} {heads} x {width}' if heads > 1 else f'{name} {width}'
                          for name, (heads, width) in group[0]['parts'].items())
        states = ', '.join(f"{name} {' x '.join(map(str, shape))}"
                           for name, shape in group[0]['states'].items())
        rows.append((kind, layers, f'{holds:,}' if parts else '', parts, states,
                     f"{sum(row['bytes'] for row in group):,}"))
    rows.append(('total', '', '', '', '', f"{found['bytes']:,}"))
    text = 'layers', 'at each position', 'states'
    return table_of(('kind', 'layers', 'holds', *text[1:], 'bytes'), rows, left=('kind', *text),
                    wrap=text, bold=('total',))


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2 5'."""
    pieces = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [n for _, n in group]
        pieces.append(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}')
    return ' '.join(pieces)
