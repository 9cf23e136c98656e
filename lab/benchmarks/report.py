"""The figures of a document as tables: columns and rows of text, which the terminal and the Markdown page both show."""
from lab.benchmarks.grid import Grid

FASTER = 'ours faster, x'  # column: tokens/s of ours over those of the side in the row


def spread(figures: dict, form: str, factor: float = 1.0) -> str:
    """'29.1 (28.8-31.0)': median, min and max."""
    median, low, high = (format(figures[name] * factor, form) for name in ('median', 'min', 'max'))
    return f'{median} ({low}-{high})'


def megabytes(n: float) -> str:
    """Decimal ones: 4_831_838_208 -> '4,831.84'."""
    return f'{n / 1e6:,.2f}'


def each_side(document):
    """(cell, name of the side, its figures), in order."""
    for cell in document['cells']:
        for name, side in cell['sides'].items():
            yield cell, name, side


def faster(cell: dict, name: str, of: str) -> str:
    """How many times faster ours is than this side, as text; of ours itself, nothing."""
    ratio = cell['ratios'][of].get(name)
    return '' if ratio is None else spread(ratio, '.2f')


def times(document) -> Grid:
    """Of decoding."""
    grid = Grid('time per output token, median (min-max)', ('context', 'B', 'side', 'TPOT, ms', 'tokens/s', FASTER))
    for cell, name, side in each_side(document):
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, spread(side['tpot_ms'], '.1f'),
                          f"{side['tokens_per_second']['median']:,.1f}", faster(cell, name, 'tokens_per_second')))
    return grid


def bytes_read(document) -> Grid:
    """Of decoding."""
    grid = Grid('MB held, and read per step; share of the bandwidth measured in the same rounds',
                ('context', 'B', 'side', 'K/V held', 'K/V read', 'weights read', 'GB/s', 'share, %'))
    for cell, name, side in each_side(document):
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, megabytes(side['kv_bytes']),
                          megabytes(side['kv_read_bytes_per_step']), megabytes(side['weight_read_bytes_per_step']),
                          f"{side['read_bytes_per_second']['median'] / 1e9:.1f}", spread(side['bandwidth_share'], '.0f', 100)))
    return grid


def capacities(document) -> Grid:
    """Of decoding with a budget."""
    grid = Grid(f"sequences within {document['budget']:,} bytes of K/V, allocated",
                ('context', 'side', 'sequences', 'bytes', 'with one more', 'ours holds, x'))
    for cell in document['cells']:
        for name, found in cell['capacity'].items():
            more = '' if name == 'ours' else f"{cell['capacity']['ours']['sequences'] / found['sequences']:.1f}"
            grid.rows.append((f"{cell['context']:,}", name, f"{found['sequences']:,}", f"{found['kv_bytes']:,}",
                              f"{found['kv_bytes_of_one_more']:,}", more))
    return grid


def generations(document) -> Grid:
    """Of decoding against other programs."""
    stars = {'hf': 'the faster of its caches', 'llama.cpp': 'the fastest format', 'ctranslate2': 'the faster format'}
    star = f"; *: {stars[document['against']]}" if document['against'] in stars else ''
    grid = Grid(f'generations with the same weights and prompts, median (min-max){star}',
                ('prompt', 'B', 'side', 'TTFT, ms', 'TPOT, ms', 'tokens/s', FASTER, 'equal rows'),
                left=('side', 'equal rows'))
    for cell, name, side in each_side(document):
        fastest = '*' * (cell['fastest'] == name and len(cell['sides']) > 2)
        equal = f"{side['rows_equal']} of {side['rows']}" if 'rows' in side else ''
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name + fastest, f"{side['ttft_ms']['median']:.0f}",
                          spread(side['tpot_ms'], '.1f'), f"{side['tokens_per_second']['median']:,.1f}",
                          faster(cell, name, 'tokens_per_second'), equal))
    return grid


def full_stack_ratios(document) -> Grid:
    """Of decoding against engines for CPUs."""
    grid = Grid('how many times faster the full stack is, median (min-max)',
                ('prompt', 'B', 'side', 'tokens/s, x', 'TTFT, x'))
    for cell, name, side in each_side(document):
        if name != 'full stack':
            ratios = [spread(found[name], '.2f') for found in cell['full_stack_ratios'].values()]
            grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, *ratios))
    return grid


def prefills(document) -> Grid:
    """Of prompts."""
    chunk = document['prefill_chunk']
    pieces = f'{chunk:,} tokens at a time' if chunk else 'in one piece'
    grid = Grid(f'time to first token, median (min-max); prompts {pieces}',
                ('prompt', 'B', 'side', 'TTFT, ms', 'tokens/s', 'K/V, MB', FASTER))
    for cell, name, side in each_side(document):
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, spread(side['ttft_ms'], '.1f'),
                          f"{side['tokens_per_second']['median']:,.0f}", megabytes(side['kv_bytes']),
                          faster(cell, name, 'ttft')))
    return grid


def served(document) -> Grid:
    """Of serving requests."""
    lengths = document['output_lengths']
    grid = Grid(f"{document['requests']} requests of {min(lengths)} to {max(lengths)} new tokens ({sum(lengths):,} in all), "
                'median (min-max)',
                ('prompt', 'rows', 'side', 'tokens/s', 'first token, ms', 'K/V held, MB', FASTER, 'equal texts'),
                left=('side', 'equal texts'))
    for cell, name, side in each_side(document):
        equal = f"{side['rows_equal']} of {side['rows']}" if 'rows' in side else ''
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, spread(side['tokens_per_second'], ',.1f'),
                          f"{side['ttft_ms']['median']:,.0f}", megabytes(side['kv_held_bytes']),
                          faster(cell, name, 'tokens_per_second'), equal))
    return grid


def beside_vllm(document) -> list[Grid]:
    """Of requests, or prompts, to our engine and to vLLM."""
    what = f"time to first token; again: with {document['message']} tokens more, edited: the last 2% exchanged" \
        if 'message' in document else \
        f"{document['requests']} requests of {document['output_lengths'][0]} to {document['output_lengths'][-1]} new tokens"
    which = 'rows' if 'requests' in document else 'past'
    grid = Grid(f"{what}, median (min-max); vLLM in {document['vllm_dtype']}",
                ('prompt', which, 'side', 'seconds', 'tokens/s', FASTER), left=('past', 'side'))
    for cell, name, side in each_side(document):
        grid.rows.append((f"{cell['context']:,}", str(cell.get('prompt') or cell['rows']), name,
                          spread(side['seconds'], '.3f'), f"{side['tokens_per_second']['median']:,.0f}",
                          faster(cell, name, 'tokens_per_second')))
    return [grid]


def trained_lengths(document) -> Grid:
    """Of training steps by length."""
    grid = Grid(f"a training step, median (min-max); recompute {document['recompute']}",
                ('T', 'B', 'side', 'step, ms', 'tokens/s', 'model TFLOP/s', FASTER))
    for cell, name, side in each_side(document):
        grid.rows.append((f"{cell['context']:,}", f"{side['batch']:,}", name, spread(side['step_ms'], ',.0f'),
                          f"{side['tokens_per_second']['median']:,.0f}", f"{side['model_tflops_per_second']['median']:.3f}",
                          faster(cell, name, 'tokens_per_second')))
    return grid


def policies(document) -> list[Grid]:
    """Of training steps by recomputation policy."""
    cell_of = ('model', 'T', 'B', 'policy')
    times = Grid("a training step by recomputation policy, median (min-max); 'time, x' is that of 'none'",
                 (*cell_of, 'step, ms', 'tokens/s', 'time, x'), left=('model', 'policy'))
    on_cuda = any(side['memory'].get('allocated_peak') for _, _, side in each_side(document))
    memory = Grid("MB that it holds; 'saved' is of the activations of 'none'; gradients against those of 'none'",
                  (*cell_of, 'activations', 'saved, %', 'logits, loss', 'peak', *['allocator'] * on_cuda, 'gradients off by'),
                  left=('model', 'policy'))
    for cell, name, side in each_side(document):
        of, held = (cell['model'], f"{cell['context']:,}", f"{side['batch']:,}", name), side['memory']
        ratio = cell['ratios']['step_time'].get(name)
        times.rows.append((*of, spread(side['step_ms'], ',.0f'), f"{side['tokens_per_second']['median']:,.0f}",
                           spread(ratio, '.2f') if ratio else ''))
        memory.rows.append((*of, f"{held['activations'] / 1e6:,.0f}", f"{100 * side['activations_saved']:.1f}",
                            f"{held['loss_peak'] / 1e6:,.0f}", f"{held['peak'] / 1e6:,.0f}",
                            *[f"{(held.get('allocated_peak') or 0) / 1e6:,.0f}"] * on_cuda,
                            f"{side['gradient_difference']:.0e}"))
    return [times, memory]


def kernel_grids(document) -> list[Grid]:
    """Of the GPU kernels."""
    H, n_kv_head, D = document['heads']
    found, form = document['rates'], f'{H} query heads over {n_kv_head} of {D}'
    decode = Grid(f"attention of one token a row, {form}; share of a copy's {found['copy_bytes_per_second'] / 1e9:,.0f} GB/s, "
                  'error relative to the largest value', ('keys', 'B', 'side', 'us', 'GB/s', 'share, %', 'error'))
    training = Grid(f"attention of one sequence, {form}, W={document['window_size']}",
                    ('T', 'side', 'forward, us', 'and backward, us'))
    write = Grid('QK-norm, RoPE, int8 and write, one token a row', ('B', 'side', 'us'))
    for cell in document['decode']:
        for name, side in cell['sides'].items():
            figures = ('', '', '', side['failed']) if 'failed' in side else (
                spread(side['ms'], ',.1f', 1000), f"{side['bytes_per_second'] / 1e9:,.0f}", f"{side['share'] * 100:.0f}",
                f"{side['error']:.0e}")
            decode.rows.append((f"{cell['context']:,}", f"{cell['batch']:,}", name, *figures))
    for cell in document['training']:
        for name, side in cell['sides'].items():
            figures = [spread(side[key], ',.0f', 1000) for key in ('forward_ms', 'ms') if key in side] or ['', side['failed']]
            training.rows.append((f"{cell['context']:,}", name, *figures))
    for cell in document['write']:
        write.rows += [(f"{cell['batch']:,}", name, spread(side['ms'], ',.1f', 1000)) for name, side in cell['sides'].items()]
    return [decode, training, write]


def decode_grids(document) -> list[Grid]:
    if document['against'] in ('hf', 'nanogpt'):
        return [generations(document)]
    if document['against'] in PEERS:
        return [generations(document), full_stack_ratios(document)]
    budgeted = [capacities(document)] if document['budget'] else []
    return budgeted + [times(document), bytes_read(document)]


def chat_grids(document) -> list[Grid]:
    """Of conversations."""
    pruned = {True: 'pruned', False: 'all kept'}
    workload = Grid(f"{document['requests']:,} requests of {document['dialogues']:,} dialogues of up to "
                    f"{document['longest']:,} tokens",
                    ('page', 'local parts', 'of the bytes, %', 'tokens found, %', 'computed a request', 'of',
                     'MB a dialogue', 'evicted'), left=('local parts',))
    for cell in document['workload']:
        workload.rows.append((str(cell['page_size']), pruned[cell['prune']], str(cell['share']),
                              f"{100 * cell['hit_rate']:.1f}",
                              f"{cell['computed_per_request']:,.0f}", f"{cell['prompt_tokens_per_request']:,.0f}",
                              megabytes(cell['held_nbytes'] / cell['dialogues']), f"{cell['evicted']:,}"))
    size = Grid('bytes kept of one dialogue, everything included, against vanilla GPT-2 in bfloat16',
                ('page', 'local parts', 'tokens', 'messages', 'MB', 'vanilla, MB', 'smaller, x'), left=('local parts',))
    for cell in document['bytes']:
        size.rows.append((str(cell['page_size']), pruned[cell['prune']], f"{cell['tokens']:,}", str(cell['messages']),
                          megabytes(cell['held_nbytes']), megabytes(cell['vanilla_nbytes']), f"{cell['smaller']:.1f}"))
    first = Grid(f"time to the first token of a message of {document['message']} tokens, median (min-max)",
                 ('past', 'side', 'found', 'TTFT, ms', FASTER))
    for cell, name, side in each_side(document):
        first.rows.append((f"{cell['context']:,}", name, f"{cell['n_cached']:,}" if name == 'ours' else '',
                           spread(side['ttft_ms'], ',.1f'), faster(cell, name, 'ttft')))
    return [workload, size, first]


PEERS = ('llama.cpp', 'ctranslate2')  # of bench.py's against: engines for CPUs
PEER_FACTS = ('llama.cpp K/V', 'llama.cpp processor', 'ctranslate2 arithmetic')
WITHOUT_CACHE = ('lengths', 'recompute', 'kernels')  # modes

# mode -> document -> its tables
GRIDS = {'decode': decode_grids,
         'prefill': lambda document: beside_vllm(document) if document['against'] == 'vllm' else [prefills(document)],
         'serve': lambda document: beside_vllm(document) if document['against'] == 'vllm' else [served(document)],
         'lengths': lambda document: [trained_lengths(document)], 'recompute': policies, 'kernels': kernel_grids,
         'chat': chat_grids}


def heading(document) -> list[str]:
    """Lines on hardware, versions, dtypes, rounds and models."""
    against = f" against {document['against']}" if document['against'] else ''
    packages = ''.join(f', {name} {document[name]}' for name in ('transformers', *PEERS, 'vllm') if name in document)
    steps = f" of {document['steps']} steps" if 'steps' in document else ''
    kv = '' if document['mode'] in WITHOUT_CACHE else f", K/V {document['kv_dtype']}"
    rounds = '' if document['mode'] == 'kernels' else f"; {document['repeats']} rounds{steps}, after one to warm up"
    lines = [f"{document['mode']}{against}{rounds}",
             f"{document['device']}, {document['threads']} threads; {document['processor']}",
             f"torch {document['torch']}{packages}; {'arithmetic' if document['mode'] in WITHOUT_CACHE else 'weights'} "
             f"{document['dtype']}{kv}"]
    lines += [f'{name}: {document[name]}' for name in PEER_FACTS if name in document]
    lines += [f'{name}: {describe(model)}' for name, model in document['models'].items()]
    if 'bandwidth' in document:
        found = document['bandwidth']
        lines.append(f"bandwidth: {spread(found['bytes_per_second'], '.1f', 1e-9)} GB/s, {found['kernel']}, "
                     f"{found['buffer_bytes'] / 2 ** 20:,.0f} MiB of float32")
    return lines


def describe(model: dict) -> str:
    """A model in a line: shape, heads, layers that remember what, parameters."""
    kv_heads = model['n_kv_head'] or model['n_head']
    text = (f"{model['n_layer']} layers of {model['n_embd']}, {model['n_head']} heads ({kv_heads} K/V), "
            f"{model['layer_pattern']}")
    text += f"/{model['kv_share']}" * bool(model['kv_share']) + ', G tied' * model['share_global_kv']
    return text + f", W={model['window_size'] or '-'}, {model['pos_embedding']}, {model['params'] / 1e6:,.1f}M params"


def show(document) -> None:
    """Everything, to standard output; 100 columns are enough (and taken, where it is no terminal)."""
    from rich.console import Console
    console = Console()
    console = console if console.is_terminal else Console(width=100)
    for line in heading(document):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for grid in GRIDS[document['mode']](document):
        grid.print(console)
