"""Blocks on KV bytes, the demo and the number of lines in the core."""
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from kv import capacity
from lab.pages.blocks import RESULTS, ROOT, block, load, prose, table


@block
def kv_bytes() -> str:
    found = {T: load(f'kv/gpt2_mqa_local-T{T}') for T in (1024, 8192)}
    vanilla = [f"{by_dtype['bfloat16']['kv_bytes_vanilla']:,} bytes" for by_dtype in found.values()]
    fit = found[8192]['bfloat16']['fit_vanilla']
    rows = [f"| vanilla GPT-2, bfloat16 | {' | '.join(vanilla)} | {fit} |"]
    names = {'bfloat16': '`config/train_gpt2_mqa_local.py`, bfloat16', 'int8': 'the same, int8'}
    for dtype, name in names.items():
        each = [by_dtype[dtype] for by_dtype in found.values()]
        texts = [f"{x['kv_bytes']:,} bytes, **{x['kv_ratio_bf16']:.0f}x** smaller" for x in each]
        rows.append(f"| {name} | {' | '.join(texts)} | {each[1]['fit']} |")
    return table("| GPT-2's shape, one sequence | T=1,024 | T=8,192 | sequences in 1 GB, T=8,192 |",
                 rows)


def verbatim(text: str) -> str:
    return '\n'.join(['```', *(line.rstrip() for line in text.splitlines()), '```'])


@block
def demo_text() -> str:
    return verbatim(demo()[0])


@block
def demo_before() -> str:
    return verbatim(demo('characters')[0])


@block
def demo_bits() -> str:
    bits = {name: f'{mean(each):.3f} ({stdev(each):.3f})' for name, each in demo_seeds_of().items()}
    return prose(f"""It predicts the held-out works with {bits['mqa_local']} bits per byte, mean
        (sd) of three seeds. The baseline with RoPE, qk_norm and all of the memory
        (`config/train_rope_mha.py`) reaches {bits['rope_mha']} in as many steps, vanilla GPT-2
        (`config/train_vanilla.py`) {bits['vanilla']}.""")


def demo_seeds_of() -> dict[str, list[float]]:
    """{config: bits per byte of each seed}"""
    lines = (RESULTS / 'demo' / 'seeds.jsonl').read_text(encoding='utf-8').splitlines()
    found = defaultdict(list)
    for row in map(json.loads, lines):
        found[row['model'].rpartition('/')[2].partition('-')[0]].append(row['bits_per_byte'])
    return found


@block
def demo_seeds() -> str:
    before = json.loads((RESULTS / 'demo' / 'before.jsonl').read_text(encoding='utf-8'))
    rows = [f"| `config/train_{name}.py` | {' | '.join(f'{bits:.3f}' for bits in each)} | "
            f'{mean(each):.3f} |' for name, each in demo_seeds_of().items()]
    return (table('| bits per byte of the held-out works | seed 1 | seed 2 | seed 3 | mean |', rows)
            + '\n\n' + prose(f"""The former demo, in the same time: {before['bits_per_byte']:.3f}
                             (one seed)."""))


@block
def demo_after() -> str:
    return verbatim(demo()[0])


@block
def page_cost() -> str:
    """CPU time per token of streams with cache events against streams without."""
    found = load('page/demo')
    one, of_16, all_64 = (found['cases'][name]['ratio'] - 1 for name in (
        '1 stream', '1 of 16 streams', '64 streams'))
    return prose(f"""What it costs, in the server's CPU time per token of the demo's model, where
        tokens are cheapest (float32, prompts of 20 tokens, 200 to 2,000 new ones;
        {found['processor']}, medians of {found['rounds']} rounds): a page that watches the only
        stream {one:+.1%}, one that watches one of 16 streams {of_16:+.1%}, 64 pages with a stream
        each {all_64:+.1%}. Single rounds differ by more than that. A page that is open and not
        generating has no connection, and costs nothing.""")


@block
def demo_report() -> str:
    minutes = re.search(r'(\d+ min \d+ s) in all', (RESULTS / 'demo/sample.txt').read_text())[1]
    return (verbatim(demo()[1]) + '\n\n'
            + prose(f'(2 cores of an AMD EPYC; all of `make demo`, installation included, took '
                    f'{minutes} there.)'))


def demo(name: str = 'sample') -> list[str]:
    """The beginnings of a sampled text and of the report, as printed by `make demo`."""
    printed = (RESULTS / 'demo' / f'{name}.txt').read_text(encoding='utf-8')
    text = '\n\n'.join(printed.split('---------------\n')[1].strip('\n').split('\n\n')[:4])
    report = re.search(r'KV cache, as allocated.*?smaller than vanilla .*?\n', printed, re.DOTALL)
    return [text, report[0]]


@block
def plan_report() -> str:
    """The output of `python -m kv` for GPT-2's shape."""
    command = [sys.executable, '-m', 'kv', 'config/train_gpt2_mqa_local.py', '--max_seq_len=8192',
               '--budget=1GB']
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True,
                          env=os.environ | {'COLUMNS': '120'})
    return verbatim(done.stdout.strip())


@block
def account_report() -> str:
    """The output of `python -m kv` for Gemma 3 4B's config.json."""
    configs = json.loads((ROOT / 'lab/scripts/kv_calculators.json').read_text(encoding='utf-8'))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, 'config.json').write_text(json.dumps(configs['Gemma 3 4B']), encoding='utf-8')
        command = [sys.executable, '-m', 'kv', folder, '--max_seq_len=32768', '--budget=24GB',
                   '--like=nanokv']
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True,
                              env=os.environ | {'COLUMNS': '100'})
    return verbatim('\n'.join(textwrap.fill(line, 100) if len(line) > 100 else line
                              for line in done.stdout.strip().splitlines()))


@block
def calculators() -> str:
    """What calculators say beside what transformers allocates."""
    found, rows = load('accounting/calculators'), []
    others = [name for name in found['versions'] if name != 'transformers']
    for row in found['rows']:
        cells = [f"{row['nanokv'] - row['allocated']:+,}".replace('+0', '0'),
                 *('-' if row[name] is None else f"{row[name] / row['allocated']:.2f}x"
                   for name in others)]
        rows.append(f"| {row['model']} | {row['tokens']:,} | {row['allocated']:,} | "
                    + ' | '.join(cells) + ' |')
    names = ' | '.join(f"{name} {found['versions'][name]}" for name in others)
    return table(f'| model | tokens | bytes allocated | ours, difference | {names} |', rows)


@block
def capacity_example() -> str:
    """The worked example in docs/scaling.md: the command and its output."""
    command = ('config/train_gpt2_mqa_local.py --n_layer=24 --n_head=32 --n_embd=2048 '
               '--head_dim=64 --mlp_hidden=0 --kv_dtype=int8 --context=4096 --hit_rate=0.95 '
               '--requests_per_second=20000 --tpot=50')
    config, *options = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        capacity.main([str(ROOT / config), *options])
    wrapped = textwrap.fill(f'python -m kv.capacity {command}', 96, break_on_hyphens=False)
    shown = wrapped.replace('\n', ' \\\n  ')
    return f'```sh\n{shown}\n```\n\n' + verbatim(printed.getvalue())


@block
def vllm_kv() -> str:
    rows = []
    for T in (1024, 8192):
        found = load(f'vllm/kv-T{T}')
        vanilla, ours = (found[name]['bytes_per_request'] for name in ('vanilla', 'ours'))
        rows.append(f"| {T:,} | {vanilla:,} | {ours:,} | {found['smaller_bytes_per_request']:.1f}x "
                    f"| {found['ours']['planned']:,}, {found['smaller_planned']:.1f}x |")
    return table("| tokens | vanilla | ours | smaller | by the plan's arithmetic |", rows)


CORE = [('kv/plan.py', 'which layers are local, which share a slot, and what that costs in bytes'),
        ('kv/slots.py', 'how a slot is stored: every position, or a ring of the last W'),
        ('kv/quantize.py', 'int8 and int4 with one scale per position and head'),
        ('kv/cache.py', 'a forward pass through the cache: append to a slot, attend'),
        ('attention/', 'causal and sliding-window attention, cached attention, RoPE'),
        ('model.py', "nanoGPT's model.py, with the KV plan"),
        ('generate.py', 'the generation loop and the sampler')]


@block
def reading_path() -> str:
    rows, total = [], 0
    for name, what in CORE:  # a file, or the Python files directly in a folder
        files = (ROOT / name).glob('*.py') if name.endswith('/') else [ROOT / name]
        n_lines = sum(len(file.read_text(encoding='utf-8').splitlines()) for file in files)
        rows.append(f'| [`{name}`]({name}) | {round(n_lines, -1)} | {what} |')
        total += n_lines
    rows.append(f'| all of these | {round(total, -1):,} | |')
    return table('| file | lines | what it says |', rows).replace('---:|---:|', '---:|---|')
