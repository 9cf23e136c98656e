"""The tables of README.md and docs/, and the reports that commands print there.

TABLES has {name of the block: (a function that returns the rows, {heading: cell})}, as `Table.of`
takes them. The rows come from results/, all words stand in the pages themselves.
"""
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from lab.ablation.stats import paired_difference
from lab.ablation.tables import listed, mean_sd, plus_minus
from lab.tables import Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results'
SERVERS = {'nanokv': 'nanoKV, float32', 'nanokv bfloat16': 'nanoKV, bfloat16',
           'nanokv int8': 'nanoKV, int8',
           'vllm float32': 'vLLM, float32', 'vllm bfloat16': 'vLLM, bfloat16',
           'llama.cpp': 'llama.cpp, float16'}
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
     'vanilla GPT-2', 'vanilla float32', 'tokens_per_second'),
    ('against-vllm', 0, '32 requests, 64 prompt and 64 new tokens each', 'int8, bfloat16',
     'vLLM, the same model', 'vllm', 'tokens_per_second'),
    ('against-vllm-prefill', 3, 'a new prompt of 4,096 tokens', 'int8, bfloat16',
     'vLLM, the same model', 'vllm', 'tokens_per_second')]


# -- rows ------------------------------------------------------------------------------------------

def load(name: str) -> dict:
    return json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))


def cells(name: str) -> list[dict]:
    """The cells of a benchmark in results/cpu/."""
    return load(f'cpu/{name}')['cells']


def rows_of(ladder: str) -> dict[str, dict]:
    """{name: row} of a ladder, in its order."""
    return {row['name']: row for row in load(f'{ladder}/results')['rows']}


def kv_bytes() -> list[dict]:
    found = [load(f'kv/gpt2_mqa_local-T{T}') for T in (1024, 8192)]
    vanilla = [{'kv_bytes': each['bfloat16']['kv_bytes_vanilla'], 'kv_ratio_bf16': 1,
                'fit': each['bfloat16']['fit_vanilla']} for each in found]
    named = {'vanilla GPT-2, bfloat16': vanilla}
    named['with three techniques of Gemma 4, bfloat16'] = [
        load(f'kv/gemma_shaped-T{T}')['bfloat16'] for T in (1024, 8192)]
    for dtype in ('bfloat16', 'int8'):
        named[f'`config/train_gpt2_mqa_local.py`, {dtype}'] = [each[dtype] for each in found]
    return [dict(name=name, short=short, long=long) for name, (short, long) in named.items()]


def pilot() -> list[dict]:
    """The ladder's rows at the largest budget, each with itself at all of them."""
    budgets = {str(tokens): rows_of(f'pilot_{tokens}') for tokens in (2, 8, 20)}
    return [row | {'at': {tokens: rows[name] for tokens, rows in budgets.items()}}
            for name, row in budgets['20'].items() if not row['side']]


def speeds() -> list[dict]:
    trained = load('cpu/train-against-nanogpt-avx512-bf16')
    theirs, ratio = trained['nanogpt_tokens_per_second'], trained['faster']['median']
    rows = [dict(work='training of vanilla GPT-2: 6 layers of 384, T=512, B=4',
                 dtypes='bfloat16, bfloat16', ours=f"{trained['tokens_per_second']:,.0f} tokens/s",
                 theirs=f'nanoGPT, the same model: {theirs:,.0f} tokens/s', ratio=ratio)]
    for file, k, work, dtypes, other, side, metric in SPEEDS:
        cell = cells(file)[k]
        ours, theirs = (cell['sides'][name][metric]['median'] for name in ('ours', side))
        form = '{:.1f} ms/token' if metric == 'tpot_ms' else '{:,.0f} tokens/s'
        rows.append(dict(work=work, dtypes=dtypes, ours=form.format(ours),
                         theirs=f'{other}: {form.format(theirs)}',
                         ratio=cell['ratios']['tokens_per_second'][side]['median']))
    return rows


def replays() -> list[dict]:
    """The results of replays, with the name of the server and its dtype."""
    found = []
    for line in (RESULTS / 'sessions/replay.jsonl').read_text(encoding='utf-8').splitlines():
        each = json.loads(line)
        dtype = each['more'].rpartition('=')[2]
        found.append(each | {'name': SERVERS[f"{each['server']} {dtype}".strip()]})

    def place(each):
        by_memory = -each['kv'] if each['users'] else 0
        return each['trace'], by_memory, list(SERVERS.values()).index(each['name']), each['kv']

    return sorted(found, key=place)


# -- cells -----------------------------------------------------------------------------------------

def ms(key: str, name: str):
    return lambda row: f'{1000 * row[key][name]:,.1f}'


def mega(key: str, form: str):
    return lambda row: format(row[key] / 1e6, form)


def against(name: str):
    return lambda row: plus_minus(row.get(f'against_{name}'))


def at(tokens: int, kind: str):
    return lambda row: against(kind)(row['at'][str(tokens)])


def far_back(row: dict) -> float:
    """Mean loss of the identifiers that local layers cannot reach, over the seeds."""
    return statistics.fmean(row['identifiers']['nats_beyond'].values())


def kept(row: dict) -> str:
    """The share of the baseline's gain from long memory that a row keeps, with its 95% interval."""
    shares = dict(enumerate(row['identifiers']['kept']['each']))
    found = paired_difference(shares, dict.fromkeys(shares, 0.0))
    return f"{100 * found['mean']:.0f}% ±{100 * found['half_95']:.0f}"


TABLES = {
    'kv-bytes': (kv_bytes, {
        "GPT-2's shape, one sequence": '{name}',
        'bytes, T=1,024': '{short[kv_bytes]:,}', 'smaller, T=1,024': '{short[kv_ratio_bf16]:.0f}x',
        'bytes, T=8,192': '{long[kv_bytes]:,}', 'smaller, T=8,192': '{long[kv_ratio_bf16]:.0f}x',
        'sequences in 1 GB, T=8,192': '{long[fit]}'}),
    'ladder': (lambda: [row for row in rows_of('ablate_prices').values() if not row['side']], {
        'row': '{name}', 'parameters': lambda row: f"{row['params'] / 1e6:.2f}M",
        'KV bytes': lambda row: f"{row['kv']['bytes_per_token'] * row['kv']['T']:,.0f}",
        'times smaller': '{kv[smaller]:.1f}x',
        'validation loss': '{val_loss[mean]:.4f} ({val_loss[sd]:.4f})',
        'loss minus that of the row above': against('above'),
        'loss minus that of `+ qk_norm`': against('baseline')}),
    'mechanisms': (lambda: [row for row in rows_of('ablate_prices').values()
                            if row['side'] and len(row['seeds']) == 8], {
        'mechanism': '{name}', 'added to': '`{above}`',
        'KV bytes/token': '{kv[bytes_per_token]:,.0f}', 'times smaller': '{kv[smaller]:.0f}x',
        'price in nats (8 seeds)': against('above')}),
    'source-code': (lambda: [row for row in rows_of('ablate_pysource').values()
                             if len(row['seeds']) == 4], {
        'row': '{name}', 'KV bytes/token': '{kv[bytes_per_token]:,.0f}',
        'minus the row above, or that it departs from': against('above'),
        'minus `+ key offset`': against('baseline'),
        'nats of a name from far back': lambda row: f'{far_back(row):.2f}',
        'of the gain kept': kept}),
    'pilot': (pilot, {
        'row': '{name}', 'KV bytes/token': '{kv[bytes_per_token]:,.0f}',
        'loss at 20': '{val_loss[mean]:.3f}', **{
            f'minus {words}, at {tokens}': at(tokens, kind)
            for kind, words in (('baseline', 'baseline'), ('above', 'the row above'))
            for tokens in (2, 8, 20)}}),
    'lookup': (lambda: rows_of('ablate_lookup').values(), {
        'row': '{name}', 'KV bytes': '{lookup[kv_bytes]:,}', 'right of 64 facts, % (sd)':
        lambda row: mean_sd(row['lookup']['accuracy']['64'], '.1f', scale=100),
        'facts': lambda row: listed(row['lookup']['facts']), 'bytes a fact':
        lambda row: listed(f'{x:,.0f}' for x in row['lookup']['bytes_per_fact'] if x),
        '99% at step': lambda row: listed(row['lookup']['solved_at']),
        'seeds': lambda row: str(len(row['seeds']))}),
    'speed-table': (speeds, {'work': '{work}', 'dtypes': '{dtypes}', 'nanoKV': '{ours}',
                             'against': '{theirs}', 'ratio': '{ratio:.1f}x'}),
    'decode': (lambda: [cell | {'batch': batch} for batch in (1, 4, 16)
                        for cell in cells(f'decode-int8-b{batch}')], {
        'batch': '{batch}', 'context': '{context:,}',
        'full stack, per token': '{sides[ours][tpot_ms][median]:.1f} ms',
        'vanilla, per token': '{sides[vanilla float32][tpot_ms][median]:.1f} ms',
        'faster': '{ratios[tokens_per_second][vanilla float32][median]:.1f}x'}),
    'sessions-saturated': (lambda: [row for row in replays() if row['users']], {
        'trace': '`{trace}`', 'KV cache, MB': mega('kv', ',.0f'), 'server': '{name}',
        'tokens/s': '{tokens_per_second:,.0f}', 'computed': '{computed:,}',
        'recomputed': lambda row: f"{row['computed'] - row['unavoidable']:,}",
        'over unavoidable': '{over_unavoidable:.2f}', 'first token, ms: 50%': ms('ttft_s', 'p50'),
        '95%': ms('ttft_s', 'p95'), 'each further token': ms('tpot_s', 'p50')}),
    'sessions-open': (lambda: [row for row in replays() if not row['users']], {
        'server': '{name}', 'KV cache, MB': mega('kv', ',.0f'), 'computed': '{computed:,}',
        'first token, ms: 50%': ms('ttft_s', 'p50'), '95%': ms('ttft_s', 'p95'),
        '99%': ms('ttft_s', 'p99'), 'each further token': ms('tpot_s', 'p50'),
        'gaps, 99%': ms('gap_s', 'p99')}),
}


# -- what commands print ---------------------------------------------------------------------------

def printed(command: str, width: int = 120) -> str:
    """What `python COMMAND` prints, as a block of code."""
    out = subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True, text=True,
                         stdout=subprocess.PIPE).stdout
    lines = [textwrap.fill(line, width) if len(line) > width else line.rstrip()
             for line in out.strip().splitlines()]
    return '\n'.join(['```', *lines, '```'])


def account_report() -> str:
    configs = load('accounting/models')
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, 'config.json').write_text(json.dumps(configs['Gemma 3 4B']), encoding='utf-8')
        return printed(f'-m kv {folder} --max_seq_len=32768 --budget=24GB --like=nanokv',
                       width=100)


REPORTS = {
    'plan-report': lambda: printed(
        '-m kv config/train_gpt2_mqa_local.py --max_seq_len=8192 --budget=1GB'),
    'account-report': account_report,
}


def written(name: str) -> str:
    """The text of a block. KeyError: if there is none with this name."""
    if name in REPORTS:
        return REPORTS[name]()
    rows, columns = TABLES[name]
    return Table.of('', rows(), columns, left=tuple(columns)[:1]).markdown()
