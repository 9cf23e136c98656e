"""Tables of text, printed in the terminal (rich) and written as Markdown, HTML and LaTeX."""
import html
from dataclasses import dataclass, field, replace

LATEX_ESCAPES = {ord(c): '\\' + c for c in '&%$#_{}'} | {
    ord('~'): r'\textasciitilde{}', ord('^'): r'\textasciicircum{}', ord('\\'): r'\textbackslash{}',
    ord('±'): r'$\pm$', ord('<'): r'$<$', ord('>'): r'$>$'}


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

    def html(self) -> str:
        """A heading (the title up to its first colon), a paragraph (the rest of the title) and the
        table. Column heads are buttons; left-aligned cells have the class 'word'."""
        def line(tag, texts):
            classes = (' class="word"' if column in self.left else '' for column in self.columns)
            cells = (f'<{tag}{attribute}>{text}</{tag}>' for attribute, text in zip(classes, texts))
            return f"<tr>{''.join(cells)}</tr>"
        head = line('th', (f'<button>{html.escape(column)}</button>' for column in self.columns))
        body = '\n'.join(line('td', map(html.escape, row)) for row in self.rows)
        name, _, rest = self.title.partition(':')
        return (f'<h2>{html.escape(name)}</h2><p>{html.escape(rest.strip())}</p>'
                '<div class="wide" tabindex="0"><table>'
                f'<thead>{head}</thead>\n<tbody>{body}</tbody></table></div>')

    def latex(self) -> str:
        """A tabular environment."""
        def line(cells):
            return ' & '.join(cell.translate(LATEX_ESCAPES) for cell in cells) + r' \\'
        kinds = ''.join('l' if column in self.left else 'r' for column in self.columns)
        lines = [rf'\begin{{tabular}}{{{kinds}}}', r'\hline', line(self.columns), r'\hline']
        return '\n'.join([*lines, *map(line, self.rows), r'\hline', r'\end{tabular}', ''])

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
