"""The committed page of measurements, made from the JSON files written by `bench.py --save=FILE`.

    python -m lab.benchmarks.table results/cpu/*.json > results/cpu/README.md
"""
import json
import sys
from pathlib import Path

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


def read(path: str) -> dict:
    return json.loads(Path(path).read_text(encoding='utf-8-sig'))


def main(paths: list[str]):
    documents = {Path(path).stem: read(path) for path in paths}
    with_tables = {name: document for name, document in documents.items()
                   if document['mode'] in TABLES}
    print(page(with_tables), end='')


if __name__ == '__main__':
    main(sys.argv[1:])
