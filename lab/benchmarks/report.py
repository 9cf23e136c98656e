"""Tables of a document made by bench.py, the same on the terminal and on the Markdown page.

A column is a format string of a row, which is a cell with one side: '{ms:,.1f}' of a summary is
'29.1 (28.8-31.0)', '{ms[median]:,.1f}' its median alone, and '{kv_bytes:,.2f/1e6}' is divided by a
million first. A column whose key the row lacks is empty.
"""
import string

from kv.console import output
from lab.tables import Table

CPU_ENGINES = ('llama.cpp', 'ctranslate2')  # values of against: other inference engines for CPUs
PEER_FACTS = ('llama.cpp K/V', 'llama.cpp processor', 'ctranslate2 arithmetic')
STARS = {'hf': '; *: the faster of its caches', 'llama.cpp': '; *: the fastest format',
         'ctranslate2': '; *: the faster format'}
WITHOUT_CACHE = ('lengths', 'recompute', 'kernels')  # modes


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
        except KeyError:
            return ''


SIDE = {'B': '{batch:,}', 'side': '{side}'}
PROMPT = {'prompt': '{context:,}'} | SIDE
RATE = '{tokens_per_second[median]:,.1f}'
WHOLE_RATE = '{tokens_per_second[median]:,.0f}'
FASTER = {'ours faster, x': '{ratios[tokens_per_second]:.2f}'}  # than the side in the row
FASTER_TTFT = {'ours faster, x': '{ratios[ttft]:.2f}'}
EQUAL_ROWS = '{rows_equal} of {rows}'


def rows_of(cells, sides: str = 'sides') -> list[dict]:
    """A row for each side of each cell, with the ratios of that side only."""
    rows = []
    for cell in cells:
        for name, side in cell[sides].items():
            ratios = {key: {kind: each[name] for kind, each in cell.get(key, {}).items()
                            if name in each} for key in ('ratios', 'full_stack_ratios')}
            rows.append(cell | side | {'side': name} | ratios)
    return rows


def make_table(title: str, rows, columns: dict, left=('side', 'equal rows', 'equal texts')):
    """columns: heading -> format string."""
    formatter = Column()
    cells = [tuple(formatter.text(column, row) for column in columns.values()) for row in rows]
    return Table(title, tuple(columns), cells, left)


# -- tables by mode --------------------------------------------------------------------------------

def decode_tables(document) -> list[Table]:
    if document['against'] in ('hf', 'nanogpt', *CPU_ENGINES):
        return generation_tables(document)
    rows, tables = rows_of(document['cells']), []
    cell = {'context': '{context:,}'} | SIDE
    if document['budget']:
        fits = rows_of(document['cells'], 'capacity')
        for row in fits:
            if row['side'] != 'ours':
                row['times'] = row['capacity']['ours']['sequences'] / row['sequences']
        title = f"sequences within {document['budget']:,} bytes of K/V, allocated"
        tables.append(make_table(title, fits, {
            'context': '{context:,}', 'side': '{side}', 'sequences': '{sequences:,}',
            'bytes': '{kv_bytes:,}', 'with one more': '{kv_bytes_of_one_more:,}',
            'ours holds, x': '{times:.1f}'}))
    tables.append(make_table('time per output token, median (min-max)', rows, cell | {
        'TPOT, ms': '{tpot_ms:.1f}', 'tokens/s': RATE} | FASTER))
    title = 'MB held, and read per step; share of the bandwidth measured in the same rounds'
    return [*tables, make_table(title, rows, cell | {
        'K/V held': '{kv_bytes:,.2f/1e6}', 'K/V read': '{kv_read_bytes_per_step:,.2f/1e6}',
        'weights read': '{weight_read_bytes_per_step:,.2f/1e6}',
        'GB/s': '{read_bytes_per_second[median]:.1f/1e9}',
        'share, %': '{bandwidth_share:.0f/.01}'})]


def generation_tables(document) -> list[Table]:
    rows = rows_of(document['cells'])
    for row in rows:
        starred = row['fastest'] == row['side'] and len(row['sides']) > 2
        row['name'] = row['side'] + '*' * starred
    title = ('generations with the same weights and prompts, median (min-max)'
             + STARS.get(document['against'], ''))
    tables = [make_table(title, rows, PROMPT | {
        'side': '{name}', 'TTFT, ms': '{ttft_ms[median]:.0f}', 'TPOT, ms': '{tpot_ms:.1f}',
        'tokens/s': RATE} | FASTER | {'equal rows': EQUAL_ROWS})]
    if document['against'] in CPU_ENGINES:
        others = [row for row in rows if row['side'] != 'full stack']
        title = 'how many times faster the full stack is, median (min-max)'
        tables.append(make_table(title, others, PROMPT | {
            'tokens/s, x': '{full_stack_ratios[tokens_per_second]:.2f}',
            'TTFT, x': '{full_stack_ratios[ttft]:.2f}'}))
    return tables


def prefill_tables(document) -> list[Table]:
    if document['against'] == 'vllm':
        title = (f"time to first token; again: with {document['message']} tokens more, "
                 'edited: the last 2% exchanged')
        return [vllm_table(document, title, {'past': '{prompt}'})]
    chunk = document['prefill_chunk']
    pieces = f'{chunk:,} tokens at a time' if chunk else 'in one piece'
    title = f'time to first token, median (min-max); prompts {pieces}'
    return [make_table(title, rows_of(document['cells']), PROMPT | {
        'TTFT, ms': '{ttft_ms:.1f}', 'tokens/s': WHOLE_RATE, 'K/V, MB': '{kv_bytes:,.2f/1e6}'
        } | FASTER_TTFT)]


def serve_tables(document) -> list[Table]:
    lengths = document['output_lengths']
    if document['against'] == 'vllm':
        title = f"{document['requests']} requests of {lengths[0]} to {lengths[-1]} new tokens"
        return [vllm_table(document, title, {'rows': '{rows}'})]
    title = (f"{document['requests']} requests of {min(lengths)} to {max(lengths)} new tokens "
             f'({sum(lengths):,} in all), median (min-max)')
    return [make_table(title, rows_of(document['cells']), {
        'prompt': '{context:,}', 'rows': '{batch:,}', 'side': '{side}',
        'tokens/s': '{tokens_per_second:,.1f}', 'first token, ms': '{ttft_ms[median]:,.0f}',
        'K/V held, MB': '{kv_held_bytes:,.2f/1e6}'} | FASTER | {'equal texts': EQUAL_ROWS})]


def vllm_table(document, title: str, second: dict) -> Table:
    """second: the second column."""
    title = f"{title}, median (min-max); vLLM in {document['vllm_dtype']}"
    return make_table(title, rows_of(document['cells']), {'prompt': '{context:,}'} | second | {
        'side': '{side}', 'seconds': '{seconds:.3f}', 'tokens/s': WHOLE_RATE} | FASTER,
        left=('past', 'side'))


def lengths_tables(document) -> list[Table]:
    title = f"a training step, median (min-max); recompute {document['recompute']}"
    return [make_table(title, rows_of(document['cells']), {'T': '{context:,}'} | SIDE | {
        'step, ms': '{step_ms:,.0f}', 'tokens/s': WHOLE_RATE,
        'model TFLOP/s': '{model_tflops_per_second[median]:.3f}'} | FASTER)]


def recompute_tables(document) -> list[Table]:
    rows, left = rows_of(document['cells']), ('model', 'policy')
    columns = {'model': '{model}', 'T': '{context:,}', 'B': '{batch:,}', 'policy': '{side}'}
    memory = columns | {
        'activations': '{memory[activations]:,.0f/1e6}', 'saved, %': '{activations_saved:.1f/.01}',
        'logits, loss': '{memory[loss_peak]:,.0f/1e6}', 'peak': '{memory[peak]:,.0f/1e6}'}
    if any(row['memory'].get('allocated_peak') for row in rows):
        memory['allocator'] = '{memory[allocated_peak]:,.0f/1e6}'  # on CUDA
    memory['gradients off by'] = '{gradient_difference:.0e}'
    title = "a training step by recomputation policy, median (min-max); 'time, x' is that of 'none'"
    return [make_table(title, rows, columns | {
                'step, ms': '{step_ms:,.0f}', 'tokens/s': WHOLE_RATE,
                'time, x': '{ratios[step_time]:.2f}'}, left),
            make_table("MB that it holds; 'saved' is of the activations of 'none'; "
                       "gradients against those of 'none'", rows, memory, left)]


def kernel_tables(document) -> list[Table]:
    H, n_kv_head, D = document['heads']
    rate = document['rates']['copy_bytes_per_second']
    shape = f'{H} query heads over {n_kv_head} of {D}'
    title = (f"attention of one token a row, {shape}; share of a copy's {rate / 1e9:,.0f} GB/s, "
             'error relative to the largest value')
    decode, training = rows_of(document['decode']), rows_of(document['training'])
    for row in decode:  # a side that failed has its error in the last column
        row['last'] = row.get('failed') or f"{row['error']:.0e}"
    for row in training:
        row['last'] = row.get('failed') or Column().text('{ms:,.0f/.001}', row)
    return [
        make_table(title, decode, {'keys': '{context:,}'} | SIDE | {
            'us': '{ms:,.1f/.001}', 'GB/s': '{bytes_per_second:,.0f/1e9}',
            'share, %': '{share:.0f/.01}', 'error': '{last}'}),
        make_table(f"attention of one sequence, {shape}, W={document['window_size']}", training, {
            'T': '{context:,}', 'side': '{side}', 'forward, us': '{forward_ms:,.0f/.001}',
            'and backward, us': '{last}'}),
        make_table('QK-norm, RoPE, int8 and write, one token a row', rows_of(document['write']),
                   SIDE | {'us': '{ms:,.1f/.001}'})]


def chat_tables(document) -> list[Table]:
    sizes = [row | {'kept': 'anchors' if row['compact'] else 'all positions'}
             for row in document['bytes']]
    cells = rows_of(document['cells'])
    for row in cells:
        row['found'] = f"{row['n_cached']:,}" if row['side'] == 'ours' else ''
    first = f"time to the first token of a message of {document['message']} tokens"
    title = 'bytes kept of one dialogue, everything included, against vanilla GPT-2 in bfloat16'
    return [
        make_table(title, sizes, {
            'page': '{page_size}', 'kept': '{kept}', 'tokens': '{tokens:,}',
            'messages': '{messages}', 'MB': '{held_nbytes:,.2f/1e6}',
            'vanilla, MB': '{vanilla_nbytes:,.2f/1e6}', 'smaller, x': '{smaller:.1f}'}, ('kept',)),
        make_table(f'{first}, median (min-max)', cells, {
            'past': '{context:,}', 'side': '{side}', 'found': '{found}',
            'TTFT, ms': '{ttft_ms:,.1f}'} | FASTER_TTFT)]


TABLES = {'decode': decode_tables, 'prefill': prefill_tables, 'serve': serve_tables,
          'lengths': lengths_tables, 'recompute': recompute_tables, 'kernels': kernel_tables,
          'chat': chat_tables}


# -- the document ----------------------------------------------------------------------------------

def heading(document) -> list[str]:
    """Lines about rounds, hardware, versions, dtypes and models."""
    mode = document['mode']
    against = f" against {document['against']}" if document['against'] else ''
    steps = f" of {document['steps']} steps" if 'steps' in document else ''
    rounds = f"; {document['repeats']} rounds{steps}, after one to warm up"
    versions = ''.join(f', {name} {document[name]}'
                       for name in ('transformers', *CPU_ENGINES, 'vllm') if name in document)
    dtypes = (f"arithmetic {document['dtype']}" if mode in WITHOUT_CACHE else
              f"weights {document['dtype']}, K/V {document['kv_dtype']}")
    lines = [f'{mode}{against}' + ('' if mode == 'kernels' else rounds),
             f"{document['device']}, {document['threads']} threads; {document['processor']}",
             f"torch {document['torch']}{versions}; {dtypes}"]
    lines += [f'{name}: {document[name]}' for name in PEER_FACTS if name in document]
    lines += [f'{name}: {describe(model)}' for name, model in document['models'].items()]
    if 'bandwidth' in document:
        measured = document['bandwidth']
        rate = Column().format_field(measured['bytes_per_second'], '.1f/1e9')
        size = measured['buffer_bytes'] / 2 ** 20
        lines.append(f"bandwidth: {rate} GB/s, {measured['kernel']}, {size:,.0f} MiB of float32")
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
    for table in TABLES[document['mode']](document):
        table.print(console)
