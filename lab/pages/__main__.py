"""Write the tables of README.md, docs/ and the READMEs of lab/ from results/.

    python -m lab.pages            # rewrite the blocks of all pages
    python -m lab.pages --check    # only list outdated pages; exit status 1 if there are any

A block is the text between `<!-- begin NAME -->` and `<!-- end -->`. All other text, with the
numbers in it, is written by hand.
"""
import argparse
import re
from pathlib import Path

from configurator import run_program
from lab.pages.blocks import written
from lab.pages.tables import ROOT

BLOCK = re.compile(r'^<!-- begin (\S+) -->\n(.*?)^<!-- end -->', re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')),
            *sorted((ROOT / 'lab').glob('*/README.md'))]


def rewritten(text: str) -> str:
    """Return the page with its blocks updated from results/. KeyError: if a block is unknown."""
    return BLOCK.sub(lambda m: f'<!-- begin {m[1]} -->\n{written(m[1])}\n<!-- end -->', text)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.pages', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing')
    args = parser.parse_args(argv)
    status = 0
    for page in pages():
        old = page.read_text(encoding='utf-8')
        new = rewritten(old)
        if new != old:
            print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'rewritten'}")
            status = int(args.check)
            if not args.check:
                page.write_text(new, encoding='utf-8')
    raise SystemExit(status)


if __name__ == '__main__':
    run_program(main)
