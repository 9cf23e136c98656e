"""Many prompts from a file through the batching engine: JSON lines in, JSON lines out."""
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from config.sizes import nice_bytes
from engine.engine import Engine
from engine.paged import PAGE_SIZE
from engine.params import Completion, sample_seed
from engine.prompts import PromptLine

ROWS = 16  # requests at once, unless told otherwise


def fitted(model, lines: list[PromptLine], ids: list[list[int]], budget: int, kv_dtype: str,
           shorten: bool) -> list[PromptLine]:
    """The lines as they can be served; one that cannot has an error.

    budget: bytes of KV memory; a line that alone takes more is refused, else the cache would be
    made as large as that. shorten: where learned positions end before max_new_tokens, and the line
    does not say how many it wants, it gets as many as there are positions for.
    """
    return [line if line.error else _fitted(model, line, len(i), budget, kv_dtype, shorten)
            for line, i in zip(lines, ids)]


def _fitted(model, line, n_prompt, budget, kv_dtype, shorten):
    asked, positions = line.params.max_new_tokens, model.config.block_size
    # the last token drawn is never fed
    if model.rotary is None and n_prompt + asked - 1 > positions:
        room = positions - n_prompt + 1
        if room < 1 or not shorten or 'max_new_tokens' in line.given:
            return replace(line, error=f'{line.where}: {n_prompt} prompt tokens and '
                                       f'max_new_tokens={asked} are more than block_size='
                                       f"{positions}, for which pos_embedding='learned' has "
                                       'positions')
        return replace(line, params=replace(line.params, max_new_tokens=room))
    needed = model.plan.nbytes(1, n_prompt + asked, model.resolved_kv_dtype(kv_dtype))
    if needed <= budget:
        return line
    return replace(line, error=f'{line.where}: {n_prompt} prompt tokens and max_new_tokens={asked} '
                               f'need {nice_bytes(needed)} of KV memory, and there is '
                               f'{nice_bytes(budget)}')


def make_engine(model, tokenizer, lines, ids, num_samples: int, rows: int, budget: int,
                kv_dtype: str, prefix_budget: int = 0, captured: bool = True) -> Engine:
    """An engine that holds the longest of the lines that have no error.

    prefix_budget: bytes of host memory for what lines begin with alike. rows: requests at once; 0 =
    up to ROWS, fewer where the requests are, or where the budget cannot hold the windows of all.
    """
    lengths = [len(i) + line.params.max_new_tokens for line, i in zip(lines, ids) if not line.error]
    max_seq_len = max(lengths, default=1)
    if model.rotary is None:
        max_seq_len = min(max_seq_len, model.config.block_size)
    if not rows:
        dtype = model.resolved_kv_dtype(kv_dtype)
        rows = min(ROWS, max(1, len(lengths) * num_samples))
        page = model.plan.page_nbytes(PAGE_SIZE, dtype)
        while rows > 1 and model.plan.rings_nbytes(rows, max_seq_len, dtype) + page > budget:
            rows -= 1
    return Engine(model, rows, max_seq_len, kv_dtype, kv_budget=budget,
                  prefix_budget=prefix_budget, tokenizer=tokenizer, captured=captured)


def complete(engine: Engine, lines: list[PromptLine], ids: list[list[int]], num_samples: int,
             seed: int, write: Callable[[dict], None]) -> dict:
    """`num_samples` completions of each line, each given to `write` as a dict, in the order of the
    lines.

    A line that sets no seed gets numbers of its own, made from `seed` and its place; sample k of a
    line is drawn with `sample_seed(its seed, k)`. A line with an error, in the file or in what it
    asks, becomes an answer that says so. When interrupted, what is complete has been written.

    Returns:
        Numbers for `show_many`: requests, failed, tokens, seconds; bytes of KV memory.
    """
    work = [(n, k) for n in range(len(lines)) for k in range(num_samples)]
    params = [replace(lines[n].params, seed=_seed(lines[n], n * num_samples, k, seed))
              for n, k in work]
    good = [i for i, (n, _) in enumerate(work) if not lines[n].error]
    done: dict[int, Completion] = {i: Completion([], [], '', 'error', lines[n].error)
                                   for i, (n, _) in enumerate(work) if lines[n].error}
    written, tokens, start = 0, 0, time.perf_counter()
    # prompts are strings of ids here; what the engine refuses comes back as its completion
    stream = engine.stream([ids[work[i][0]] for i in good], [params[i] for i in good])
    try:
        with _progress() as bar:
            task = bar.add_task('completing', total=len(work), completed=len(done), rate='')
            for event in stream:
                tokens += event.token >= 0
                if event.completion:
                    done[good[event.index]] = event.completion
                    rate = f'{tokens / (time.perf_counter() - start):,.0f} tokens/s'
                    bar.update(task, completed=len(done), rate=rate)
                while written in done:  # those before it wait no longer
                    n, k = work[written]
                    answer = _answer(lines[n], k, params[written], done[written])
                    written += 1  # before it is: an interrupt in between must not write it twice
                    write(answer)
    finally:
        stream.close()
        for i in sorted(i for i in done if i >= written):
            write(_answer(lines[work[i][0]], work[i][1], params[i], done[i]))
    seconds = time.perf_counter() - start
    return {'requests': len(work), 'failed': sum(c.finish_reason == 'error' for c in done.values()),
            'prompt_tokens': sum(len(c.prompt_tokens) for c in done.values()), 'tokens': tokens,
            'seconds': seconds, 'tokens_per_second': tokens / seconds} | _kv_memory(engine)


def _kv_memory(engine: Engine) -> dict:
    cache, vanilla = engine.cache, engine.model.plan.vanilla()
    rows, max_seq_len = cache.batch_size, cache.max_seq_len
    return {'kv_held_peak': engine.held_peak, 'batch': rows, 'max_seq_len': max_seq_len,
            'kv_dtype': cache.kv_dtype, 'kv_bytes': cache.nbytes, 'kv_bytes_counted': 'allocated',
            'kv_bytes_vanilla': vanilla.nbytes(rows, max_seq_len, cache.kv_dtype),
            'kv_bytes_vanilla_bf16': vanilla.nbytes(rows, max_seq_len, 'bfloat16')}


def show_many(report: dict) -> None:
    """Print what `complete` returned, with device, threads and weights, to stderr."""
    f, held = report, nice_bytes(report['kv_held_peak'])
    Console(stderr=True).print(
        f"\n{f['requests']:,} requests ({f['failed']:,} failed), {f['prompt_tokens']:,} prompt "
        f"tokens, {f['tokens']:,} generated in {f['seconds']:.1f} s: "
        f"{f['tokens_per_second']:,.1f} tokens/s\n"
        f"KV memory of {f['batch']} rows of up to {f['max_seq_len']:,} tokens in {f['kv_dtype']}: "
        f"{nice_bytes(f['kv_bytes'])} allocated, at most {held} held\n"
        f"vanilla GPT-2 would allocate {nice_bytes(f['kv_bytes_vanilla'])} in {f['kv_dtype']}, "
        f"{nice_bytes(f['kv_bytes_vanilla_bf16'])} in bfloat16\n"
        f"on {f['device']}, {f['threads']} threads, weights {f['weights']}: "
        f"{nice_bytes(f['weight_bytes'])}",
        highlight=False, soft_wrap=True)


def _seed(line: PromptLine, first: int, k: int, seed: int) -> int:
    own = 'seed' in line.given
    return sample_seed(line.params.seed, k) if own else sample_seed(seed, first + k)


def _answer(line: PromptLine, k: int, params, completion: Completion) -> dict:
    answer = {'line': line.line_number} | ({} if line.id is None else {'id': line.id}) | {
        'sample': k, 'prompt': line.prompt or None, 'text': completion.text,
        'finish_reason': completion.finish_reason,
        'prompt_tokens': len(completion.prompt_tokens), 'tokens': len(completion.tokens)}
    if completion.error:
        where = '' if completion.error.startswith(line.where) else f'{line.where}: '
        answer['error'] = where + completion.error
    if completion.n_cached:
        answer['cached_tokens'] = completion.n_cached
    if completion.ttft_s is not None:
        answer |= {'seed': params.seed, 'ttft_s': round(completion.ttft_s, 4),
                   'seconds': round(completion.seconds, 4)}
    if completion.logprobs is not None:
        answer['logprobs'] = [entry.as_json() for entry in completion.logprobs]
    return answer


def _progress() -> Progress:
    return Progress(TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(),
                    TextColumn('{task.fields[rate]}'), TimeRemainingColumn(),
                    console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def json_lines(stream) -> Callable[[dict], None]:
    """Writes dicts to `stream`, one a line, at once. What is not ASCII stays as it is where the
    stream can take all of it."""
    encoding = getattr(stream, 'encoding', None) or ''
    everything = encoding.lower().replace('-', '').startswith('utf')

    def write(answer):
        stream.write(json.dumps(answer, ensure_ascii=not everything) + '\n')
        stream.flush()
    return write
