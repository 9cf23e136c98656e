"""The measured numbers in README.md and docs/, written from the files under results/.

    python -m lab.quoted            # rewrite the blocks of all pages
    python -m lab.quoted --check    # only say which blocks are out of date; exit status 1 if any is

A block of a page is what stands between `<!-- begin NAME -->` and `<!-- end -->`. The function of
that name below returns its text, Markdown, so that no number in the documentation is typed by hand.
"""
import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from configurator import run_program
from kv import capacity
from lab.ablation.tables import plus_minus, short

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'results'
BLOCK = re.compile(r'^<!-- begin (\S+) -->\n(.*?)^<!-- end -->', re.DOTALL | re.MULTILINE)
BLOCKS = {}


def block(function):
    """Register a function as the block of its name, with hyphens for underscores."""
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
    """Median tokens per second of one model of a cell."""
    return cell['sides'][model]['tokens_per_second']['median']


def tpot(cell: dict, model: str) -> float:
    """Median milliseconds per output token."""
    return cell['sides'][model]['tpot_ms']['median']


def ratio(cell: dict, baseline: str, metric: str = 'tokens_per_second') -> float:
    """Median of the ratios by round: how many times the baseline's speed ours is."""
    return cell['ratios'][metric][baseline]['median']


def mean(row: dict) -> float:
    return row['val_loss']['mean']


def first_seed(row: dict) -> float:
    return row['val_loss']['each'][0]


def table(header: str, rows: list[str]) -> str:
    """A Markdown table; columns but the first are aligned to the right."""
    n_columns = header.count('|') - 1
    return '\n'.join([header, '|---|' + '---:|' * (n_columns - 1), *rows])


def prose(*paragraphs: str) -> str:
    """Paragraphs, wrapped."""
    filled = [textwrap.fill(' '.join(text.split()), 100, break_long_words=False,
                            break_on_hyphens=False) for text in paragraphs]
    return '\n\n'.join(filled)


# -- memory ----------------------------------------------------------------------------------------

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


@block
def demo_text() -> str:
    return '```\n' + demo()[0] + '```'


@block
def demo_report() -> str:
    minutes = re.search(r'(\d+ min \d+ s) in all', (RESULTS / 'demo/sample.txt').read_text())[1]
    return (f'```\n{demo()[1]}```\n\n'
            + prose(f'(2 cores of an AMD EPYC; all of `make demo`, installation included, took '
                    f'{minutes} there.)'))


def demo() -> list[str]:
    """The sampled text and the report that `make demo` printed."""
    printed = (RESULTS / 'demo' / 'sample.txt').read_text(encoding='utf-8')
    text = printed.split('---------------\n')[1].strip('\n') + '\n'
    return [text, re.search(r'KV cache, as allocated.*?weights \S+ .*?\n', printed, re.DOTALL)[0]]


@block
def plan_report() -> str:
    """What `python -m kv` prints for GPT-2's shape."""
    command = [sys.executable, '-m', 'kv', 'config/train_gpt2_mqa_local.py', '--max_seq_len=8192',
               '--budget=1GB']
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True,
                          env=os.environ | {'COLUMNS': '120'})
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return '```\n' + '\n'.join(lines) + '\n```'


@block
def capacity_example() -> str:
    """The worked example of docs/scaling.md: the command, and what it prints."""
    command = ('config/train_gpt2_mqa_local.py --n_layer=24 --n_head=32 --n_embd=2048 '
               '--head_dim=64 --mlp_hidden=0 --kv_dtype=int8 --context=4096 --hit_rate=0.95 '
               '--requests_per_second=20000 --tpot=50')
    config, *options = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        capacity.main([str(ROOT / config), *options])
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    wrapped = textwrap.fill(f'python -m kv.capacity {command}', 96, break_on_hyphens=False)
    shown = wrapped.replace('\n', ' \\\n  ')
    return f'```sh\n{shown}\n```\n\n```\n' + '\n'.join(lines) + '\n```'


@block
def vllm_kv() -> str:
    rows = []
    for T in (1024, 8192):
        found = load(f'vllm/kv-T{T}')
        vanilla, ours = (found[name]['bytes_per_request'] for name in ('vanilla', 'ours'))
        rows.append(f"| {T:,} | {vanilla:,} | {ours:,} | {found['smaller_bytes_per_request']:.1f}x "
                    f"| {found['ours']['planned']:,}, {found['smaller_planned']:.1f}x |")
    return table("| tokens | vanilla | ours | smaller | by the plan's arithmetic |", rows)


# -- what the savings cost -------------------------------------------------------------------------

@block
def ladder() -> str:
    return short(load('ablate_shakespeare/results')).markdown().strip()


@block
def ladder_findings() -> str:
    rows = rows_of('ablate_shakespeare')
    long = rows_of('ablate_long')
    full, baseline, wide = rows['+ int8 KV'], rows['+ qk_norm'], rows['+ wider heads and MLP']
    against = full['against_baseline']
    gap = first_seed(baseline) - first_seed(full)
    long_full, long_baseline = long['+ int8 KV'], long['RoPE + qk_norm MHA']
    muon, baseline_muon = first_seed(rows['Muon']), first_seed(rows['qk_norm, Muon'])
    low = first_seed(rows['vanilla GPT-2 at learning rate 0.0015'])
    window = plus_minus(rows['+ window']['against_above'])
    return prose(
        f"""The fair baseline is `+ qk_norm`: what vanilla GPT-2 lacks here is RoPE, not memory. The
        full stack has as many parameters as the baseline (those saved in K and V are spent on
        heads of 24 and a wider MLP), holds {full['kv']['smaller']:.0f} times fewer KV bytes than
        vanilla, and its loss cannot be told from the baseline's: {plus_minus(against)}, all three
        differences negative (p = 0.25).""",
        f"""Other learning rates (3e-3, 9e-3, seed 1) improve neither; vanilla GPT-2 alone improves
        at a lower one ({low:.3f} at 1.5e-3, seed 1). Trained five times as long
        ({long_full['tokens'] / 1e6:.1f}M tokens, seed 1) the full stack reaches
        {mean(long_full):.4f} and the baseline {mean(long_baseline):.4f}: the gap narrows from
        {gap:.3f} to {mean(long_baseline) - mean(long_full):.3f}, too small for one seed to tell.
        With Muon in place of AdamW the difference is {muon - baseline_muon:.4f} (seed 1 of both:
        {muon:.3f} and {baseline_muon:.3f}).""",
        f"""Below `+ qk_norm`, `+ window` differs from the row above it by more than its interval
        ({window}), and so does int8, by too little to matter
        ({rows['+ int8 KV']['against_above']['mean']:+.5f}). Among 40 intervals that may be chance.
        The loss of this text is flat beyond about 15 characters: it *cannot* show what a smaller
        memory costs. Recall can. (Full stack before int8: {mean(wide):.4f}.)""")


@block
def int8_loss() -> str:
    rows = rows_of('ablate_shakespeare')
    most = max(map(abs, rows['+ int8 KV']['against_above']['each']))
    added = rows['int8 weights']['against_above']['mean']
    return prose(
        f"""K and V in int8 (`--kv_dtype=int8`) change the loss of these models by at most
        {rounded_up(most)} nats, without training for it. Weights and activations in int8
        (`--weight_dtype=int8`) add {added:.5f} (three seeds).""")


def rounded_up(x: float) -> str:
    """To five decimals, never below `x`."""
    return f'{-(-x * 1e5 // 1) / 1e5:.5f}'


@block
def recall() -> str:
    rows = rows_of('ablate_recall')
    far = {name: 100 * row['recall']['accuracy']['47']['mean'] for name, row in rows.items()}
    tied_later = rows['tied at inference only']['recall']['accuracy']['47']['each']
    each = ', '.join(f'{100 * x:.0f}%' for x in tied_later)
    cost = rows_of('ablate_shakespeare')['tied at inference only']['against_above']
    reach = rows['+ int8 KV']['recall']['local_reach']
    return prose(
        f"""The task is to name a random token 47 positions back, where all ten local layers
        together reach {reach} (12 layers of 64, T=96, W=4, B=32, 400 steps, float32 on 2 CPU cores,
        three seeds; `make recall`). The baseline names {far['+ qk_norm']:.1f}% right, and so does
        every row from `+ MQA` to `+ int8 KV`; local layers alone {far['local layers only']:.1f}%
        (seed 1). The two global layers, and the one cache that they share, carry what windows
        cannot reach. Vanilla GPT-2 gets to {far['vanilla GPT-2']:.0f}% in these steps, with RoPE
        alone to {far['+ RoPE']:.0f}%.""",
        f"""Sharing caches only *after* training is a matter of luck: global K/V tied at inference
        name {each} right, by seed, and cost {cost['mean']:.3f} ±{cost['half_95']:.3f} nats on
        Shakespeare. Train with the memory that you will sample with.""")


@block
def layer_order() -> str:
    rows = rows_of('ablate_shakespeare')
    first, full = rows['global first: GLLLLL/ABBCCC'], rows['+ wider heads and MLP']
    return prose(
        f"""`LLLLLG`/`AABBBC` and `GLLLLL`/`ABBCCC` both recall everything, tied and (seed 1) untied.
        On Shakespeare they cannot be told apart: {mean(first):.4f} with the global layer first,
        {mean(full):.4f} with it last, difference {plus_minus(first['against_above'])} (three seeds).
        The default is `LLLLLG`: K and V of a tied layer 0 would be functions of single tokens.""")


@block
def muon() -> str:
    rows = rows_of('ablate_shakespeare')
    full, half, short_run = (rows[name] for name in ('Muon', 'Muon, 500 steps', 'Muon, 400 steps'))
    return prose(
        f"""In the Shakespeare ladder (full stack, 2.4M parameters, learning rate 6e-3, three seeds)
        AdamW reaches a loss of {mean(rows['+ wider heads and MLP']):.3f} in 1,000 steps; Muon
        reaches {mean(short_run):.3f} in 400 steps, {mean(half):.3f} in 500 and {mean(full):.3f} in
        1,000: it needs at most half the steps. On the baseline with full memory Muon reaches
        {first_seed(rows['qk_norm, Muon']):.3f}, AdamW {first_seed(rows['+ qk_norm']):.3f}
        (seed 1).""")


@block
def int8_matmuls() -> str:
    rows = rows_of('ablate_shakespeare')
    names = ('int8 products', 'int8 in training', '+ wider heads and MLP')
    products, kv_only, full = (first_seed(rows[name]) for name in names)
    return prose(
        f"""In the Shakespeare ladder, with seed 1, int8 matmuls and rounded K and V reach a loss of
        {products:.3f}, rounded K and V alone {kv_only:.3f}, and float32 {full:.3f}.""")


@block
def uptraining() -> str:
    rows = rows_of('ablate_shakespeare')
    to_mqa, to_all = (rows[f'uptrained to {name}'] for name in ('MQA', 'all but wider heads'))
    mqa, everything = (row['against_above']['mean'] for row in (to_mqa, to_all))
    share = to_mqa['iterations'] / to_mqa['recovery']['scratch']['iterations']
    return prose(
        f"""After {share:.0%} of the steps our small models are still {mqa:.3f} nats (MQA) and
        {everything:.3f} nats (all but wider heads) behind the same memory trained from scratch
        (seed 1, `results/ablate_shakespeare/recovery.png`).""")


@block
def contexts() -> str:
    lines = (RESULTS / 'demo' / 'contexts.jsonl').read_text(encoding='utf-8').splitlines()
    found = {(row['model'], row['context']): row['bits_per_byte'] for row in map(json.loads, lines)}
    demo_short, demo_long = (found['out-mqa-local', T] for T in (256, 8192))
    rope_short, rope_long = (found['out-rope-mha', T] for T in (256, 8192))
    return prose(
        f"""The demo model, trained on 256 characters, predicts held-out text as well with 8,192
        characters of context ({demo_long:.4f} bits per byte) as with 256 ({demo_short:.4f}). The
        same model with RoPE and all of the memory goes from {rope_short:.4f} to {rope_long:.4f}
        (one seed each, 60,000 characters; `make contexts`). So `chat.py` and `serve.py` allow
        models with RoPE and windows up to 32 times their `block_size`, at most 8,192 tokens.""")


# -- what they buy ---------------------------------------------------------------------------------

def decode_cells() -> dict[tuple[int, int], dict]:
    """(batch, context) -> cell of the int8 decode benchmarks."""
    return {(batch, cell['context']): cell for batch in (1, 4, 16)
            for cell in cells(f'decode-int8-b{batch}')}


@block
def speed_table() -> str:
    """README's: one row for each kind of work."""
    rows = []
    for batch, context in ((1, 1024), (1, 32768), (16, 4096)):
        cell = decode_cells()[batch, context]
        rows.append(f'| decode, batch {batch}, context {context:,} '
                    f"| {tpot(cell, 'ours'):.1f} ms/token "
                    f"| vanilla GPT-2, float32: {tpot(cell, 'vanilla float32'):.1f} ms "
                    f"| {ratio(cell, 'vanilla float32'):.1f}x |")
    [cell] = cells('decode-1GB')
    ours, vanilla = (cell['sides'][name]['batch'] for name in ('ours', 'vanilla float32'))
    rows.append(f"| decode in 1 GB of KV memory, context 4,096 | {ours:,} sequences, "
                f"{speed(cell, 'ours'):,.0f} tokens/s | vanilla GPT-2, float32: {vanilla} sequences, "
                f"{speed(cell, 'vanilla float32'):.0f} tokens/s "
                f"| {ratio(cell, 'vanilla float32'):.1f}x |")
    [_, cell] = cells('against-llama.cpp-int8-b1')
    rows.append(f"| vanilla GPT-2's weights, batch 1, context 900 | {tpot(cell, 'ours'):.1f} "
                f"ms/token | llama.cpp Q8_0: {tpot(cell, 'llama.cpp q8_0'):.1f} ms "
                f"| {ratio(cell, 'llama.cpp q8_0'):.1f}x |")
    [cell] = cells('against-vllm')
    rows.append(f"| 32 requests of 64 + 64 tokens | {speed(cell, 'ours'):,.0f} tokens/s "
                f"| vLLM, bfloat16: {speed(cell, 'vllm'):,.0f} tokens/s | {ratio(cell, 'vllm'):.1f}x |")
    return table('| work | nanoKV, int8 | against | faster |', rows)


@block
def decode() -> str:
    rows = [f"| {batch} | {context:,} | {tpot(cell, 'ours'):.1f} ms "
            f"| {tpot(cell, 'vanilla float32'):.1f} ms | {ratio(cell, 'vanilla float32'):.1f}x |"
            for (batch, context), cell in decode_cells().items()]
    return table('| batch | context | full stack, per token | vanilla, per token | faster |', rows)


@block
def budget() -> str:
    [cell] = cells('decode-1GB')
    ours, vanilla = (cell['sides'][name]['batch'] for name in ('ours', 'vanilla float32'))
    return prose(
        f"""1 GB of KV memory holds {ours:,} sequences of 4,096 tokens against {vanilla}, and together
        they make {ratio(cell, 'vanilla float32'):.1f} times the tokens per second
        ({speed(cell, 'ours'):,.0f} against {speed(cell, 'vanilla float32'):.1f}).""")


@block
def other_engines() -> str:
    [_, llama] = cells('against-llama.cpp-int8-b1')
    [llama_16] = cells('against-llama.cpp-int8-b16')
    [served], [served_bf16] = cells('against-vllm'), cells('against-vllm-bfloat16')
    prompts = {(cell['context'], cell['prompt']): cell for cell in cells('against-vllm-prefill')}
    ctranslate2 = [ratio(cell, 'ctranslate2 int8') for cell in cells('against-ctranslate2-int8')]
    hugging_face = [ratio(cell, cell['fastest']) for cell in cells('against-hf')]
    hf_dynamic = [ratio(cell, 'hf dynamic') for cell in cells('against-hf')]
    [nanogpt_cell] = cells('against-nanogpt')
    return '\n'.join([
        item(f"""**llama.cpp** (built for this machine; vanilla GPT-2 with the same weights, 900
             tokens before): {tpot(llama, 'ours'):.1f} ms per token in int8 at batch 1 against
             {tpot(llama, 'llama.cpp q8_0'):.1f} ms in its Q8_0; 16 sequences at once
             {ratio(llama_16, 'llama.cpp q8_0'):.1f} times its tokens per second. The full stack
             takes {tpot(llama, 'full stack'):.1f} ms."""),
        item(f"""**vLLM** (bfloat16, compiled; the full stack, exported): 32 requests of 64 + 64
             tokens are {ratio(served, 'vllm'):.1f} times as fast here in int8
             ({speed(served, 'ours'):,.0f} tokens per second against {speed(served, 'vllm'):,.0f}),
             {ratio(served_bf16, 'vllm'):.1f} times in bfloat16; prompts of 4,096 tokens
             {ratio(prompts[4096, 'cold'], 'vllm'):.1f} times; the first token after 4,096 cached
             ones comes {ratio(prompts[4096, 'again'], 'vllm'):.1f} times sooner."""),
        item(f"""**CTranslate2** in int8: {ctranslate2[0]:.1f} times its tokens per second at batch
             1, {ctranslate2[1]:.1f} times at 16."""),
        item(f"""**transformers** (float32, prompts of 960, Intel Xeon at 2.80 GHz, before the C++
             decode step): {hugging_face[0]:.1f} times the tokens per second of `generate` with its
             static cache at batch 1, {hugging_face[1]:.1f} at batch 16; with its default cache
             {hf_dynamic[0]:.1f} and {hf_dynamic[1]:.1f} times."""),
        item(f"""**nanoGPT** (same machine as transformers): its `generate` has no cache; ours is
             {ratio(nanogpt_cell, 'nanogpt'):.0f} times as fast at batch 1.""")])


def item(text: str) -> str:
    """A list item, wrapped."""
    return '- ' + textwrap.indent(prose(text), '  ')[2:]


@block
def batching() -> str:
    [cell] = cells('serve')
    return prose(
        f"""64 requests of 16 to 247 new tokens (prompts of 64, 16 rows, float32): continuous
        batching makes {ratio(cell, 'static'):.2f} times the tokens per second of static batches,
        and {ratio(cell, 'static engine'):.2f} times those of the same engine when it admits
        requests only to an empty batch. Every text is the same.""")


@block
def prefill() -> str:
    by_length = {cell['context']: speed(cell, 'ours') for cell in cells('prefill-int8')}
    return prose(f"""The full stack in int8 computes prompts of 1,024 tokens at
                 {by_length[1024]:,.0f} tokens per second, of 8,192 at {by_length[8192]:,.0f}.""")


@block
def conversations() -> str:
    chat = load('cpu/chat')
    [cell] = [cell for cell in chat['cells'] if cell['context'] == 8192]
    [held] = [row for row in chat['bytes'] if row['page_size'] == 64 and row['prune']]
    hits = {row['share']: row['hit_rate'] for row in chat['workload']
            if row['page_size'] == 64 and row['prune']}
    ttft = {name: model['ttft_ms']['median'] for name, model in cell['sides'].items()}
    rounds = cell['ratios']['ttft']['without a store']
    return prose(
        f"""With 8,192 tokens of history, a message of 20 tokens has its first token after
        {ttft['ours']:.0f} ms instead of {ttft['without a store'] / 1000:.1f} s (median of ratios
        {rounds['median']:.0f}, {rounds['min']:.0f} to {rounds['max']:.0f} in five rounds). The
        {held['held_nbytes'] / 1e6:.1f} MB that the prefix cache keeps for the conversation,
        everything included, are {held['smaller']:.0f} times less than vanilla's K/V in bfloat16
        (int8 K/V, blocks of 64, batch 1).""",
        f"""Of {chat['dialogues']} such dialogues ({chat['requests']} requests; edits, forks, users
        who leave and return) {hits[100]:.0%} of the prompt tokens are reused, {hits[50]:.0%} in half
        the memory, {hits[25]:.0%} in a quarter. Measured on 2 cores of an Intel Xeon at 2.80 GHz,
        before the C++ decode step.""")


# -- training --------------------------------------------------------------------------------------

@block
def recompute() -> str:
    by_model = {cell['model']: cell for cell in cells('recompute')}
    rows = []
    for policy in ('selective', 'mlp', 'block', 'sqrt'):
        texts = []
        for name in ('ours', 'vanilla'):
            cell = by_model[name]
            saved = cell['sides'][policy]['activations_saved']
            texts.append(f"{saved:.0%} | {ratio(cell, policy, 'step_time'):.2f}x")
        rows.append(f"| `{policy}` | {' | '.join(texts)} |")
    header = '| policy | full stack: saved | step time | vanilla: saved | step time |'
    whole, chunked = (by_model['ours']['sides'][name]['memory']['loss_peak'] / 1e6
                      for name in ('whole logits', 'none'))
    return table(header, rows) + '\n\n' + prose(
        f"""(GPT-2 124M's shape, batch 1, T=1,024, W=256, float32, 2 cores of an Intel Xeon at
        2.80 GHz, medians of 5 rounds; activations without logits; gradients are equal to the last
        bit. Single steps vary by a fifth on this machine, so differences of a few percent mean
        nothing.) Computing logits in chunks cuts the peak of the loss from {whole:.0f} to
        {chunked:.0f} MB.""")


@block
def lengths() -> str:
    found = {cell['context']: cell for cell in cells('lengths')}
    at = {T: ratio(cell, 'vanilla') for T, cell in found.items()}
    ours, vanilla = (speed(found[8192], name) for name in ('ours', 'vanilla'))
    return prose(
        f"""Local layers (W=256) save training time where sequences are long: the full stack trains
        at {at[8192]:.2f} times vanilla's tokens per second at T=8,192 (batch 1, {ours:.0f} against
        {vanilla:.0f}), {at[2048]:.2f} times at 2,048 and {at[1024]:.2f} times at 1,024. At 512 and
        256 neither is faster ({at[512]:.2f} and {at[256]:.2f} times). Float32, the same Xeon.""")


@block
def optimizers() -> str:
    found = load('cpu/optimizers')['optimizers']
    adamw, muon_row, eight, host = (found[name] for name in (
        'adamw', 'muon', 'adamw8bit', 'adamw, offload_optimizer'))
    states = [f"{row['state_bytes'] / 1e6:.0f}" for row in (adamw, muon_row, eight)]
    return prose(
        f"""Measured with GPT-2 124M's shape (float32, 2 cores of an AMD EPYC, batch 1, T=256, the
        third step): the state takes {states[0]}, {states[1]} and {states[2]} MB, and with AdamW on
        the host none ({host['host_bytes'] / 1e9:.2f} GB there); the update takes
        {1000 * adamw['update_seconds']:.0f} ms, {muon_row['update_seconds']:.1f} s (Muon's matmuls
        are meant for GPUs), {eight['update_seconds']:.1f} s (so is the 8-bit kernel) and
        {1000 * host['update_seconds']:.0f} ms.""")


@block
def loader() -> str:
    found = load('cpu/loader')
    shares = [row['share'] for row in found['alone'].values()]
    step = found['step']
    return prose(
        f"""With 10 GB of shards that are not in the page cache (2 cores of an AMD EPYC), a step of
        GPT-2 124M's shape (float32, B=1, T=1,024, {step['seconds']:.1f} s) waits
        {100 * step['share']:.3f}% of its time for its batch. A program that only asks for batches,
        {found['faster']} times as often, waits {100 * min(shares):.2f} to {100 * max(shares):.2f}%
        in any order. Reading all of the data once adds
        {found['memory']['growth_bytes'] / 1e6:.0f} MB to the process.""")


@block
def soak() -> str:
    found = load('cpu/soak')
    return prose(
        f"""`make soak` kills a training run {found['kills']} times,
        {found['kills_inside_checkpoint_writing']} of them while it writes a checkpoint, and
        compares it with one left alone: {found['rows_that_differ']} of {found['rows']} logged rows
        differ.""")


@block
def nanogpt() -> str:
    parts = {part: load(f'nanogpt/{part}') for part in ('curves', 'exchange', 'speed', 'recipe')}
    logits = max(parts['exchange'][writer]['max_logit_difference'] for writer in ('nanoGPT', 'ours'))
    times, recipe = parts['speed']['ratio'], parts['recipe']
    return prose(
        f"""Beside nanoGPT itself ({parts['speed']['nanogpt'][:7]}; its CPU recipe's shape: 4 layers,
        4 heads, width 128, B=12, T=64, float32, 2 CPU cores; `make nanogpt NANOGPT=FOLDER`), losses
        logged over {parts['curves']['steps']} steps with one seed agree to
        {parts['curves']['max_loss_difference']:.0e}, logits of exchanged checkpoints to
        {logits:.1e}, and greedy text past `block_size` is the same. Training makes
        {times['median']:.2f} times its tokens per second (median of {parts['speed']['rounds']}
        interleaved runs, {times['min']:.2f} to {times['max']:.2f}). The whole recipe ends at
        {recipe['ours']['val_loss']:.3f} nats per character here and at
        {recipe['nanoGPT']['val_loss']:.3f} there (whole validation split; batches differ once
        nanoGPT's evaluations have drawn from its generator).""")


@block
def rope_finetune() -> str:
    runs = [json.loads(path.read_text()) for path in (RESULTS / 'rope_finetune').glob('*.json')]
    loss = {run['run']: run['val_loss'] for run in runs}
    [changed] = [run for run in runs if run['run'] == 'into-rope']
    at_first = dict(map(tuple, changed['evaluations']))[2000]
    return prose(
        f"""The vanilla model reaches {loss['vanilla']:.3f} after 2,000 steps. Converted to RoPE its
        loss is {at_first:.2f} at first; after 1,000 further steps it is {loss['into-rope']:.3f},
        where vanilla trained for as long has {loss['vanilla-more']:.3f}, and at T=128 (B=6)
        {loss['into-rope-T128']:.3f}. RoPE from scratch for the same 3,000 steps has
        {loss['rope']:.3f} (T=128: {loss['rope-T128']:.3f}).""")


# -- the code --------------------------------------------------------------------------------------

CORE = [('kv/plan.py', 'which layers are local, which share a slot, and what that costs in bytes'),
        ('kv/slots.py', 'how a slot is stored: every position, or a ring of the last W'),
        ('kv/int8.py', 'int8 with one scale per position and head'),
        ('kv/cache.py', 'a step of the cache: `begin`, then `attend` in each layer, then `commit`'),
        ('attention/', 'causal and sliding-window attention, cached attention, RoPE'),
        ('model.py', "the GPT: nanoGPT's file with a plan"),
        ('generate.py', 'the generation loop and the sampler'),
        ('train.py', 'the training loop; `training/` has the parts'),
        ('sample.py', 'sampling, with the KV report')]


@block
def reading_path() -> str:
    rows = [f'| [`{name}`]({name}) | {round(n_lines(ROOT / name), -1)} | {what} |'
            for name, what in CORE]
    return table('| file | lines | what it says |', rows).replace('---:|---:|', '---:|---|')


def n_lines(path: Path) -> int:
    """Lines of a file, or of the Python files directly in a folder."""
    files = [path] if path.is_file() else sorted(path.glob('*.py'))
    return sum(len(file.read_text(encoding='utf-8').splitlines()) for file in files)


# -- pages -----------------------------------------------------------------------------------------

def pages() -> list[Path]:
    return [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]


def rewritten(text: str) -> str:
    """The page with its blocks as results/ has them. KeyError: no function makes such a block."""
    return BLOCK.sub(lambda m: f'<!-- begin {m[1]} -->\n{BLOCKS[m[1]]()}\n<!-- end -->', text)


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.quoted', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing')
    args = parser.parse_args(argv)
    stale = 0
    for page in pages():
        old = page.read_text(encoding='utf-8')
        new = rewritten(old)
        if new != old:
            stale += 1
            print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'rewritten'}")
            if not args.check:
                page.write_text(new, encoding='utf-8')
    raise SystemExit(1 if args.check and stale else 0)


if __name__ == '__main__':
    run_program(main)
