"""Blocks on the gains in decoding and serving."""
from lab.pages.blocks import RESULTS, block, cells, item, load, prose, ratio, speed, table, tpot


def decode_cells() -> dict[tuple[int, int], dict]:
    """(batch, context) -> cell of the int8 decode benchmarks."""
    return {(batch, cell['context']): cell for batch in (1, 4, 16)
            for cell in cells(f'decode-int8-b{batch}')}


@block
def speed_table() -> str:
    """The README's table: one row for each kind of work."""
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
                f"{speed(cell, 'ours'):,.0f} tokens/s "
                f"| vanilla GPT-2, float32: {vanilla} sequences, "
                f"{speed(cell, 'vanilla float32'):.0f} tokens/s "
                f"| {ratio(cell, 'vanilla float32'):.1f}x |")
    [_, cell] = cells('against-llama.cpp-int8-b1')
    rows.append(f"| decode of vanilla GPT-2, batch 1, context 900 | {tpot(cell, 'ours'):.1f} "
                f"ms/token | llama.cpp, the same model in Q8_0: "
                f"{tpot(cell, 'llama.cpp q8_0'):.1f} ms "
                f"| {ratio(cell, 'llama.cpp q8_0'):.1f}x |")
    [cell] = cells('against-vllm')
    rows.append(f"| 32 requests of 64 + 64 tokens | {speed(cell, 'ours'):,.0f} tokens/s "
                f"| vLLM, the same model in bfloat16: {speed(cell, 'vllm'):,.0f} tokens/s "
                f"| {ratio(cell, 'vllm'):.1f}x |")
    return table('| work | nanoKV, int8 | against | ratio |', rows)


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
    return prose(f"""1 GB of KV memory holds {ours:,} sequences of 4,096 tokens against {vanilla},
        and together they make {ratio(cell, 'vanilla float32'):.1f} times the tokens per second
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


@block
def batching() -> str:
    [cell] = cells('serve')
    return prose(f"""64 requests of 16 to 247 new tokens (prompts of 64, 16 rows, float32):
        continuous batching makes {ratio(cell, 'static'):.2f} times the tokens per second of static
        batches, and {ratio(cell, 'static engine'):.2f} times those of the same engine when it
        admits requests only to an empty batch. Every text is the same.""")


@block
def prefill() -> str:
    by_length = {cell['context']: speed(cell, 'ours') for cell in cells('prefill-int8')}
    return prose(f"""The full stack in int8 computes prompts of 1,024 tokens at
                 {by_length[1024]:,.0f} tokens per second, of 8,192 at {by_length[8192]:,.0f}.""")


@block
def conversations() -> str:
    chat = load('cpu/chat')
    [cell] = [cell for cell in chat['cells'] if cell['context'] == 8192]
    whole, compact = (row for row in chat['bytes'] if row['page_size'] == 64)
    traces = {found['trace']: found for found in load('sessions/simulated')['traces']}
    sessions = traces['chat']
    found = {cell['share']: 1 - cell['computed'] / sessions['prompt_tokens']
             for cell in sessions['cells']}
    possible = 1 - sessions['unavoidable'] / sessions['prompt_tokens']
    ttft = {name: model['ttft_ms']['median'] for name, model in cell['sides'].items()}
    rounds = cell['ratios']['ttft']['without a store']
    return prose(
        f"""With 8,192 tokens of history, a message of 20 tokens has its first token after
        {ttft['ours']:.0f} ms instead of {ttft['without a store'] / 1000:.1f} s (median of ratios
        {rounds['median']:.0f}, {rounds['min']:.0f} to {rounds['max']:.0f} in five rounds). The
        prefix cache keeps {whole['held_nbytes'] / 1e6:.1f} MB for the conversation, everything
        included, or under memory pressure {compact['held_nbytes'] / 1e6:.1f}:
        {whole['smaller']:.0f} and {compact['smaller']:.0f} times less than vanilla's K/V in
        bfloat16 (weights in {chat['dtype']}, K/V in {chat['kv_dtype']}, blocks of 64, batch 1;
        {chat['processor']}).""",
        f"""In {sessions['sessions']} sessions, one request after the other (edits, forks, users who
        leave and return),
        {found[100]:.1%} of the prompt tokens are reused, of {possible:.1%} that had been computed
        before; {found[50]:.1%} in half the memory, {found[25]:.1%} in a quarter
        ([lab/sessions](../lab/sessions/README.md#what-the-prefix-cache-recomputes)).""")


@block
def sessions_simulated() -> str:
    rows = []
    for found in load('sessions/simulated')['traces']:
        first = (f"| `{found['trace']}` | {found['requests']} | {found['prompt_tokens']:,} "
                 f"| {found['unavoidable']:,} ")
        for cell in found['cells']:
            rows.append(f"{first}| {cell['share']}% | {cell['most_nbytes'] / 1e6:.1f} "
                        f"| {cell['computed']:,} | {cell['over_unavoidable']:.2f} |")
            first = '| | | | '
    return table('| trace | requests | prompt tokens | unavoidable | of the bytes | MB '
                 '| computed | over unavoidable |', rows)


@block
def sessions_stalls() -> str:
    rows = []
    for name, kind in (('nanoKV', 'float32'), ('nanoKV', 'int8'), ('vLLM', 'float32')):
        found = load(f"sessions/stall-{name.lower() if name == 'vLLM' else kind}")
        columns = [found['before_s']['p50'], found['before_s']['p99'], found['during_s']['p50'],
                   found['during_s']['p99']]
        per_token = found['tpot_during_s']['p99'] / found['tpot_before_s']['p50']
        rows.append(f"| {name}, {kind} | {' | '.join(f'{1000 * x:.1f}' for x in columns)} "
                    f"| {found['p99_over_median']:.1f} | {per_token:.1f} "
                    f"| {found['long_ttft_s']['p50']:.1f} s "
                    f"| {found['short_ttft_s']['p50']:.2f} s |")
    return (f"{found['processor']}; {found['streams']} streams, medians and percentiles over "
            f"{found['repeats']} long prompts of {found['long']:,} tokens:\n\n"
            + table('| weights and K/V | gaps before, median | 99% | gaps during, median | 99% '
                    '| 99% during over median before | the same of the time per token of a stream '
                    '| first token, long | short |', rows))


@block
def engine_host() -> str:
    found = load('cpu/engine-host')
    times = {name: ms['asynchronous'] for name, ms in found['milliseconds'].items()}
    return prose(
        f"""With {found['rows']} rows, and a model that costs nothing, the host's work in a step of
        the asynchronous engine takes {times['greedy']:.2f} ms, and {times['temperature']:.2f} with
        a temperature (median of {found['steps']} steps on one core of an
        {found['processor'].partition(',')[0]}; sampling from {found['vocab_size']} tokens, which a
        GPU does by itself, included; `lab/scripts/engine_host.py`).""")


SERVERS = {'nanokv': 'nanoKV, float32', 'nanokv int8': 'nanoKV, int8',
           'vllm float32': 'vLLM, float32', 'vllm bfloat16': 'vLLM, bfloat16',
           'llama.cpp': 'llama.cpp, float16'}


def replays() -> list[dict]:
    """The results of lab/scripts/sessions.sh, with the name of the server."""
    found = []
    for path in (RESULTS / 'sessions' / 'replay').glob('*.json'):
        each = load(path.relative_to(RESULTS).with_suffix(''))
        dtype = each['more'].rpartition('=')[2]
        found.append(each | {'name': SERVERS[f"{each['server']} {dtype}".strip()]})
    order = list(SERVERS.values())
    return sorted(found, key=lambda each: (
        each['trace'], -each['kv'] * bool(each['users']), order.index(each['name']), each['kv']))


@block
def sessions_saturated() -> str:
    """Closed loops."""
    rows = []
    for found in replays():
        if found['users']:
            again = found['computed'] - found['unavoidable']
            rows.append(f"| `{found['trace']}` | {found['kv'] / 1e6:.0f} | {found['name']} "
                        f"| {found['tokens_per_second']:,.0f} | {found['computed']:,} "
                        f"| {again:,} | {found['over_unavoidable']:.2f} "
                        f"| {milliseconds(found['ttft_s'], 'p50', 'p95')} "
                        f"| {milliseconds(found['tpot_s'], 'p50')} |")
            title = f"{found['processor']}; {found['users']} users at once"
    return f'{title}:\n\n' + table(
        '| trace | KV cache, MB | server | tokens/s | computed | of them again | over unavoidable '
        '| first token, ms: 50% | 95% | each further token |', rows)


@block
def sessions_open() -> str:
    """Open loops."""
    rows = []
    for found in replays():
        if not found['users']:
            rows.append(f"| {found['name']} | {found['kv'] / 1e6:,.0f} | {found['computed']:,} "
                        f"| {milliseconds(found['ttft_s'], 'p50', 'p95', 'p99')} "
                        f"| {milliseconds(found['tpot_s'], 'p50')} "
                        f"| {milliseconds(found['gap_s'], 'p99')} |")
            title = (f"{found['processor']}; {found['requests']} requests, "
                     f"{found['rate']:g} times as fast as the trace")
    return f'{title}:\n\n' + table(
        '| server | KV cache, MB | computed | first token, ms: 50% | 95% | 99% '
        '| each further token | gaps, 99% |', rows)


@block
def sessions_compared() -> str:
    closed = {(found['trace'], found['kv'] // 10 ** 6, found['name']): found
              for found in replays() if found['users']}
    first = [f"{found['name']}, {found['kv'] / 1e6:,.0f} MB: {1000 * found['ttft_s']['p95']:,.0f}"
             for found in replays() if not found['users']]
    most = max(found['over_unavoidable'] for (_, megabytes, name), found in closed.items()
               if megabytes >= 380 and 'nanoKV' in name)

    def again(name):
        cells = closed['editing', 210, name], closed['forking', 95, name]
        return ' and '.join(f"{cell['computed'] - cell['unavoidable']:,}" for cell in cells)

    def faster(ours, theirs):
        """In `chat`, `editing` and `forking`, with room for all."""
        cells = [[closed[*trace, name]['tokens_per_second'] for name in (ours, theirs)]
                 for trace in (('chat', 400), ('editing', 840), ('forking', 380))]
        return '{:.1f}, {:.1f} and {:.1f}'.format(*(a / b for a, b in cells))
    pairs = [[load(f'sessions/pairs/forking-{server}-{k}')['tokens_per_second']
              for server in ('nanokv', 'vllm')] for k in range(1, 5)]
    ratios, theirs = [a / b for a, b in pairs], [b for _, b in pairs]
    return prose(
        f"""With room for all, nanoKV computes at most {most:.2f} times the unavoidable tokens. With
        a quarter of it, it computes {again('nanoKV, float32')} tokens of `editing` and `forking`
        again in float32, and vLLM in the same bytes and dtype {again('vLLM, float32')}. Saturated
        with `chat`, `editing` and `forking` it makes {faster('nanoKV, float32', 'vLLM, float32')}
        times the tokens of vLLM in float32, and in int8 {faster('nanoKV, int8', 'vLLM, bfloat16')}
        times those of vLLM in bfloat16. These runs are of several days, and machines of one kind
        differ: {len(pairs)} pairs of runs of `forking` in float32, on one machine, one after the
        other, gave {min(ratios):.2f} to {max(ratios):.2f} times the tokens of vLLM, which made
        {min(theirs):,.0f} to {max(theirs):,.0f} a second.""",
        f"""95th percentile of the times to the first token at the same rate of requests, in
        milliseconds: {'; '.join(first)}.""")


@block
def sessions_overload() -> str:
    rows = []
    for file, waiting in (('overload', 64), ('overload-refused', 8)):
        found = load(f'sessions/{file}')
        first = ' | '.join(f"{found['ttft_s'][name]:.2f}" for name in ('p50', 'p95', 'p99', 'max'))
        rows.append(f"| {waiting} | {found['refused']:,} | {found['failed']} "
                    f"| {found['tokens_per_second']:,.0f} | {first} |")
    return (f"{found['processor']}; {found['users']} users at once, 16 rows; seconds:\n\n" + table(
        '| may wait | refusals | failed | tokens/s | first token, 50% | 95% | 99% | latest |',
        rows))


@block
def sessions_soak() -> str:
    found = load('sessions/soak')
    settled = [nbytes for seconds, nbytes in found['memory'] if seconds >= 600]
    return prose(
        f"""{found['requests']:,} requests of {found['users']} users in {found['minutes']:.0f}
        minutes, of which {found['vanished']:,} vanished and asked again: {found['failed']} failed,
        and {found['equal']} of {found['compared']} replies equal those of the model alone. Resident
        memory, {settled[0] / 1e6:.0f} MB after ten minutes, was {settled[-1] / 1e6:.0f} MB at the
        end, and never more than {max(settled) / 1e6:.0f} MB ({found['growth']:+.2%}).""")


def milliseconds(found: dict, *names: str) -> str:
    """Percentiles as cells of a table."""
    return ' | '.join(f'{1000 * found[name]:,.1f}' for name in names)


@block
def sessions_source() -> str:
    found = load('sessions/mooncake')
    rows = [f"| requests in {found['seconds']:,.0f} s | {found['requests']:,} |"]
    rows += [f'| {kind} | {share:.1%} |' for kind, share in found['shares'].items()]
    for name, text in (('pause_s', 'seconds from a request to the one that continues it'),
                       ('growth', 'tokens by which its prompt is longer'),
                       ('reply', 'tokens of a reply')):
        rows.append(f"| {text}: 10th, 50th, 90th percentile "
                    f"| {', '.join(f'{x:,.0f}' for x in found[name])} |")
    rows.append('| coefficient of variation of the times between requests (Poisson: 1) '
                f"| {found['arrival_variation']:.1f} |")
    return table('| Mooncake, conversations | |', rows)
