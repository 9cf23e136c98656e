"""A table of text that the terminal and Markdown pages both show."""
from dataclasses import dataclass, field


@dataclass
class Grid:
    """`columns` and `rows` of text under a `title`. `left` columns are words, the others numbers."""
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    left: tuple[str, ...] = ('side',)

    def markdown(self) -> str:
        """The table without its title, lines without a newline at the end."""
        def line(cells):
            return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'
        ruler = '|' + '|'.join('---' if column in self.left else '---:' for column in self.columns) + '|'
        return '\n'.join([line(self.columns), ruler, *map(line, self.rows)])

    def print(self, console) -> None:
        """Title and table, on a rich Console."""
        from rich.table import Table
        from rich.text import Text
        console.print(Text(f'\n{self.title}', style='bold'), soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style='bold')
        for name in self.columns:
            table.add_column(Text(name), justify='left' if name in self.left else 'right', no_wrap=name in self.left[:1])
        for row in self.rows:
            table.add_row(*map(Text, row))
        console.print(table)
