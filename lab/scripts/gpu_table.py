"""Write OUT/README.md from what lab/scripts/gpu_check.sh has left in OUT, as far as it got.

    python lab/scripts/gpu_table.py results/gpu
"""
import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lab.benchmarks.table import TABLES, section
from lab.tables import Table

RESULTS = {'failure': 'failed', 'error': 'failed', 'skipped': 'skipped'}  # elements of junit XML
TRAINING = ('median_ms', 'tokens_per_second', 'model_tflops_per_second', 'mfu', 'first_loss',
            'last_loss', 'trace')


def tests(files: list[Path]) -> str:
    """How many tests passed, and a list of those that did not."""
    lines, counts = [], Counter()
    for file in files:
        for case in ElementTree.parse(file).iter('testcase'):
            found = next((child for child in case if child.tag in RESULTS), None)
            result = 'passed' if found is None else RESULTS[found.tag]
            counts[result] += 1
            if found is not None:
                why = (found.get('message') or '').partition('\n')[0][:200]
                lines.append(f"- {result}: {case.get('classname')}.{case.get('name')}: {why}\n")
    return ', '.join(f'{n} {result}' for result, n in counts.items()) + '\n\n' + ''.join(lines)


def measured(name: str, document: dict) -> str:
    if document.get('mode') in TABLES:
        return section(name, document)
    title = f"## {name}\n\n{document.get('title', '')}\n\n"
    if 'text' in document:
        return title + f"```\n{document['text'].rstrip()}\n```\n"
    if document.get('mode') == 'train':
        names = [key for key in TRAINING if key in document]
        document = {'columns': names, 'rows': [[str(document[key]) for key in names]]}
    return title + Table('', document['columns'], document['rows'], ()).markdown() + '\n'


def page(out: Path) -> str:
    lines = ['# On a GPU', '', 'Made by `lab/scripts/gpu_check.sh`. The speeds that we expected '
             'are in [docs/gpu.md](../../docs/gpu.md).', '']
    for facts in sorted(out.glob('*-facts.txt')):
        part = facts.name.removesuffix('-facts.txt')
        lines += [f'- {part}: {facts.read_text().strip()}']
        failed = (out / f'{part}-failed.txt').read_text().splitlines()
        lines += [f'  - {line[:200]}' for line in failed]
    files = sorted(out.glob('*.xml'))
    lines += ['', *(['## Tests', '', tests(files)] if files else [])]
    lines += [measured(file.stem, json.loads(file.read_text(encoding='utf-8')))
              for file in sorted(out.glob('*.json'))]
    return '\n'.join(lines)


if __name__ == '__main__':
    folder = Path(sys.argv[1])
    (folder / 'README.md').write_text(page(folder), encoding='utf-8')
