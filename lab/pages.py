"""Write the tables of README.md and docs/ from the files under results/.

    python -m lab.pages

A table stands between `<!-- begin NAME -->` and `<!-- end -->`, and the function TABLES[NAME] makes
it. All other text, with the numbers in it, is written by hand.
"""
import json
import re
import statistics
from pathlib import Path

from configurator import run_program
from lab.ablation.stats import paired_difference
from lab.ablation.tables import plus_minus
from lab.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'results'
BLOCK = re.compile(r'^<!-- begin (\S+) -->\n(.*?)^<!-- end -->', re.DOTALL | re.MULTILINE)
# Rows of equal dtypes come before those of mixed ones. Each: file, index of the cell, work, dtypes
# of nanoKV and of the baseline, the baseline, its name in the file, metric.
SPEEDS = [
    ('against-llama.cpp-int8-b1', 1, 'decode of vanilla GPT-2, batch 1, context 900',
     'int8, Q8_0', 'llama.cpp, the same model', 'llama.cpp q8_0', 'tpot_ms'),
    ('against-vllm-bfloat16', 0, '32 requests, 64 prompt and 64 new tokens each',
     'bfloat16, bfloat16', 'vLLM, the same model', 'vllm', 'tokens_per_second'),
    ('against-vllm-prefill-bfloat16', 3, 'a new prompt of 4,096 tokens', 'bfloat16, bfloat16',
     'vLLM, the same model', 'vllm', 'tokens_per_second'),
    *((f'decode-{form}b{batch}', k, f'decode, batch {batch}, context {context}', dtypes,
       'vanilla GPT-2', side, 'tpot_ms')
      for form, dtypes, side in (('', 'float32, float32', 'vanilla'),
                                 ('int8-', 'int8, float32', 'vanilla float32'))
      for batch, k, context in ((1, 0, '1,024'), (1, 3, '32,768'), (16, 1, '4,096'))),
    ('decode-1GB', 0, 'decode, as many sequences as fit in 1 GB, context 4,096', 'int8, float32',
     'vanilla GPT-2', 'vanilla float32', 'tokens_per_second')]


def load(name: str) -> dict:
    return json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))


def cells(name: str) -> list[dict]:
    """The cells of a benchmark in results/cpu/."""
    return load(f'cpu/{name}')['cells']


def rows_of(ladder: str) -> dict[str, dict]:
    """{name: row} of a ladder, in its order."""
    return {row['name']: row for row in load(f'{ladder}/results')['rows']}


def against(name: str):
    return lambda row: plus_minus(row.get(f'against_{name}'))


def far_back(row: dict) -> float:
    """Mean loss of the identifiers that local layers cannot reach, over the seeds."""
    return statistics.fmean(row['identifiers']['nats_beyond'].values())


def kept(row: dict) -> str:
    """The share of the baseline's gain from long memory that a row keeps, with its 95% interval."""
    shares = dict(enumerate(row['identifiers']['kept']['each']))
    return plus_minus(paired_difference(shares, dict.fromkeys(shares, 0.0)), '.0f', scale=100)


# -- one function a table --------------------------------------------------------------------------

def kv_bytes() -> Table:
    ours, gemma = ([load(f'kv/{name}-T{T}') for T in (1024, 8192)]
                   for name in ('gpt2_mqa_local', 'gemma_shaped'))
    vanilla = [{'kv_bytes': each['bfloat16']['kv_bytes_vanilla'], 'kv_ratio_bf16': 1,
                'fit': each['bfloat16']['fit_vanilla']} for each in ours]
    rows = {'vanilla GPT-2, bfloat16': vanilla,
            'with three techniques of Gemma 4, bfloat16': [each['bfloat16'] for each in gemma]}
    for dtype in ('bfloat16', 'int8'):
        rows[f'`config/train_gpt2_mqa_local.py`, {dtype}'] = [each[dtype] for each in ours]
    return Table.of('', [dict(name=name, short=each[0], long=each[1])
                         for name, each in rows.items()], {
        "GPT-2's shape, one sequence": '{name}',
        'bytes, T=1,024': '{short[kv_bytes]:,}', 'smaller, T=1,024': '{short[kv_ratio_bf16]:.0f}x',
        'bytes, T=8,192': '{long[kv_bytes]:,}', 'smaller, T=8,192': '{long[kv_ratio_bf16]:.0f}x',
        'sequences in 1 GB, T=8,192': '{long[fit]}'})


def ladder() -> Table:
    return Table.of('', [row for row in rows_of('ablate_prices').values() if not row['side']], {
        'row': '{name}', 'parameters': lambda row: f"{row['params'] / 1e6:.2f}M",
        'KV bytes': lambda row: f"{row['kv']['bytes_per_token'] * row['kv']['T']:,.0f}",
        'times smaller': '{kv[smaller]:.1f}x',
        'validation loss': '{val_loss[mean]:.4f} ({val_loss[sd]:.4f})',
        'loss minus that of the row above': against('above'),
        'loss minus that of `+ qk_norm`': against('baseline')})


def speeds() -> Table:
    trained = load('cpu/train-against-nanogpt-avx512-bf16')
    theirs = trained['nanogpt_tokens_per_second']
    rows = [('training of vanilla GPT-2: 6 layers of 384, T=512, B=4', 'bfloat16, bfloat16',
             f"{trained['tokens_per_second']:,.0f} tokens/s",
             f'nanoGPT, the same model: {theirs:,.0f} tokens/s',
             f"{trained['faster']['median']:.1f}x")]
    for file, k, work, dtypes, other, side, metric in SPEEDS:
        cell = cells(file)[k]
        ours, theirs = (cell['sides'][name][metric]['median'] for name in ('ours', side))
        form = '{:.1f} ms/token' if metric == 'tpot_ms' else '{:,.0f} tokens/s'
        ratio = cell['ratios']['tokens_per_second'][side]['median']
        rows.append((work, dtypes, form.format(ours), f'{other}: {form.format(theirs)}',
                     f'{ratio:.1f}x'))
    return Table('', ('work', 'dtypes', 'nanoKV', 'against', 'ratio'), rows)


def source_code() -> Table:
    rows = [row for row in rows_of('ablate_pysource').values() if len(row['seeds']) == 4]
    return Table.of('', rows, {
        'row': '{name}', 'KV bytes/token': '{kv[bytes_per_token]:,.0f}',
        'minus the row above, or that it departs from': against('above'),
        'minus `+ key offset`': against('baseline'),
        'nats of a name from far back': lambda row: f'{far_back(row):.2f}',
        'of the gain kept, %': kept})


TABLES = {'kv-bytes': kv_bytes, 'ladder': ladder, 'speed-table': speeds, 'source-code': source_code}


def pages() -> list[Path]:
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def rewritten(text: str) -> str:
    """Return the page with its tables updated from results/. KeyError: if a name is unknown."""
    return BLOCK.sub(lambda m: f'<!-- begin {m[1]} -->\n{TABLES[m[1]]().markdown()}\n<!-- end -->',
                     text)


def main() -> None:
    for page in pages():
        old = page.read_text(encoding='utf-8')
        new = rewritten(old)
        if new != old:
            page.write_text(new, encoding='utf-8')
            print(f'{page.relative_to(ROOT)}: rewritten')


if __name__ == '__main__':
    run_program(main)
