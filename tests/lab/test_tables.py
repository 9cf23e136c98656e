"""lab/tables.py: tables fit the terminal without cutting off numbers."""
import io

from rich.console import Console

from lab.tables import Table

TABLE = Table('speed of rows', ('row', 'tokens/s', 'against the row above'), left=('row',), rows=[
    ('the first of all of them, with a long name', '1,234,567', '-'),
    ('second', '2,345,678', '+0.0123 ±0.0045')])


def printed(width):
    console = Console(file=io.StringIO(), width=width)
    TABLE.print(console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()[2:]]


def test_words_are_wrapped_and_no_number_is_cut():
    assert '1,234,567' in ' '.join(printed(24))
    lines = printed(45)
    assert max(map(len, lines)) <= 45
    text = ' '.join(lines)
    words = [word for row in TABLE.rows for cell in row for word in cell.split()]
    assert '…' not in text and all(word in text for word in words)
