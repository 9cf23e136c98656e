"""A table of text that the terminal and Markdown pages both show."""
from dataclasses import dataclass, field, replace


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

    def latex(self) -> str:
        """A tabular, with the characters escaped that LaTeX gives a meaning."""
        escapes = {ord(c): '\\' + c for c in '&%$#_{}'} | {ord('~'): r'\textasciitilde{}', ord('^'): r'\textasciicircum{}',
                   ord('\\'): r'\textbackslash{}', ord('±'): r'$\pm$', ord('<'): r'$<$', ord('>'): r'$>$'}
        lines = [' & '.join(cell.translate(escapes) for cell in row) + r' \\' for row in (self.columns, *self.rows)]
        kinds = ''.join('l' if column in self.left else 'r' for column in self.columns)
        return '\n'.join([rf'\begin{{tabular}}{{{kinds}}}', r'\hline', lines[0], r'\hline', *lines[1:], r'\hline',
                          r'\end{tabular}', ''])

    def print(self, console) -> None:
        """Title and table, on a rich Console. What is too wide for it is broken between words; last
        columns for which there is no room at all are left out, and named."""
        from rich.table import Table
        from rich.text import Text
        console.print(Text(f'\n{self.title}', style='bold'), soft_wrap=True)
        shown = len(self.columns)
        while shown > 2 and sum(self.widths(0)[:shown]) + 2 * (shown - 1) > console.width:
            shown -= 1
        cut = replace(self, columns=self.columns[:shown], rows=[row[:shown] for row in self.rows])
        table = Table(box=None, pad_edge=False, header_style='bold')
        for name, width in zip(cut.columns, cut.widths(console.width)):
            table.add_column(Text(name), justify='left' if name in self.left else 'right', width=width)
        for row in cut.rows:
            table.add_row(*map(Text, row))
        console.print(table)
        if shown < len(self.columns):
            console.print(Text(f"(no room for: {', '.join(self.columns[shown:])})"), soft_wrap=True)

    def widths(self, room: int) -> list[int]:
        """Of the columns, in characters, with two between them: as wide as their text, or as their longest word where that is
        too much for `room`; what room is left goes to the first ones."""
        cells = list(zip(self.columns, *self.rows))
        wide = [max(map(len, column)) for column in cells]
        narrow = [max(len(word) for text in column for word in text.split() or ['']) for column in cells]
        narrow = [max(least, min(most, 20)) if name in self.left else least
                  for name, most, least in zip(self.columns, wide, narrow)]
        left = room - 2 * (len(cells) - 1) - sum(narrow)
        for k, (most, least) in enumerate(zip(wide, narrow)):
            more = min(most - least, max(left, 0))
            narrow[k] += more
            left -= more
        return narrow
