"""Tables of a document made by bench.py, the same on the terminal and on the Markdown page.

    python -m lab.benchmarks.table results/cpu/*.json > results/cpu/README.md

A column is a format string of a row, which is a cell with one side: '{ms:,.1f}' of a summary is
'29.1 (28.8-31.0)', '{ms[median]:,.1f}' its median alone, and '{kv_bytes:,.2f/1e6}' is divided by a
million first. A column is empty in rows that lack its key, and left out if it is empty in all. A
title is a format string of the document.
"""
import json
import string
import sys
from pathlib import Path

from kv.console import output
from lab.tables import Table

INTRODUCTION = '''# Decoding and prefill, measured

Made by `python -m lab.benchmarks.table results/cpu/*.json` from the JSON files here, each of which
names the command that made it. In a run all sides are interleaved; ratios are medians over the
rounds, with the smallest and the largest. B: sequences; W: the window of local layers; TTFT and
TPOT: times to the first and per further output token.
'''
LEFT = ('side', 'model', 'policy', 'state', 'equal texts')
OURS = ('', 'vanilla', 'vanilla_float32', 'float32_kv', 'untrimmed')  # our engine runs both
WITHOUT_CACHE = ('recompute', 'kernels')  # modes

SIDE = {'B': '{batch:,}', 'side': '{side}'}
PROMPT = {'prompt': '{context:,}'} | SIDE
RATE = {'tokens/s': '{tokens_per_second[median]:,.1f}'}
WHOLE_RATE = {'tokens/s': '{tokens_per_second[median]:,.0f}'}
FASTER = {'ours faster, x': '{ratios[tokens_per_second]:.2f}'}  # than the side in the row
FASTER_TTFT = {'ours faster, x': '{ratios[ttft]:.2f}'}
POLICY = {'model': '{model}', 'T': '{context:,}', 'B': '{batch:,}', 'policy': '{side}'}
SECONDS = {'side': '{side}', 'seconds': '{seconds:.3f}'} | WHOLE_RATE | FASTER
REQUESTS = '{requests} requests of {shortest} to {longest} new tokens ({total:,} in all)'
VLLM = ', median (min-max); vLLM in {vllm_dtype}'

# kind of document (`kind_of`) -> its tables: title, where the rows come from (`rows_of`), columns
TABLES = {
    'decode': [
        ('sequences within {budget:,} bytes of K/V, allocated', 'capacity', {
            'context': '{context:,}', 'side': '{side}', 'sequences': '{sequences:,}',
            'bytes': '{kv_bytes:,}', 'with one more': '{kv_bytes_of_one_more:,}',
            'ours holds, x': '{times:.1f}'}),
        ('time per output token, median (min-max)', 'cells', {'context': '{context:,}'} | SIDE | {
            'TPOT, ms': '{tpot_ms:.1f}'} | RATE | FASTER),
        ('MB held, and read per step; share of the bandwidth measured in the same rounds', 'cells',
         {'context': '{context:,}'} | SIDE | {
            'K/V held': '{kv_bytes:,.2f/1e6}', 'K/V read': '{kv_read_bytes_per_step:,.2f/1e6}',
            'weights read': '{weight_read_bytes_per_step:,.2f/1e6}',
            'GB/s': '{read_bytes_per_second[median]:.1f/1e9}',
            'share, %': '{bandwidth_share:.0f/.01}'})],
    'prefill': [
        ('time to first token, median (min-max); prompts {pieces}', 'cells', PROMPT | {
            'TTFT, ms': '{ttft_ms:.1f}'} | WHOLE_RATE | {'K/V, MB': '{kv_bytes:,.2f/1e6}'}
            | FASTER_TTFT)],
    'prefill against vllm': [
        ('time to first token; again: with {message} tokens more, edited: the last 2% exchanged'
         + VLLM, 'cells', {'prompt': '{context:,}', 'state': '{prompt}'} | SECONDS)],
    'serve': [
        (REQUESTS + ', median (min-max)', 'cells', {
            'prompt': '{context:,}', 'rows': '{batch:,}', 'side': '{side}',
            'tokens/s': '{tokens_per_second:,.1f}', 'first token, ms': '{ttft_ms[median]:,.0f}',
            'K/V held, MB': '{kv_held_bytes:,.2f/1e6}'} | FASTER | {
            'equal texts': '{rows_equal} of {rows}'})],
    'serve against vllm': [
        (REQUESTS + VLLM, 'cells', {'prompt': '{context:,}', 'rows': '{rows}'} | SECONDS)],
    'recompute': [
        ("a training step by recomputation policy, median (min-max); 'time, x' is that of 'none'",
         'cells', POLICY | {'step, ms': '{step_ms:,.0f}'} | WHOLE_RATE | {
            'time, x': '{ratios[step_time]:.2f}'}),
        ("MB that it holds; 'saved' is of the activations of 'none'; gradients against those of "
         "'none'", 'cells', POLICY | {
            'activations': '{memory[activations]:,.0f/1e6}',
            'saved, %': '{activations_saved:.1f/.01}',
            'logits, loss': '{memory[loss_peak]:,.0f/1e6}', 'peak': '{memory[peak]:,.0f/1e6}',
            'allocator': '{memory[allocated_peak]:,.0f/1e6}',  # on CUDA
            'gradients off by': '{gradient_difference:.0e}'})],
    'kernels': [
        ('attention of one token a row, {heads[0]} query heads over {heads[1]} of {heads[2]}; '
         "share of a copy's {rates[copy_bytes_per_second]:,.0f/1e9} GB/s, error relative to the "
         'largest value', 'decode', {'keys': '{context:,}'} | SIDE | {
            'us': '{ms:,.1f/.001}', 'GB/s': '{bytes_per_second:,.0f/1e9}',
            'share, %': '{share:.0f/.01}', 'error': '{error:.0e}', 'failed': '{failed}'}),
        ('QK-norm, RoPE, int8, write and attention to 64 keys, one token a row', 'new key',
         SIDE | {'us': '{ms:,.1f/.001}'})],
}


class Column(string.Formatter):
    """str.format with summaries and divisors, as described above."""

    def format_field(self, value, form):
        if isinstance(value, dict):
            median, low, high = (self.format_field(value[key], form)
                                 for key in ('median', 'min', 'max'))
            return f'{median} ({low}-{high})'
        form, _, divisor = form.partition('/')
        return format(value / float(divisor) if divisor else value, form)

    def text(self, column: str, row: dict) -> str:
        try:
            return self.vformat(column, (), row)
        except (KeyError, TypeError):  # TypeError: the value is None
            return ''


def rows_of(document: dict, source: str) -> list[dict]:
    """The rows of a table: one for each side of each cell, with the ratios of that side only."""
    rows = []
    for cell in document.get('cells' if source == 'capacity' else source, ()):
        sides = cell.get('capacity', {}) if source == 'capacity' else cell['sides']
        for name, side in sides.items():
            row = cell | side | {'side': name}
            row['ratios'] = {key: each[name] for key, each in cell.get('ratios', {}).items()
                             if name in each}
            if source == 'capacity' and name != 'ours':
                row['times'] = sides['ours']['sequences'] / side['sequences']
            rows.append(row)
    return rows


def kind_of(document: dict) -> str:
    """The kind of a document; a mode or program of earlier versions has no tables."""
    other = document.get('against', '') not in OURS
    return f"{document['mode']} against {document['against']}" if other else document['mode']


def tables(document: dict) -> list[Table]:
    lengths, chunk = document.get('output_lengths') or [0], document.get('prefill_chunk')
    facts = document | {
        'shortest': min(lengths), 'longest': max(lengths), 'total': sum(lengths),
        'pieces': f'{chunk:,} tokens at a time' if chunk else 'in one piece'}
    found, formatter = [], Column()
    for title, source, columns in TABLES[kind_of(document)]:
        if rows := rows_of(document, source):
            cells = {heading: [formatter.text(column, row) for row in rows]
                     for heading, column in columns.items()}
            cells = {heading: texts for heading, texts in cells.items() if any(texts)}
            found.append(Table(formatter.text(title, facts), tuple(cells),
                               list(zip(*cells.values())), LEFT))
    return found


# -- the document ----------------------------------------------------------------------------------

def heading(document) -> list[str]:
    """Lines about rounds, hardware, versions, dtypes and models."""
    mode = document['mode']
    against = f" against {document['against']}" if document['against'] else ''
    steps = f" of {document['steps']} steps" if 'steps' in document else ''
    version = f", vllm {document['vllm']}" if 'vllm' in document else ''
    dtypes = (f"arithmetic {document['dtype']}" if mode in WITHOUT_CACHE else
              f"weights {document['dtype']}, K/V {document['kv_dtype']}")
    rounds = f"; {document['repeats']} rounds{steps}, after one to warm up"
    lines = [f'{mode}{against}' + ('' if mode == 'kernels' else rounds),
             f"{document['device']}, {document['threads']} threads; {document['processor']}",
             f"torch {document['torch']}{version}; {dtypes}"]
    lines += [f'{name}: {describe(model)}' for name, model in document['models'].items()]
    if 'bandwidth' in document:
        lines.append(Column().text('bandwidth: {bytes_per_second:.1f/1e9} GB/s, {kernel}',
                                   document['bandwidth']))
    return lines


def describe(model: dict) -> str:
    kv_heads = model['n_kv_head'] or model['n_head']
    sharing = f"/{model['kv_share']}" if model['kv_share'] else ''
    tied = ', G tied' if model['share_global_kv'] else ''
    return (f"{model['n_layer']} layers of {model['n_embd']}, {model['n_head']} heads "
            f"({kv_heads} K/V), {model['layer_pattern']}{sharing}{tied}, "
            f"W={model['window_size'] or '-'}, {model['pos_embedding']}, "
            f"{model['params'] / 1e6:,.1f}M params")


def show(document) -> None:
    """Print everything to standard output."""
    console = output()
    for line in heading(document):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for table in tables(document):
        table.print(console)


def section(name: str, document: dict) -> str:
    facts = (f'- {line}' for line in heading(document))
    lines = [f'## {name}', '', f"`{document['command']}`", '', *facts, '']
    for table in tables(document):
        lines += [table.title + ':', '', table.markdown(), '']
    return '\n'.join(lines)


def page(documents: dict[str, dict]) -> str:
    """Return the page in Markdown. documents: name of the file -> its document."""
    return '\n'.join([INTRODUCTION, *map(section, documents, documents.values())])


def read(path: str) -> dict:
    return json.loads(Path(path).read_text(encoding='utf-8-sig'))


def main(paths: list[str]):
    documents = {Path(path).stem: read(path) for path in paths}
    print(page({name: document for name, document in documents.items()
                if 'mode' in document and kind_of(document) in TABLES}), end='')


if __name__ == '__main__':
    main(sys.argv[1:])
