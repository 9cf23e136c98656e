"""Prints rich tables in which no number is cut."""
import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000  # columns


def output() -> Console:
    """A console for stdout: it breaks lines at the terminal's width, and nowhere in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=UNLIMITED)


def table_of(header, rows, left=('',), wrap=(), bold=()) -> Table:
    """A table of texts, right-aligned but in the columns named in `left`. Columns in `wrap` may be
    wrapped; rows with a cell in `bold` are bold."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name in header:
        justify = 'left' if name in left else 'right'
        table.add_column(name, justify=justify, no_wrap=name not in wrap)
    for row in rows:
        table.add_row(*row, style='bold' if set(bold) & set(row) else None)
    return table


def print_table(console: Console, table: Table, title: str = '') -> None:
    """Print the table below its title, with all words and numbers whole.

    Where the terminal is too narrow, text is wrapped between words; then lines become too long.
    (rich would cut numbers, and pads titles.)
    """
    for column in table.columns:
        pieces = [str(cell) for cell in (column.header, *column.cells)]
        if not column.no_wrap:  # the first word of a cell keeps its indentation
            pieces = [word for text in pieces for word in re.findall(r'^\s*\S+|\S+', text)]
        column.min_width = max(map(len, pieces), default=0)
    if title:
        console.print(Text(title, style='italic'), soft_wrap=True)
    console.print(table, crop=False)
