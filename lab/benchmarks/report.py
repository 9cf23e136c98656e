"""Tables of a document made by bench.py, the same on the terminal and on the Markdown page."""
from operator import itemgetter


from kv.console import output
from lab.tables import Table

FASTER = 'ours faster, x'  # column: our speed divided by that of the side in the row
CPU_ENGINES = ('llama.cpp', 'ctranslate2')  # values of against: other inference engines for CPUs
PEER_FACTS = ('llama.cpp K/V', 'llama.cpp processor', 'ctranslate2 arithmetic')
WITHOUT_CACHE = ('lengths', 'recompute', 'kernels')  # modes


def spread(values: dict, form: str, factor: float = 1.0) -> str:
    """'29.1 (28.8-31.0)': median, min and max."""
    median, low, high = (format(values[key] * factor, form) for key in ('median', 'min', 'max'))
    return f'{median} ({low}-{high})'


def megabytes(n: float) -> str:
    """Decimal: 4_831_838_208 -> '4,831.84'."""
    return f'{n / 1e6:,.2f}'


# -- columns: functions of a row, which is a cell with one side and that side's name ---------------

def number(key: str, form: str = ',', factor: float = 1):
    return lambda row: format(row[key] * factor, form)


def spread_of(key: str, form: str, factor: float = 1.0):
    return lambda row: spread(row[key], form, factor)


def median_of(key: str, form: str):
    return lambda row: format(row[key]['median'], form)


def megabytes_of(key: str):
    return lambda row: megabytes(row[key])


def faster(ratio: str, ratios: str = 'ratios'):
    """Column: how many times faster ours is than the side; empty for ours."""
    def column(row):
        values = row[ratios][ratio].get(row['side'])
        return spread(values, '.2f') if values else ''
    return column


def equal_rows(row):
    return f"{row['rows_equal']} of {row['rows']}" if 'rows' in row else ''


def kept(row):
    return 'anchors' if row['compact'] else 'all positions'


SIDE = {'B': number('batch'), 'side': itemgetter('side')}
CELL = {'context': number('context')} | SIDE
KEYS = {'keys': number('context')} | SIDE
PROMPT = {'prompt': number('context')} | SIDE


def rows_of(cells, sides: str = 'sides') -> list[dict]:
    return [cell | side | {'side': name} for cell in cells for name, side in cell[sides].items()]


def make_table(title: str, rows, columns: dict, left=('side', 'equal rows', 'equal texts')):
    """columns: heading -> function of a row."""
    cells = [tuple(column(row) for column in columns.values()) for row in rows]
    return Table(title, tuple(columns), cells, left)


# -- tables by mode --------------------------------------------------------------------------------

def decode_tables(document) -> list[Table]:
    if document['against'] in ('hf', 'nanogpt', *CPU_ENGINES):
        return generation_tables(document)
    rows, tables = rows_of(document['cells']), []
    if document['budget']:
        fits = rows_of(document['cells'], 'capacity')
        title = f"sequences within {document['budget']:,} bytes of K/V, allocated"
        tables.append(make_table(title, fits, {
            'context': number('context'), 'side': itemgetter('side'),
            'sequences': number('sequences'), 'bytes': number('kv_bytes'),
            'with one more': number('kv_bytes_of_one_more'), 'ours holds, x': times_as_many}))
    tables.append(make_table('time per output token, median (min-max)', rows, CELL | {
        'TPOT, ms': spread_of('tpot_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.1f'),
        FASTER: faster('tokens_per_second')}))
    title = 'MB held, and read per step; share of the bandwidth measured in the same rounds'
    return [*tables, make_table(title, rows, CELL | {
        'K/V held': megabytes_of('kv_bytes'), 'K/V read': megabytes_of('kv_read_bytes_per_step'),
        'weights read': megabytes_of('weight_read_bytes_per_step'),
        'GB/s': lambda row: f"{row['read_bytes_per_second']['median'] / 1e9:.1f}",
        'share, %': spread_of('bandwidth_share', '.0f', 100)})]


def times_as_many(row):
    ours = row['capacity']['ours']['sequences']
    return '' if row['side'] == 'ours' else f"{ours / row['sequences']:.1f}"


def generation_tables(document) -> list[Table]:
    starred = {'hf': '; *: the faster of its caches', 'llama.cpp': '; *: the fastest format',
               'ctranslate2': '; *: the faster format'}.get(document['against'], '')

    def name_and_star(row):
        return row['side'] + '*' * (row['fastest'] == row['side'] and len(row['sides']) > 2)

    rows = rows_of(document['cells'])
    title = f'generations with the same weights and prompts, median (min-max){starred}'
    tables = [make_table(title, rows, PROMPT | {
        'side': name_and_star, 'TTFT, ms': median_of('ttft_ms', '.0f'),
        'TPOT, ms': spread_of('tpot_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.1f'),
        FASTER: faster('tokens_per_second'), 'equal rows': equal_rows})]
    if document['against'] in CPU_ENGINES:
        others = [row for row in rows if row['side'] != 'full stack']
        title = 'how many times faster the full stack is, median (min-max)'
        tables.append(make_table(title, others, PROMPT | {
            'tokens/s, x': faster('tokens_per_second', 'full_stack_ratios'),
            'TTFT, x': faster('ttft', 'full_stack_ratios')}))
    return tables


def prefill_tables(document) -> list[Table]:
    if document['against'] == 'vllm':
        title = (f"time to first token; again: with {document['message']} tokens more, "
                 'edited: the last 2% exchanged')
        return [vllm_table(document, title, 'past', 'prompt')]
    chunk = document['prefill_chunk']
    pieces = f'{chunk:,} tokens at a time' if chunk else 'in one piece'
    title = f'time to first token, median (min-max); prompts {pieces}'
    return [make_table(title, rows_of(document['cells']), PROMPT | {
        'TTFT, ms': spread_of('ttft_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.0f'),
        'K/V, MB': megabytes_of('kv_bytes'), FASTER: faster('ttft')})]


def serve_tables(document) -> list[Table]:
    lengths = document['output_lengths']
    if document['against'] == 'vllm':
        title = f"{document['requests']} requests of {lengths[0]} to {lengths[-1]} new tokens"
        return [vllm_table(document, title, 'rows', 'rows')]
    title = (f"{document['requests']} requests of {min(lengths)} to {max(lengths)} new tokens "
             f'({sum(lengths):,} in all), median (min-max)')
    return [make_table(title, rows_of(document['cells']), {
        'prompt': number('context'), 'rows': number('batch'), 'side': itemgetter('side'),
        'tokens/s': spread_of('tokens_per_second', ',.1f'),
        'first token, ms': median_of('ttft_ms', ',.0f'),
        'K/V held, MB': megabytes_of('kv_held_bytes'), FASTER: faster('tokens_per_second'),
        'equal texts': equal_rows})]


def vllm_table(document, title: str, second: str, key: str) -> Table:
    """second: heading of the second column, which shows `key` of the cell."""
    title = f"{title}, median (min-max); vLLM in {document['vllm_dtype']}"
    return make_table(title, rows_of(document['cells']), {
        'prompt': number('context'), second: lambda row: str(row[key]),
        'side': itemgetter('side'), 'seconds': spread_of('seconds', '.3f'),
        'tokens/s': median_of('tokens_per_second', ',.0f'),
        FASTER: faster('tokens_per_second')}, left=('past', 'side'))


def lengths_tables(document) -> list[Table]:
    title = f"a training step, median (min-max); recompute {document['recompute']}"
    return [make_table(title, rows_of(document['cells']), {'T': number('context')} | SIDE | {
        'step, ms': spread_of('step_ms', ',.0f'),
        'tokens/s': median_of('tokens_per_second', ',.0f'),
        'model TFLOP/s': median_of('model_tflops_per_second', '.3f'),
        FASTER: faster('tokens_per_second')})]


def recompute_tables(document) -> list[Table]:
    def memory_of(key):
        return lambda row: f"{(row['memory'].get(key) or 0) / 1e6:,.0f}"

    rows, left = rows_of(document['cells']), ('model', 'policy')
    columns = {'model': itemgetter('model'), 'T': number('context'), 'B': number('batch'),
               'policy': itemgetter('side')}
    memory = columns | {
        'activations': memory_of('activations'),
        'saved, %': number('activations_saved', '.1f', 100),
        'logits, loss': memory_of('loss_peak'), 'peak': memory_of('peak')}
    if any(row['memory'].get('allocated_peak') for row in rows):
        memory['allocator'] = memory_of('allocated_peak')  # on CUDA
    memory['gradients off by'] = number('gradient_difference', '.0e')
    title = "a training step by recomputation policy, median (min-max); 'time, x' is that of 'none'"
    return [make_table(title, rows, columns | {
                'step, ms': spread_of('step_ms', ',.0f'),
                'tokens/s': median_of('tokens_per_second', ',.0f'),
                'time, x': faster('step_time')}, left),
            make_table("MB that it holds; 'saved' is of the activations of 'none'; "
                       "gradients against those of 'none'", rows, memory, left)]


def kernel_tables(document) -> list[Table]:
    H, n_kv_head, D = document['heads']
    rate = document['rates']['copy_bytes_per_second']
    shape = f'{H} query heads over {n_kv_head} of {D}'
    title = (f"attention of one token a row, {shape}; share of a copy's {rate / 1e9:,.0f} GB/s, "
             'error relative to the largest value')

    def measured(columns: dict) -> dict:
        """Columns that are empty for a side that failed, with its error in the last one."""
        def unless_failed(column, else_key):
            return lambda row: row.get(else_key, '') if 'failed' in row else column(row)
        return {name: unless_failed(column, 'failed' if name == [*columns][-1] else '')
                for name, column in columns.items()}

    return [
        make_table(title, rows_of(document['decode']), KEYS | measured({
            'us': spread_of('ms', ',.1f', 1000), 'GB/s': number('bytes_per_second', ',.0f', 1e-9),
            'share, %': number('share', '.0f', 100), 'error': number('error', '.0e')})),
        make_table(f"attention of one sequence, {shape}, W={document['window_size']}",
                   rows_of(document['training']),
                   {'T': number('context'), 'side': itemgetter('side')} | measured({
                       'forward, us': spread_of('forward_ms', ',.0f', 1000),
                       'and backward, us': spread_of('ms', ',.0f', 1000)})),
        make_table('QK-norm, RoPE, int8 and write, one token a row', rows_of(document['write']),
                   SIDE | {'us': spread_of('ms', ',.1f', 1000)})]


def chat_tables(document) -> list[Table]:
    page = {'page': number('page_size', '')}
    first = f"time to the first token of a message of {document['message']} tokens"
    size = 'bytes kept of one dialogue, everything included, against vanilla GPT-2 in bfloat16'
    return [
        make_table(size, document['bytes'], page | {
            'kept': kept, 'tokens': number('tokens'), 'messages': number('messages', ''),
            'MB': megabytes_of('held_nbytes'), 'vanilla, MB': megabytes_of('vanilla_nbytes'),
            'smaller, x': number('smaller', '.1f')}, ('kept',)),
        make_table(f'{first}, median (min-max)', rows_of(document['cells']), {
            'past': number('context'), 'side': itemgetter('side'),
            'found': lambda row: f"{row['n_cached']:,}" if row['side'] == 'ours' else '',
            'TTFT, ms': spread_of('ttft_ms', ',.1f'), FASTER: faster('ttft')})]


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
        rate, size = measured['bytes_per_second'], measured['buffer_bytes'] / 2 ** 20
        lines.append(f"bandwidth: {spread(rate, '.1f', 1e-9)} GB/s, {measured['kernel']}, "
                     f'{size:,.0f} MiB of float32')
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
