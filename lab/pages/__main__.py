"""Write the tables of README.md, docs/ and the READMEs of lab/ from results/.

    python -m lab.pages

A block is the text between `<!-- begin NAME -->` and `<!-- end -->`. All other text, with the
numbers in it, is written by hand.
"""
import re
from pathlib import Path

from configurator import run_program
from lab.pages.blocks import ROOT, written

BLOCK = re.compile(r'^<!-- begin (\S+) -->\n(.*?)^<!-- end -->', re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')),
            *sorted((ROOT / 'lab').glob('*/README.md'))]


def rewritten(text: str) -> str:
    """Return the page with its blocks updated from results/. KeyError: if a block is unknown."""
    return BLOCK.sub(lambda m: f'<!-- begin {m[1]} -->\n{written(m[1])}\n<!-- end -->', text)


def main() -> None:
    for page in pages():
        old = page.read_text(encoding='utf-8')
        new = rewritten(old)
        if new != old:
            page.write_text(new, encoding='utf-8')
            print(f'{page.relative_to(ROOT)}: rewritten')


if __name__ == '__main__':
    run_program(main)
