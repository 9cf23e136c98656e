"""Tables of a document that bench.py made, the same for the terminal and for the Markdown page."""
from rich.console import Console

from lab.tables import Table

FASTER = 'ours faster, x'  # column: speed of ours over that of the side in the row
PEERS = ('llama.cpp', 'ctranslate2')  # values of against: other inference engines for CPUs
PEER_FACTS = ('llama.cpp K/V', 'llama.cpp processor', 'ctranslate2 arithmetic')
WITHOUT_CACHE = ('lengths', 'recompute', 'kernels')  # modes


def spread(values: dict, form: str, factor: float = 1.0) -> str:
    """'29.1 (28.8-31.0)': median, min and max."""
    median, low, high = (format(values[key] * factor, form) for key in ('median', 'min', 'max'))
    return f'{median} ({low}-{high})'


def megabytes(n: float) -> str:
    """Decimal: 4_831_838_208 -> '4,831.84'."""
    return f'{n / 1e6:,.2f}'


# -- columns: functions of a cell, the name of a side, and the side -------------------------------

def context(cell, name, side):
    return f"{cell['context']:,}"


def batch(cell, name, side):
    return f"{side['batch']:,}"


def side_name(cell, name, side):
    return name


def equal_rows(cell, name, side):
    return f"{side['rows_equal']} of {side['rows']}" if 'rows' in side else ''


def spread_of(key: str, form: str, factor: float = 1.0):
    return lambda cell, name, side: spread(side[key], form, factor)


def median_of(key: str, form: str, factor: float = 1.0):
    return lambda cell, name, side: format(side[key]['median'] * factor, form)


def megabytes_of(key: str):
    return lambda cell, name, side: megabytes(side[key])


def faster(ratio: str):
    """How many times faster ours is than the side; empty for ours."""
    def column(cell, name, side):
        values = cell['ratios'][ratio].get(name)
        return spread(values, '.2f') if values else ''
    return column


CELL = {'context': context, 'B': batch, 'side': side_name}
PROMPT = {'prompt': context, 'B': batch, 'side': side_name}


def side_table(document, title: str, columns: dict, left=('side', 'equal rows', 'equal texts')):
    """A table with a row for each side of each cell. columns: heading -> function of both."""
    rows = [tuple(column(cell, name, side) for column in columns.values())
            for cell in document['cells'] for name, side in cell['sides'].items()]
    return Table(title, tuple(columns), rows, left)


# -- tables by mode --------------------------------------------------------------------------------

def decode_tables(document) -> list[Table]:
    if document['against'] in ('hf', 'nanogpt', *PEERS):
        return generation_tables(document)
    times = side_table(document, 'time per output token, median (min-max)', CELL | {
        'TPOT, ms': spread_of('tpot_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.1f'),
        FASTER: faster('tokens_per_second')})
    title = 'MB held, and read per step; share of the bandwidth measured in the same rounds'
    bytes_read = side_table(document, title, CELL | {
        'K/V held': megabytes_of('kv_bytes'), 'K/V read': megabytes_of('kv_read_bytes_per_step'),
        'weights read': megabytes_of('weight_read_bytes_per_step'),
        'GB/s': median_of('read_bytes_per_second', '.1f', 1e-9),
        'share, %': spread_of('bandwidth_share', '.0f', 100)})
    budgeted = [capacities(document)] if document['budget'] else []
    return budgeted + [times, bytes_read]


def capacities(document) -> Table:
    table = Table(f"sequences within {document['budget']:,} bytes of K/V, allocated",
                  ('context', 'side', 'sequences', 'bytes', 'with one more', 'ours holds, x'))
    for cell in document['cells']:
        ours = cell['capacity']['ours']['sequences']
        for name, fit in cell['capacity'].items():
            ratio = '' if name == 'ours' else f"{ours / fit['sequences']:.1f}"
            table.rows.append((f"{cell['context']:,}", name, f"{fit['sequences']:,}",
                               f"{fit['kv_bytes']:,}", f"{fit['kv_bytes_of_one_more']:,}", ratio))
    return table


def generation_tables(document) -> list[Table]:
    """Decoding against other programs; with the full stack, also its ratios."""
    starred = {'hf': 'the faster of its caches', 'llama.cpp': 'the fastest format',
               'ctranslate2': 'the faster format'}.get(document['against'])

    def name_and_star(cell, name, side):
        return name + '*' * (cell['fastest'] == name and len(cell['sides']) > 2)

    title = 'generations with the same weights and prompts, median (min-max)'
    tables = [side_table(document, title + (f'; *: {starred}' if starred else ''), PROMPT | {
        'side': name_and_star, 'TTFT, ms': median_of('ttft_ms', '.0f'),
        'TPOT, ms': spread_of('tpot_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.1f'),
        FASTER: faster('tokens_per_second'), 'equal rows': equal_rows})]
    if document['against'] in PEERS:
        table = Table('how many times faster the full stack is, median (min-max)',
                      ('prompt', 'B', 'side', 'tokens/s, x', 'TTFT, x'))
        for cell in document['cells']:
            for name, side in cell['sides'].items():
                if name != 'full stack':
                    ratios = cell['full_stack_ratios'].values()
                    table.rows.append((context(cell, name, side), batch(cell, name, side), name,
                                       *(spread(each[name], '.2f') for each in ratios)))
        tables.append(table)
    return tables


def prefill_tables(document) -> list[Table]:
    if document['against'] == 'vllm':
        title = (f"time to first token; again: with {document['message']} tokens more, "
                 'edited: the last 2% exchanged')
        return [vllm_table(document, title, 'past')]
    chunk = document['prefill_chunk']
    pieces = f'{chunk:,} tokens at a time' if chunk else 'in one piece'
    title = f'time to first token, median (min-max); prompts {pieces}'
    return [side_table(document, title, PROMPT | {
        'TTFT, ms': spread_of('ttft_ms', '.1f'), 'tokens/s': median_of('tokens_per_second', ',.0f'),
        'K/V, MB': megabytes_of('kv_bytes'), FASTER: faster('ttft')})]


def serve_tables(document) -> list[Table]:
    lengths = document['output_lengths']
    if document['against'] == 'vllm':
        title = f"{document['requests']} requests of {lengths[0]} to {lengths[-1]} new tokens"
        return [vllm_table(document, title, 'rows')]
    title = (f"{document['requests']} requests of {min(lengths)} to {max(lengths)} new tokens "
             f'({sum(lengths):,} in all), median (min-max)')
    return [side_table(document, title, {
        'prompt': context, 'rows': batch, 'side': side_name,
        'tokens/s': spread_of('tokens_per_second', ',.1f'),
        'first token, ms': median_of('ttft_ms', ',.0f'),
        'K/V held, MB': megabytes_of('kv_held_bytes'), FASTER: faster('tokens_per_second'),
        'equal texts': equal_rows})]


def vllm_table(document, title: str, second: str) -> Table:
    """second: heading of the second column, 'past' (kind of prompt) or 'rows'."""
    key = {'past': 'prompt', 'rows': 'rows'}[second]
    title = f"{title}, median (min-max); vLLM in {document['vllm_dtype']}"
    return side_table(document, title, {
        'prompt': context, second: lambda cell, name, side: str(cell[key]), 'side': side_name,
        'seconds': spread_of('seconds', '.3f'), 'tokens/s': median_of('tokens_per_second', ',.0f'),
        FASTER: faster('tokens_per_second')}, left=('past', 'side'))


def lengths_tables(document) -> list[Table]:
    title = f"a training step, median (min-max); recompute {document['recompute']}"
    return [side_table(document, title, {
        'T': context, 'B': batch, 'side': side_name, 'step, ms': spread_of('step_ms', ',.0f'),
        'tokens/s': median_of('tokens_per_second', ',.0f'),
        'model TFLOP/s': median_of('model_tflops_per_second', '.3f'),
        FASTER: faster('tokens_per_second')})]


def recompute_tables(document) -> list[Table]:
    def memory_of(key):
        return lambda cell, name, side: f"{(side['memory'].get(key) or 0) / 1e6:,.0f}"

    columns = {'model': lambda cell, name, side: cell['model'], 'T': context, 'B': batch,
               'policy': side_name}
    memory = columns | {
        'activations': memory_of('activations'),
        'saved, %': lambda cell, name, side: f"{100 * side['activations_saved']:.1f}",
        'logits, loss': memory_of('loss_peak'), 'peak': memory_of('peak')}
    if any(side['memory'].get('allocated_peak')
           for cell in document['cells'] for side in cell['sides'].values()):
        memory['allocator'] = memory_of('allocated_peak')  # on CUDA
    memory['gradients off by'] = lambda cell, name, side: f"{side['gradient_difference']:.0e}"
    left = ('model', 'policy')
    title = "a training step by recomputation policy, median (min-max); 'time, x' is that of 'none'"
    return [side_table(document, title, columns | {
                'step, ms': spread_of('step_ms', ',.0f'),
                'tokens/s': median_of('tokens_per_second', ',.0f'),
                'time, x': faster('step_time')}, left),
            side_table(document, "MB that it holds; 'saved' is of the activations of 'none'; "
                       "gradients against those of 'none'", memory, left)]


def kernel_tables(document) -> list[Table]:
    H, n_kv_head, D = document['heads']
    rate = document['rates']['copy_bytes_per_second']
    shape = f'{H} query heads over {n_kv_head} of {D}'
    decode = Table(f"attention of one token a row, {shape}; share of a copy's "
                   f'{rate / 1e9:,.0f} GB/s, error relative to the largest value',
                   ('keys', 'B', 'side', 'us', 'GB/s', 'share, %', 'error'))
    training = Table(f"attention of one sequence, {shape}, W={document['window_size']}",
                     ('T', 'side', 'forward, us', 'and backward, us'))
    write = Table('QK-norm, RoPE, int8 and write, one token a row', ('B', 'side', 'us'))
    for cell in document['decode']:
        for name, side in cell['sides'].items():
            values = ('', '', '', side['failed']) if 'failed' in side else (
                spread(side['ms'], ',.1f', 1000), f"{side['bytes_per_second'] / 1e9:,.0f}",
                f"{side['share'] * 100:.0f}", f"{side['error']:.0e}")
            decode.rows.append((f"{cell['context']:,}", f"{cell['batch']:,}", name, *values))
    for cell in document['training']:
        for name, side in cell['sides'].items():
            values = ('', side['failed']) if 'failed' in side else (
                spread(side['forward_ms'], ',.0f', 1000), spread(side['ms'], ',.0f', 1000))
            training.rows.append((f"{cell['context']:,}", name, *values))
    for cell in document['write']:
        write.rows += [(f"{cell['batch']:,}", name, spread(side['ms'], ',.1f', 1000))
                       for name, side in cell['sides'].items()]
    return [decode, training, write]


def chat_tables(document) -> list[Table]:
    pruned = {True: 'pruned', False: 'all kept'}
    workload = Table(f"{document['requests']:,} requests of {document['dialogues']:,} dialogues of "
                     f"up to {document['longest']:,} tokens",
                     ('page', 'local parts', 'of the bytes, %', 'tokens found, %',
                      'computed a request', 'of', 'MB a dialogue', 'evicted'),
                     left=('local parts',))
    for cell in document['workload']:
        workload.rows.append((
            str(cell['page_size']), pruned[cell['prune']], str(cell['share']),
            f"{100 * cell['hit_rate']:.1f}", f"{cell['computed_per_request']:,.0f}",
            f"{cell['prompt_tokens_per_request']:,.0f}",
            megabytes(cell['held_nbytes'] / cell['dialogues']), f"{cell['evicted']:,}"))
    size = Table('bytes kept of one dialogue, everything included, against vanilla GPT-2 in '
                 'bfloat16',
                 ('page', 'local parts', 'tokens', 'messages', 'MB', 'vanilla, MB', 'smaller, x'),
                 left=('local parts',))
    for cell in document['bytes']:
        size.rows.append((
            str(cell['page_size']), pruned[cell['prune']], f"{cell['tokens']:,}",
            str(cell['messages']), megabytes(cell['held_nbytes']),
            megabytes(cell['vanilla_nbytes']), f"{cell['smaller']:.1f}"))

    def cached(cell, name, side):
        return f"{cell['n_cached']:,}" if name == 'ours' else ''
    title = (f"time to the first token of a message of {document['message']} tokens, "
             'median (min-max)')
    first = side_table(document, title, {
        'past': context, 'side': side_name, 'found': cached,
        'TTFT, ms': spread_of('ttft_ms', ',.1f'), FASTER: faster('ttft')})
    return [workload, size, first]


TABLES = {'decode': decode_tables, 'prefill': prefill_tables, 'serve': serve_tables,
          'lengths': lengths_tables, 'recompute': recompute_tables, 'kernels': kernel_tables,
          'chat': chat_tables}


# -- the document ----------------------------------------------------------------------------------

def heading(document) -> list[str]:
    """Lines on rounds, hardware, versions, dtypes and models."""
    mode = document['mode']
    against = f" against {document['against']}" if document['against'] else ''
    steps = f" of {document['steps']} steps" if 'steps' in document else ''
    rounds = f"; {document['repeats']} rounds{steps}, after one to warm up"
    versions = ''.join(f', {name} {document[name]}'
                       for name in ('transformers', *PEERS, 'vllm') if name in document)
    if mode in WITHOUT_CACHE:
        dtypes = f"arithmetic {document['dtype']}"
    else:
        dtypes = f"weights {document['dtype']}, K/V {document['kv_dtype']}"
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
    """A model in a line: layers, heads, pattern, window, positions, parameters."""
    kv_heads = model['n_kv_head'] or model['n_head']
    sharing = f"/{model['kv_share']}" if model['kv_share'] else ''
    tied = ', G tied' if model['share_global_kv'] else ''
    return (f"{model['n_layer']} layers of {model['n_embd']}, {model['n_head']} heads "
            f"({kv_heads} K/V), {model['layer_pattern']}{sharing}{tied}, "
            f"W={model['window_size'] or '-'}, {model['pos_embedding']}, "
            f"{model['params'] / 1e6:,.1f}M params")


def show(document) -> None:
    """Everything on standard output, 100 columns wide where that is not a terminal."""
    console = Console()
    console = console if console.is_terminal else Console(width=100)
    for line in heading(document):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for table in TABLES[document['mode']](document):
        table.print(console)
