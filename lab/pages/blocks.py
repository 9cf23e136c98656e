"""The registry of blocks, and helpers that their functions share.

A block of a page is the text between `<!-- begin NAME -->` and `<!-- end -->`. The function
registered under NAME returns this text, in Markdown.
"""
import json
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results'
BLOCKS = {}


def block(function):
    """Register a function as the block with its name, with hyphens instead of underscores."""
    BLOCKS[function.__name__.replace('_', '-')] = function
    return function


def load(name: str) -> dict:
    return json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))


def cells(name: str) -> list[dict]:
    """The cells of a benchmark in results/cpu/."""
    return load(f'cpu/{name}')['cells']


def rows_of(ladder: str) -> dict[str, dict]:
    return {row['name']: row for row in load(f'{ladder}/results')['rows']}


def speed(cell: dict, model: str) -> float:
    """Median tokens per second of one model in a cell."""
    return cell['sides'][model]['tokens_per_second']['median']


def tpot(cell: dict, model: str) -> float:
    """Median milliseconds per output token."""
    return cell['sides'][model]['tpot_ms']['median']


def ratio(cell: dict, baseline: str, metric: str = 'tokens_per_second') -> float:
    """Median over the rounds of our speed divided by the baseline's."""
    return cell['ratios'][metric][baseline]['median']


def item(text: str) -> str:
    """A list item, wrapped."""
    return '- ' + textwrap.indent(prose(text), '  ')[2:]


def mean(row: dict) -> float:
    return row['val_loss']['mean']


def first_seed(row: dict) -> float:
    return row['val_loss']['each'][0]


def table(header: str, rows: list[str]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    n_columns = header.count('|') - 1
    return '\n'.join([header, '|---|' + '---:|' * (n_columns - 1), *rows])


def prose(*paragraphs: str) -> str:
    """Paragraphs, wrapped."""
    filled = [textwrap.fill(' '.join(text.split()), 100, break_long_words=False,
                            break_on_hyphens=False) for text in paragraphs]
    return '\n\n'.join(filled)
