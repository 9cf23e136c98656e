"""Tables of text, printed in the terminal (rich) and written as Markdown."""
from dataclasses import dataclass, field, replace


@dataclass
class Table:
    """Rows of text under a title. `left`: names of the left-aligned columns."""
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    left: tuple[str, ...] = ('side',)

    def markdown(self) -> str:
        """The table without its title and without a final newline."""
        def line(cells):
            return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'
        rules = ('---' if column in self.left else '---:' for column in self.columns)
        return '\n'.join([line(self.columns), f"|{'|'.join(rules)}|", *map(line, self.rows)])

    def print(self, console) -> None:
        """Print the title and table on a rich Console. If the table is too wide, text is wrapped;
        trailing columns that still do not fit are omitted, and their names are printed."""
        from rich.table import Table as RichTable
        from rich.text import Text

        from kv.console import print_table
        console.print(Text(f'\n{self.title}', style='bold'), soft_wrap=True)
        shown = len(self.columns)
        while shown > 2 and sum(self.widths(0)[:shown]) + 2 * (shown - 1) > console.width:
            shown -= 1
        cut = replace(self, columns=self.columns[:shown], rows=[row[:shown] for row in self.rows])
        table = RichTable(box=None, pad_edge=False, header_style='bold')
        for name, width in zip(cut.columns, cut.widths(console.width)):
            justify = 'left' if name in self.left else 'right'
            table.add_column(Text(name), justify=justify, max_width=width)
        for row in cut.rows:
            table.add_row(*map(Text, row))
        print_table(console, table)
        if shown < len(self.columns):
            omitted = ', '.join(self.columns[shown:])
            console.print(Text(f'(no room for: {omitted})'), soft_wrap=True)

    def widths(self, room: int) -> list[int]:
        """Column widths in characters, for columns two characters apart: at least the longest word
        (a left-aligned column up to 20 characters), then as much of the text as fits into `room`,
        first columns first."""
        widths, wanted = [], []
        for name, *cells in zip(self.columns, *self.rows):
            cells.append(name)
            longest = max(map(len, cells))
            least = max(len(word) for text in cells for word in text.split() or [''])
            if name in self.left:
                least = max(least, min(longest, 20))
            widths.append(least)
            wanted.append(longest)
        spare = room - 2 * (len(widths) - 1) - sum(widths)
        for k, longest in enumerate(wanted):
            more = min(longest - widths[k], max(spare, 0))
            widths[k] += more
            spare -= more
        return widths
