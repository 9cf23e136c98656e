r"""Sample from a trained model through its KV cache, and report what that cache costs.

    python sample.py                              # the newest run in this folder
    python sample.py out-mqa-local                # a run by its folder
    python sample.py config/train_mqa_local.py    # what train.py with that config wrote
    python sample.py --start="ROMEO." --num_samples=2 --stop=$'\n\n'
    python sample.py --prompts=questions.txt > answers.jsonl      # many prompts, batched
    python sample.py --watch=True                 # draws the KV cache as it fills
    python sample.py --json                       # ends with the report as one JSON line
    python sample.py --help

Without training, only to see the report:

    python sample.py config/train_gpt2_mqa_local.py --init_from=random --max_new_tokens=20
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track

import configurator
from common.errors import UserError, at_least
from common.settings import Json, Running, Sampling, Source, key
from common.sizes import nice_bytes, parse_bytes
from common.terminal import visible
from engine.requests.params import SamplingParams
from engine.requests.sampler import TopPSampler, sample_generators
from engine.requests.stopping import SampleText, parse_stops
from engine.steps.captured import MIN_CAPTURED
from engine.steps.decode import fast_decode
from engine.text.lanes import watchable, watching
from engine.text.many import complete, fitted, json_lines, make_engine, show_many
from engine.text.prompts import encode_lines, encode_prompt, read_lines, read_start
from engine.weights.quantize import weight_bytes, weights_dtype
from generate import Generation, cache_length
from interop.choose import Budget, paged
from interop.load import load, with_newest_run
from kv.counts import prefill_flops
from kv.console import output
from kv.report import account
from kv.tables import print_report
from training.device import device_name, total_memory

RULE = '-' * 15  # printed after each sample, as in nanoGPT


@dataclass(frozen=True)
class Settings(Source, Sampling, Json, Running):
    start: str = key('\n', "prompt, or 'FILE:path' of a text file that holds it")
    prompts: str = key('', 'file of prompts: one a line, or in a .jsonl file one JSON string or '
                       'object ({"prompt": "To be"}) a line; answers are JSON lines on stdout')
    num_samples: int = key(10, 'samples per prompt (with prompts: 1, if not given)')
    parallel: int = key(1, 'samples in one batch (with prompts: up to 16, if not given)')
    max_new_tokens: int = key(500, 'tokens to generate per sample')
    stop: str = key('', 'text, or a list of texts, that ends a sample (not printed): '
                    "\"['\\n\\n', '<|endoftext|>']\"")
    min_p: float = key(0.0, "with prompts: least share of the likeliest's probability; 0 = any")
    repetition_penalty: float = key(1.0, 'with prompts: above 1, repeated tokens are less likely')
    logprobs: int = key(-1, 'with prompts: log-probabilities, of the k most likely too; -1 = none')
    ignore_eos: bool = key(False, 'with prompts: go on after <|endoftext|>, which ends a text')
    kv_budget: str = key('', "most KV memory, as '64KB'; of a sequence of 512 tokens, as "
                         "'64KB@512'; of a token, as '96/token': an elastic model (train.py "
                         "--plans) runs at its best plan within that; '' = no limit, with prompts "
                         'half of the memory')
    prefix_budget: str = key('', "with prompts: memory for shared prefixes, as '1GB'; '' = none")
    watch: bool = key(False, "draw the KV cache while a sample of 'start' is written")
    watch_speed: float = key(100.0, 'with watch: tokens per second at most; 0 = no limit')
    report: bool = key(True, 'print the KV-cache report after the samples')


def main(argv=None):
    s = parse(argv)
    if not s.prompts:
        return sample_start(s)
    answers = json_lines(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        failed = sample_prompts(s, answers)
    if failed:
        raise SystemExit(1)


def sample_start(s):
    """Generate `num_samples` samples of one prompt, in batches of `parallel`, as nanoGPT would."""
    params, start = sampling_params(s), read_start(s.start)
    stops = params.stop
    watch = s.watch and watchable()
    parallel = 1 if watch else s.parallel
    rows = min(parallel, s.num_samples)
    model, tokenizer, _ = load(with_newest_run(s), lambda config, tokenizer: (rows, cache_length(
        config, len(encode_prompt(tokenizer, *start)), s.max_new_tokens)))
    generators = sample_generators(s.seed, s.num_samples, model.device)
    prompt = encode_prompt(tokenizer, *start)
    print_notes(s, model, len(prompt))

    batches, cache = [], None
    max_seq_len = cache_length(model.config, len(prompt), s.max_new_tokens)
    for k in range(0, s.num_samples, parallel):
        batch = generators[k:k + parallel]
        if cache is None or cache.batch_size != len(batch):  # the last batch may be smaller
            cache = decode = generation = None  # freed before the next one is allocated
            cache = model.new_cache(len(batch), max_seq_len, s.kv_dtype)
            decode = fast_decode(model, cache, s.captured and s.max_new_tokens >= MIN_CAPTURED)
        cache.reset()
        sampler = TopPSampler(params.temperature, params.top_k, params.top_p, batch)
        generation = Generation(model, [prompt] * len(batch), s.max_new_tokens, sampler, cache,
                                decode=decode)
        batches.append(generate_batch(generation, tokenizer, prompt, stops,
                                      s.watch_speed if watch else -1.0))
        if k == 0:
            report = account(model.plan, cache.batch_size, cache.max_seq_len, cache.kv_dtype,
                             allocated=cache.nbytes)

    report |= speed(batches) | machine(model) | {
        'num_samples': s.num_samples, 'prompt_tokens': len(prompt),
        'prefill_flops': prefill_flops(model.config, model.plan, len(prompt)),
        'new_tokens': s.max_new_tokens}
    if s.report:
        size = f"{report['batch']} x {report['max_seq_len']:,} tokens"
        print_report(report, output(), f'\nKV cache, as allocated for {size}')
        show_timings(report)
    if s.json:
        print(json.dumps(report))


def generate_batch(generation, tokenizer, prompt, stops, watch_speed) -> tuple[list[float], int]:
    """Print the samples of a batch: a single one is streamed (or watched, unless watch_speed is
    negative), several are printed when all are done. Returns the times of the start and of each
    step, and how many tokens the samples have."""
    samples = [SampleText(tokenizer.stream(), stops) for _ in generation.prompts]
    stream, hidden = len(samples) == 1, not sys.stderr.isatty()
    steps = track(generation, 'sampling', generation.max_new_tokens, transient=True,
                  console=Console(stderr=True), disable=stream or hidden)
    def show(piece):
        if stream:
            print(visible(piece), end='', flush=True)

    plain = contextlib.nullcontext((show, time.perf_counter))
    with watching(generation, watch_speed) if watch_speed >= 0 else plain as (write, clock):
        write(tokenizer.decode(prompt))
        times = [clock()]
        try:
            for tokens in steps:
                for row, token in enumerate(tokens.flatten().tolist()):  # waits for the device
                    write(samples[row].add(token))
                    if samples[row].stopped:
                        generation.finish(row)
                times.append(clock())
        finally:  # even if interrupted: pending text is part of the sample
            for sample in samples:
                write(sample.end())
    for sample in samples:
        text = '' if stream else tokenizer.decode(prompt) + sample.text
        print(visible(text) + f'\n{RULE}', flush=True)
    return times, sum(sample.n_tokens for sample in samples)


def print_notes(s, model, n_prompt):
    """Print notes on behavior that a user may not expect."""
    past = n_prompt + s.max_new_tokens - 1 > model.config.block_size
    if model.rotary is None and past:
        print(f'Note: learned positions end at block_size={model.config.block_size}; tokens past '
              'it are made by full recomputation over the last block_size tokens, exactly as '
              'nanoGPT does (slow)')
    if s.watch and not watchable():
        print('Note: watch=True needs a terminal that shows UTF-8, which stdout is not: the text '
              'is printed as without it')


def speed(batches) -> dict:
    """Medians of the times to the first token (TTFT) and per later step (TPOT) in the
    results of `generate_batch`; tokens_per_second is overall, including prefill."""
    tokens = sum(n for _, n in batches)
    seconds = sum(times[-1] - times[0] for times, _ in batches)
    first = [times[1] - times[0] for times, _ in batches]
    further = [(times[-1] - times[1]) / (len(times) - 2) for times, _ in batches if len(times) > 2]
    return {'ttft_ms': statistics.median(first) * 1e3,
            'tpot_ms': statistics.median(further) * 1e3 if further else None,
            'tokens_per_second': tokens / seconds, 'tokens': tokens}


def show_timings(report: dict) -> None:
    n = report['prompt_tokens']
    prompt = '1 prompt token' if n == 1 else f'{n} prompt tokens'
    tpot = f"{report['tpot_ms']:.2f} ms" if report['tpot_ms'] is not None else '-'
    output().print(
        f"TTFT {report['ttft_ms']:.1f} ms ({prompt}, "
        f"{report['prefill_flops'] / 1e6:,.1f} MFLOPs), TPOT {tpot}, "
        f"{report['tokens_per_second']:,.1f} tokens/s\n"
        f"at batch {report['batch']} on {report['device']}, "
        f"{report['threads']} threads, weights {report['weights']}: "
        f"{nice_bytes(report['weight_bytes'])}", highlight=False)


def sample_prompts(s, write):
    """Complete the prompts of a file with the batching engine, and pass the answers to `write`.
    Returns the number of requests that failed."""
    budget = Budget.parse(s.kv_budget).total if s.kv_budget else 0
    prefixes = parse_bytes(s.prefix_budget, 'prefix_budget') if s.prefix_budget else 0
    params, lines = sampling_params(s), read_lines(s.prompts)
    model, tokenizer, _ = load(with_newest_run(s), lambda config, tokenizer: (
        s.parallel, cache_length(config, max([0, *(len(line.ids) for line in encode_lines(
            tokenizer, lines))]), s.max_new_tokens)), paged, engine=True)
    budget = budget or total_memory(model.device) // 2
    lines = fitted(model, encode_lines(tokenizer, lines), s.max_new_tokens, budget, s.kv_dtype)
    if any(0 < line.max_new_tokens < s.max_new_tokens for line in lines):
        print(f'Note: learned positions end at block_size={model.config.block_size}; '
              'texts end there')
    rows = s.parallel if 'parallel' in s.given else 0
    engine = make_engine(model, tokenizer, lines, s.num_samples, rows, budget, s.kv_dtype,
                         prefixes, s.captured)
    report = complete(engine, lines, s.num_samples, params, write) | machine(model)
    if s.report:
        show_many(report)
    if s.json:
        write(report)
    return report['failed']


def machine(model) -> dict:
    return {'device': device_name(model.device), 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'weights': weights_dtype(model),
            'weight_bytes': weight_bytes(model)}


def parse(argv):
    """Return the settings. With `prompts`, the parser prints to stderr: stdout is for answers."""
    echoed, s = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(echoed):
            s = configurator.parse(Settings, argv, usage=__doc__)
    finally:
        print(echoed.getvalue(), end='', file=sys.stderr if s and s.prompts else sys.stdout)
    greedy = sampling_params(s).temperature == 0
    if (s.prompts or greedy) and 'num_samples' not in s.given:
        s = replace(s, num_samples=1)  # greedy samples are all equal
    at_least(s, num_samples=1, parallel=1, watch_speed=0.0)
    for name in ('min_p', 'repetition_penalty', 'logprobs', 'ignore_eos', 'prefix_budget'):
        if name in s.given and not s.prompts:
            raise UserError(f'{name}={getattr(s, name)!r} is for many prompts: give a file of them '
                            'with --prompts')
    if s.prompts and s.watch:
        raise UserError(f'watch=True draws one sample at a time, and prompts={s.prompts!r} are '
                        'many: leave one of them out')
    if s.prompts and 'start' in s.given:
        raise UserError(f'start={s.start!r} and prompts={s.prompts!r} are both there: drop one')
    return s


def sampling_params(s) -> SamplingParams:
    return SamplingParams(s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p,
                          s.repetition_penalty, s.seed, stop=parse_stops(s.stop),
                          logprobs=s.logprobs, ignore_eos=s.ignore_eos)


if __name__ == '__main__':
    configurator.run_program(main)
