"""The committed page of measurements, made from the JSON files written by `bench.py --save=FILE`.

    python -m lab.benchmarks.table results/cpu/*.json > results/cpu/README.md
"""
import json
import sys
from pathlib import Path

from config.errors import UserError
from configurator import run_program
from lab.benchmarks.report import TABLES, heading

INTRODUCTION = '''# Decoding and prefill, measured

Made by `python -m lab.benchmarks.table results/cpu/*.json` from the JSON files here, each of which
names the command that made it. In a run all sides are interleaved; ratios are medians over the
rounds, with the smallest and the largest. B: sequences; W: the window of local layers; TTFT and
TPOT: times to the first and per further output token.
'''


def page(documents: dict[str, dict]) -> str:
    """Return the page in Markdown. documents: name of the file -> its document."""
    return '\n'.join([INTRODUCTION, *map(section, documents, documents.values())])


def section(name: str, document: dict) -> str:
    facts = (f'- {line}' for line in heading(document))
    lines = [f'## {name}', '', f"`{document['command']}`", '', *facts, '']
    for table in TABLES[document['mode']](document):
        lines += [table.title + ':', '', table.markdown(), '']
    return '\n'.join(lines)


def read(path: str, modes=tuple(TABLES)) -> dict:
    """Read a document of one of these modes. UserError: if the file is not one."""
    try:
        document = json.loads(Path(path).read_text(encoding='utf-8-sig'))
    except (OSError, ValueError) as e:
        raise UserError(f'{path} cannot be read as JSON: {type(e).__name__}') from e
    if not isinstance(document, dict) or document.get('mode') not in modes:
        raise UserError(f"{path} is not a document of bench.py with mode {', '.join(modes)}")
    return document


def main(argv=None):
    paths = sys.argv[1:] if argv is None else argv
    if not paths or any(path.startswith('-') for path in paths):
        print(__doc__.strip())
        raise SystemExit(0 if paths else 2)
    print(page({Path(path).stem: read(path) for path in paths}), end='')


if __name__ == '__main__':
    run_program(main)
