"""Many prompts from a file through the batching engine: JSON lines in, JSON lines out."""
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.sizes import nice_bytes
from common.terminal import visible
from engine.engine import Engine
from engine.pages.cache import PAGE_SIZE
from engine.pages.page_table import page_nbytes, rows_nbytes
from engine.requests.params import Completion, SamplingParams, sample_seed
from engine.text.prompts import PromptLine

ROWS = 16  # default number of concurrent requests


def fitted(model, lines: list[PromptLine], max_new_tokens: int, budget: int,
           kv_dtype: str) -> list[PromptLine]:
    """Return the lines with `max_new_tokens`, fewer where learned positions end. A line that cannot
    run gets an error, e.g. if it needs more than `budget` bytes of KV memory by itself."""
    def fit(line):
        longest, n_prompt = max_new_tokens, len(line.ids)
        if model.rotary is None:
            block_size = model.config.block_size
            room = block_size - n_prompt + 1  # the last sampled token is never fed
            if room < 1:
                return replace(line, error=f'{line.where}: {n_prompt} prompt tokens are more than '
                                           f'block_size={block_size}, for which '
                                           "pos_embedding='learned' has positions")
            longest = min(longest, room)
        needed = model.plan.nbytes(1, n_prompt + longest, model.resolved_kv_dtype(kv_dtype))
        if needed > budget:
            return replace(line, error=f'{line.where}: {n_prompt} prompt tokens and '
                                       f'max_new_tokens={longest} need {nice_bytes(needed)} of KV '
                                       f'memory, and there is {nice_bytes(budget)}')
        return replace(line, max_new_tokens=longest)
    return [line if line.error else fit(line) for line in lines]


def make_engine(model, tokenizer, lines: list[PromptLine], num_samples: int, rows: int, budget: int,
                kv_dtype: str, prefix_budget: int = 0, captured: bool = True) -> Engine:
    """Make an engine that fits the longest line without an error. rows: concurrent requests; 0 = up
    to ROWS, but fewer if there are fewer requests or the budget is too small for all windows."""
    lengths = [len(line.ids) + line.max_new_tokens for line in lines if not line.error]
    max_seq_len = max(lengths, default=1)
    if model.rotary is None:
        max_seq_len = min(max_seq_len, model.config.block_size)
    if not rows:
        dtype = model.resolved_kv_dtype(kv_dtype)
        rows = min(ROWS, max(1, len(lengths) * num_samples))
        page = page_nbytes(model.plan, PAGE_SIZE, dtype)
        while rows > 1 and rows_nbytes(model.plan, rows, max_seq_len, dtype) + page > budget:
            rows -= 1
    return Engine(model, rows, max_seq_len, kv_dtype, kv_budget=budget,
                  prefix_budget=prefix_budget, tokenizer=tokenizer, captured=captured)


def complete(engine: Engine, lines: list[PromptLine], num_samples: int, params: SamplingParams,
             write: Callable[[dict], None]) -> dict:
    """Pass `num_samples` completions of each line to `write` as dicts, in the order of the lines.

    Completion i uses the seed `sample_seed(params.seed, i)`. A line with an error becomes an answer
    with the error. If interrupted, all completed answers have been written. Returns numbers for
    `show_many`.
    """
    work = [(line, k) for line in lines for k in range(num_samples)]
    seeds = [sample_seed(params.seed, i) for i in range(len(work))]
    done = {i: Completion([], [], '', 'error', line.error)
            for i, (line, _) in enumerate(work) if line.error}
    good = [i for i in range(len(work)) if i not in done]
    written, tokens, start = 0, 0, time.perf_counter()
    # a request that the engine rejects is returned as a completion with an error
    stream = engine.stream([work[i][0].ids for i in good], [
        replace(params, seed=seeds[i], max_new_tokens=work[i][0].max_new_tokens) for i in good])
    try:
        columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                   TextColumn('{task.fields[rate]}'), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True,
                      disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task('completing', total=len(work), completed=len(done), rate='')
            for event in stream:
                if event.token >= 0:
                    tokens += 1
                if event.completion:
                    done[good[event.index]] = event.completion
                    rate = f'{tokens / (time.perf_counter() - start):,.0f} tokens/s'
                    bar.update(task, completed=len(done), rate=rate)
                while written in done:
                    answer = _answer(*work[written], seeds[written], done[written])
                    written += 1  # first, so that an interrupt cannot cause a second write
                    write(answer)
    finally:
        stream.close()
        for i in sorted(i for i in done if i >= written):
            write(_answer(*work[i], seeds[i], done[i]))
    seconds, cache = time.perf_counter() - start, engine.cache
    vanilla, size = engine.model.plan.vanilla(), (cache.batch_size, cache.max_seq_len)
    return {'requests': len(work), 'failed': sum(c.finish_reason == 'error' for c in done.values()),
            'prompt_tokens': sum(len(c.prompt_tokens) for c in done.values()), 'tokens': tokens,
            'seconds': seconds, 'tokens_per_second': tokens / seconds,
            'kv_held_peak': engine.held_peak, 'batch': size[0], 'max_seq_len': size[1],
            'kv_dtype': cache.kv_dtype, 'kv_bytes': cache.nbytes, 'kv_bytes_counted': 'allocated',
            'kv_bytes_vanilla': vanilla.nbytes(*size, cache.kv_dtype),
            'kv_bytes_vanilla_bf16': vanilla.nbytes(*size, 'bfloat16')}


def show_many(f: dict) -> None:
    """Print the numbers from `complete`, and device, threads and weights, to stderr."""
    Console(stderr=True).print(
        f"\n{f['requests']:,} requests ({f['failed']:,} failed), {f['prompt_tokens']:,} prompt "
        f"tokens, {f['tokens']:,} generated in {f['seconds']:.1f} s: "
        f"{f['tokens_per_second']:,.1f} tokens/s\n"
        f"KV memory of {f['batch']} rows of up to {f['max_seq_len']:,} tokens in {f['kv_dtype']}: "
        f"{nice_bytes(f['kv_bytes'])} allocated, "
        f"at most {nice_bytes(f['kv_held_peak'])} held\n"
        f"vanilla GPT-2 would allocate {nice_bytes(f['kv_bytes_vanilla'])} in {f['kv_dtype']}, "
        f"{nice_bytes(f['kv_bytes_vanilla_bf16'])} in bfloat16\n"
        f"on {f['device']}, {f['threads']} threads, weights {f['weights']}: "
        f"{nice_bytes(f['weight_bytes'])}",
        highlight=False, soft_wrap=True)


def _answer(line: PromptLine, k: int, seed: int, completion: Completion) -> dict:
    answer = {
        'line': line.line_number, 'sample': k, 'prompt': line.prompt or None,
        'text': completion.text, 'finish_reason': completion.finish_reason,
        'prompt_tokens': len(completion.prompt_tokens), 'tokens': len(completion.tokens)}
    if completion.error:
        where = '' if completion.error.startswith(line.where) else f'{line.where}: '
        answer['error'] = where + completion.error
    if completion.n_cached:
        answer['cached_tokens'] = completion.n_cached
    if completion.ttft_s is not None:
        answer |= {'seed': seed, 'ttft_s': round(completion.ttft_s, 4),
                   'seconds': round(completion.seconds, 4)}
    if completion.logprobs is not None:
        answer['logprobs'] = [entry.as_json() for entry in completion.logprobs]
    return answer


def json_lines(stream) -> Callable[[dict], None]:
    """Return a function that writes dicts to `stream`, one per line, and flushes. Non-ASCII
    characters are escaped unless the stream's encoding is a UTF."""
    encoding = getattr(stream, 'encoding', None) or ''
    ascii_only = not encoding.lower().startswith('utf')

    def write(answer):
        stream.write(visible(json.dumps(answer, ensure_ascii=ascii_only), stream) + '\n')
        stream.flush()
    return write
