"""Read files under results/, and write rows of numbers as a table in Markdown."""
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results'
SERVERS = {'nanokv': 'nanoKV, float32', 'nanokv int8': 'nanoKV, int8',
           'vllm float32': 'vLLM, float32', 'vllm bfloat16': 'vLLM, bfloat16',
           'llama.cpp': 'llama.cpp, float16'}


def load(name: str) -> dict:
    return json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))


def lines(name: str) -> list[dict]:
    """The documents of a file of JSON lines."""
    text = (RESULTS / f'{name}.jsonl').read_text(encoding='utf-8')
    return list(map(json.loads, text.splitlines()))


def cells(name: str) -> list[dict]:
    """The cells of a benchmark in results/cpu/."""
    return load(f'cpu/{name}')['cells']


def rows_of(ladder: str) -> dict[str, dict]:
    """{name: row} of a ladder, in its order."""
    return {row['name']: row for row in load(f'{ladder}/results')['rows']}


def replays() -> list[dict]:
    """The results of lab/scripts/sessions.sh, with the name of the server and its dtype."""
    found = []
    for each in lines('sessions/replay'):
        dtype = each['more'].rpartition('=')[2]
        found.append(each | {'name': SERVERS[f"{each['server']} {dtype}".strip()]})

    def place(each):
        saturated = each['users'] > 0
        by_memory = -each['kv'] if saturated else 0
        return each['trace'], by_memory, list(SERVERS.values()).index(each['name']), each['kv']

    return sorted(found, key=place)


def table(rows, columns: dict) -> str:
    """Return rows (dicts) as a table. Each column is {heading: cell}, and a cell a format string
    over the row, '{val_loss[mean]:.4f}', or a function of the row. The first column is aligned to
    the left, all others to the right.
    """
    def line(texts):
        return f"| {' | '.join(texts)} |"

    lines = [line(columns), '|---|' + '---:|' * (len(columns) - 1)]
    for row in rows:
        lines.append(line(cell(row) if callable(cell) else cell.format_map(row)
                          for cell in columns.values()))
    return '\n'.join(lines)
