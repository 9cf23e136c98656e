"""The account of a model's memory in a terminal, as rich tables."""
from itertools import groupby

from rich.table import Table

from config.sizes import nice_bytes
from kv.console import print_table
from kv.models.memory import INSTALL


def print_account(found: dict, console) -> None:
    """Print the tables and notes of `kv.models.account.account`."""
    plain = dict(highlight=False, soft_wrap=True)
    title = (f"{found['model_type']}: {found['n_layer']} layers, {found['batch']} x "
             f"{found['max_seq_len']:,} tokens, K and V in {found['kv_dtype']}")
    print_table(console, store_table(found), title)
    console.print(f"{found['bytes_per_token']:,.1f} bytes per token; each further token adds "
                  f"{found['bytes_per_further_token']:,}\n", **plain)
    print_table(console, dtype_table(found))
    title = f"\nwhat engines allocate for K and V in {found['dtype']} (llama.cpp: f16)"
    print_table(console, engine_table(found), title)
    for line in notes(found):
        console.print(line, **plain)


def store_table(found: dict) -> Table:
    """A row per kind of store; layers with equal stores are one row."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name, justify in (('kind', 'left'), ('layers', 'left'), ('holds', 'right'),
                          ('at each position', 'left'), ('states', 'left'),
                          ('bytes', 'right')):
        table.add_column(name, justify=justify, no_wrap=name in ('kind', 'holds', 'bytes'))

    def form(row):
        return (row['kind'], row['holds'], str(row['parts']), str(row['states']),
                len(row['layers']) > 1)
    for _, group in groupby(sorted(found['stores'], key=form), form):
        rows = list(group)
        first = rows[0]
        writers = ranges([row['layers'][0] for row in rows])
        readers = [i for row in rows for i in row['layers'][1:]]
        layers = writers + (f", read by {ranges(readers)}" if readers else '')
        parts = ', '.join(f'{name} {heads} x {width}' if heads > 1 else f'{name} {width}'
                          for name, (heads, width) in first['parts'].items())
        states = ', '.join(f"{name} {' x '.join(map(str, shape))}"
                           for name, shape in first['states'].items())
        nbytes = sum(row['bytes'] for row in rows)
        table.add_row(first['kind'], layers, f"{first['holds']:,}" if parts else '', parts, states,
                      f'{nbytes:,}')
    table.add_section()
    table.add_row('total', '', '', '', '', f"{found['bytes']:,}", style='bold')
    return table


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2 5'."""
    pieces = []
    for _, group in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        run = [n for _, n in group]
        pieces.append(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}')
    return ' '.join(pieces)


def dtype_table(found: dict) -> Table:
    table = Table(box=None, pad_edge=False, header_style='bold')
    table.add_column('K and V in')
    for name in found['by_dtype']:
        table.add_column(name, justify='right')
    table.add_row('bytes', *(f'{n:,}' for n in found['by_dtype'].values()))
    return table


def engine_table(found: dict) -> Table:
    """What engines allocate beside what is needed, and how many sequences fit into a budget."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    fit = found.get('fit')
    for name in ('', 'bytes', 'of needed', *(['fit in the budget'] * bool(fit))):
        table.add_column(name, justify='right' if name else 'left', no_wrap=True)
    base = found['by_dtype'][found['dtype']]
    rows = {'needed': base, **found['engines']}
    if found['kv_dtype'] != found['dtype']:
        rows = {f"needed, {found['kv_dtype']}": found['bytes'], **rows}
    for name, n in rows.items():
        cells = [name, '-' if n is None else f'{n:,}', '-' if n is None else f'{n / base:.2f}x']
        if fit:
            cells.append('-' if fit[name] is None else f'{fit[name]:,}')
        table.add_row(*cells)
    return table


def notes(found: dict) -> list[str]:
    """What the reader should know about the account, and the same model with nanoKV's plan."""
    lines = []
    if not found['defaults']:
        lines.append('Note: only what the config says is known, and layers of which it says '
                     'nothing count as full attention. Where transformers knows the class, it '
                     f'builds the model and counts its cache: {INSTALL}.')
    if found['filled']:
        filled = ', '.join(f'{name}={_short(value)}' for name, value in found['filled'].items())
        lines.append(f"Note: the config does not have {filled}: defaults of {found['defaults']}.")
    lines += [f'Note: {line}.' for line in found['assumed']]
    if like := found.get('like'):
        lines.append(
            f"\nwith nanoKV's plan (LLLLLG/AABBBC, global K/V tied, W={like['window']:,}, one K/V "
            f"head of {like['head_dim']}, int8): {like['bytes']:,} bytes "
            f"({nice_bytes(like['bytes'])}), {like['smaller']:.0f}x smaller. What it costs is "
            f"measured on small models only: row '{like['priced_by']}' of README's ladder.")
    return lines


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + '...'
