"""Tables of text, printed in the terminal (rich) and written as Markdown."""
from dataclasses import dataclass, field


@dataclass
class Table:
    """Rows of text under a title. `left`: names of the left-aligned columns, () = the first."""
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    left: tuple[str, ...] = ()

    def __post_init__(self):
        self.left = self.left or self.columns[:1]

    @classmethod
    def of(cls, title: str, rows, columns: dict, left=()) -> 'Table':
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
        """Print the title and table on a rich Console. Too wide a table wraps between words."""
        from rich.markup import escape
        from rich.text import Text

        from kv.console import print_table, table_of
        console.print(Text(f'\n{self.title}', style='bold'), soft_wrap=True)
        rows = [[escape(cell) for cell in row] for row in self.rows]
        print_table(console, table_of(self.columns, rows, self.left, wrap=self.columns))
