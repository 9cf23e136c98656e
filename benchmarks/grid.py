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
        return '\n'.join(['| ' + ' | '.join(self.columns) + ' |',
                          '|' + '|'.join('---' if column in self.left else '---:' for column in self.columns) + '|',
                          *('| ' + ' | '.join(row) + ' |' for row in self.rows)])

    def print(self, console) -> None:
        """Title and table, on a rich Console."""
        from rich.table import Table
        console.print(f'\n[bold]{self.title}[/bold]', highlight=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style='bold')
        for name in self.columns:
            table.add_column(name, justify='left' if name in self.left else 'right', no_wrap=name in self.left[:1])
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
