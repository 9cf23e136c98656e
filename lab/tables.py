"""Tables of text, printed in the terminal (rich) and written as Markdown."""
from dataclasses import dataclass, field


@dataclass
class Table:
    """Rows of text under a title. `left`: names of the left-aligned columns."""
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    left: tuple[str, ...] = ('side',)

    @classmethod
    def of(cls, title: str, rows, columns: dict, left=('side',)) -> 'Table':
        """Of any objects. columns: {heading: cell}. A cell is a function of the row, or a format
        string over it if the rows are dicts: '{val_loss[mean]:.4f}'."""
        return cls(title, tuple(columns), [tuple(
            cell(row) if callable(cell) else cell.format_map(row) for cell in columns.values())
            for row in rows], left)

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
        least = [max(len(word) for text in column for word in text.split() or [''])
                 for column in zip(self.columns, *self.rows)]  # characters
        shown = len(self.columns)
        while shown > 2 and sum(least[:shown]) + 2 * (shown - 1) > console.width:
            shown -= 1
        table = RichTable(box=None, pad_edge=False, header_style='bold')
        for name in self.columns[:shown]:
            table.add_column(Text(name), justify='left' if name in self.left else 'right')
        for row in self.rows:
            table.add_row(*map(Text, row[:shown]))
        print_table(console, table)
        if omitted := self.columns[shown:]:
            console.print(Text(f"(no room for: {', '.join(omitted)})"), soft_wrap=True)
