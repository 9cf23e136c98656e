r"""Sample from a trained model through its KV cache, and report what that cache costs.

    python sample.py                              # the newest run in this folder
    python sample.py out-mqa-local                # a run by its folder
    python sample.py config/train_mqa_local.py    # what train.py with that config wrote
    python sample.py --start="ROMEO." --num_samples=2 --stop=$'\n\n'
    python sample.py --prompts=questions.txt > answers.jsonl      # many prompts, batched
    python sample.py --json                       # ends with the report as one JSON line
    python sample.py --help

Without training, only to see the report:

    python sample.py config/train_gpt2_mqa_local.py --init_from=random --max_new_tokens=20
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import contextlib
import difflib
import io
import json
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import configurator
from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import parse_bytes, physical_memory
from data.datasets import DATA_ROOT, available_datasets, by_hand, ensure_dataset
from data.tokenfiles import read_meta
from data.tokenizer import load_tokenizer
from engine.generate import Generation, cache_length, recomputes
from engine.many import complete, fitted, json_lines, make_engine
from engine.params import SamplingParams
from engine.prompts import encode_prompts, encode_requests, read_prompts, read_requests
from engine.sampler import Sampler, sample_generators
from engine.stopping import SampleText, parse_stops
from engine.timings import Timings
from engine.weights import compile_for_decode, pack_weights, quantize_weights, weights_dtype
from interop.huggingface import noted_source
from interop.tokenizer_files import tokenizer_in
from kv.report import account, nice_bytes, print_report
from model import GPT
from training.checkpoint import config_of, load_weights, note_fixed_settings, tokens_id
from training.device import check_seed, device_name, pick_device, pick_dtype
from training.shelf import checkpoint_in, load_to_resume

RULE = '-' * 15  # printed after each sample, as in nanoGPT


def load_model(s):
    """The model (in eval mode, on the CPU), its data set's name and what its ids stand for if that is known (`tokens_id`);
    from a checkpoint, GPT-2 or with random weights.

    The global generator is seeded just before the model is built and used by nothing else: sample 0 goes on from there.
    """
    if s.init_from == 'resume':
        use_newest_run(s)
    path = checkpoint_in(s.out_dir, s.resume_from)
    checkpoint = load_to_resume(path) if s.init_from == 'resume' else None
    torch.manual_seed(s.seed)
    known = ''
    if s.init_from not in ('resume', 'random'):
        model = GPT.from_pretrained(s.init_from, dict(dropout=0.0))
        dataset, known = (s.dataset, '') if 'dataset' in s.given else noted_source(s.init_from)
    elif checkpoint is None:
        meta = read_meta(known_dataset(s.dataset))
        vocab_size = meta['vocab_size'] if meta else 50304
        dataset = s.dataset
        model = GPT(GPTConfig(vocab_size=vocab_size, **{key.name: getattr(s, key.name) for key in MODEL}))
    else:
        dataset, known = checkpoint['config'].get('dataset', ''), checkpoint.get('tokens', '')
        model = GPT(config_of(checkpoint, path, dropout=0.0))
        load_weights(model, checkpoint, path)
    if s.init_from != 'random':
        note_fixed_settings(s, model.config)
    return model.eval(), dataset, known


def use_newest_run(s) -> None:
    """Where no out_dir was given, and the default one has no checkpoint: the newest of those beside it.

    Raises:
        UserError: there is none.
    """
    if 'out_dir' in s.given or Path(s.out_dir, s.resume_from).exists():
        return
    found = sorted(Path().glob(f'out*/{s.resume_from}'), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f'there is no {s.out_dir}/{s.resume_from}, and no out*/{s.resume_from} in this folder: train a '
                        'model first, as python train.py config/train_mqa_local.py does, or name its folder')
    *others, newest = (str(path.parent) for path in found)
    s.out_dir = newest
    print(f'Using {newest}, the newest run here' + f" (others: {', '.join(reversed(others))})" * bool(others))


def known_dataset(name: str) -> Path:
    """Its folder, prepared if need be. One that is nowhere to be found, or is too large to be prepared for its alphabet
    alone, means GPT-2 BPE, unless it looks misspelt."""
    folder = DATA_ROOT / name
    if not ((folder / 'meta.pkl').is_file() or by_hand(folder / 'prepare.py')) and difflib.get_close_matches(
            name, available_datasets(DATA_ROOT), n=1):
        ensure_dataset(name, DATA_ROOT)
    return folder


def load_dataset_tokenizer(dataset: str, vocab_size: int, known: str = ''):
    """The tokenizer of the data set that the model was trained on: its characters, or GPT-2 BPE where it has none.

    known: the `tokens_id` of then; '' for checkpoints that do not say it (nanoGPT's).
    """
    if any(c in dataset for c in '/\\\0'):
        raise UserError(f'dataset={dataset!r} is not the name of a folder under data/')
    path = DATA_ROOT / dataset / 'meta.pkl'
    meta = read_meta(path.parent) if dataset else None
    if meta is None and vocab_size < 50257:
        raise UserError(f'the model has {vocab_size} tokens, but data/{dataset}/meta.pkl, which says what they are, is '
                        f'missing: run python data/{dataset}/prepare.py')
    print('No meta.pkl found, assuming GPT-2 encodings...' if meta is None else f'Loading meta from data/{dataset}/meta.pkl...')
    tokenizer = load_tokenizer(meta)
    if tokenizer.vocab_size > vocab_size or known not in ('', tokens_id(meta)):
        raise UserError(f'data/{dataset} has {tokenizer.vocab_size} tokens that are not those of the model (it has '
                        f'{vocab_size}): the data set was prepared anew since the model was trained; prepare it as it was')
    return tokenizer


def generate_batch(s, model, tokenizer, prompts, generators, stops, cache, timings):
    """A sample of each of `prompts` (token ids) through an empty cache: a single one is streamed as it is made, several
    are printed when all are done."""
    samples = [SampleText(tokenizer.stream(), stops) for _ in prompts]
    stream = len(samples) == 1
    if stream:
        print(tokenizer.decode(prompts[0]), end='', flush=True)
    stamps, start = [], time.perf_counter()
    generation = Generation(model, prompts, s.max_new_tokens, Sampler(s.temperature, s.top_k, s.top_p, generators), cache)
    try:
        for tokens in track(generation, 'sampling', s.max_new_tokens, console=Console(stderr=True), transient=True,
                            disable=stream or not sys.stderr.isatty()):
            for row, token in enumerate(tokens.flatten().tolist()):  # waits for the device: the clock below is right
                piece = samples[row].add(token)
                if samples[row].stopped:
                    generation.finish(row)
                if stream:
                    print(piece, end='', flush=True)
            stamps.append(time.perf_counter())
    finally:  # also when interrupted, the text held back is part of what there is
        ends = [sample.end() for sample in samples]
        if stream:
            print(ends[0], end='', flush=True)
    for ids, sample in zip(prompts, samples):
        print(('' if stream else tokenizer.decode(ids) + sample.text) + f'\n{RULE}', flush=True)
    timings.record(start, stamps, sum(sample.n_tokens for sample in samples))


def note_what_is_special(s, model, tokenizer, stops, n_prompt):
    """Say beforehand what a user may not expect."""
    if recomputes(model, n_prompt, s.max_new_tokens):
        print(f'Note: learned positions end at block_size={model.config.block_size}; tokens past it are made by full '
              'recomputation over the last block_size tokens, exactly as nanoGPT does (slow)')
    for stop in stops:
        try:
            tokenizer.encode(stop)
        except UserError:
            print(f"Note: the stop text {stop!r} cannot come up: the model's alphabet lacks a character of it")


def check(s):
    for name, low in (('num_samples', 1), ('parallel', 1), ('max_new_tokens', 1), ('temperature', 0.0), ('top_k', 0)):
        if getattr(s, name) < low:
            raise UserError(f'{name}={getattr(s, name)}: must be at least {low}')
    if 0.0 < s.temperature < 1e-4:
        raise UserError(f'temperature={s.temperature}: must be 0 (greedy) or at least 1e-4')
    check_seed(s.seed)
    if not 0.0 < s.top_p <= 1.0:
        raise UserError(f'top_p={s.top_p}: must be above 0 and at most 1')
    for name in ('min_p', 'repetition_penalty', 'logprobs', 'kv_budget', 'prefix_budget'):
        if name in s.given and not s.prompts:
            raise UserError(f'{name}={getattr(s, name)!r} is for many prompts: give a file of them with --prompts')
    if s.prompts and 'start' in s.given:
        raise UserError(f'start={s.start!r} and prompts={s.prompts!r} are both given: leave one of them out')


def parse(argv):
    """The settings. What the parser prints goes where the program's own words go: with `prompts` stdout is for answers."""
    echoed, s = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(echoed):
            s = configurator.parse('sample', argv, usage=__doc__)
    finally:
        print(echoed.getvalue(), end='', file=sys.stderr if s and s.prompts else sys.stdout)
    if (s.prompts or s.temperature == 0) and 'num_samples' not in s.given:
        s.num_samples = 1  # greedy samples are all equal
    check(s)
    return s


def main(argv=None):
    s = parse(argv)
    if not s.prompts:
        return sample_start(s)
    answers = json_lines(sys.stdout)
    with contextlib.redirect_stdout(sys.stderr):
        if sample_prompts(s, answers):
            raise SystemExit(1)


def load_all(s, texts):
    """The model on its device, in its dtype, and its tokenizer; `texts()` is called before anything slow, and the first
    sample's generator is made before anything else draws."""
    device = pick_device(s.device)
    texts = texts()
    model, dataset, known = load_model(s)
    tokenizer = None if 'dataset' in s.given else tokenizer_in(Path(s.init_from))
    tokenizer = tokenizer or load_dataset_tokenizer(dataset, model.config.vocab_size, known)
    first = sample_generators(s.seed, 0, 1, device)
    model = quantize_weights(model.to(device, pick_dtype(s.dtype, device)), s.weight_dtype)
    model.captured = s.captured
    if s.compile:
        compile_for_decode(model)
    return model, tokenizer, texts, first


def sample_prompts(s, write):
    """The prompts of a file through the batching engine; each answer is given to `write`. Returns
    how many failed."""
    defaults = SamplingParams(s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.seed,
                              stop=parse_stops(s.stop), logprobs=s.logprobs)
    budget, prefixes = (parse_bytes(text, name) if text else 0 for name, text in (
        ('kv_budget', s.kv_budget), ('prefix_budget', s.prefix_budget)))
    model, tokenizer, lines, _ = load_all(s, lambda: read_requests(s.prompts, defaults))
    lines, ids = encode_requests(tokenizer, lines)
    asked, budget = lines, budget or memory_of(model.device) // 2
    lines = fitted(model, lines, ids, budget, s.kv_dtype, shorten='max_new_tokens' not in s.given)
    if any(a.params != b.params for a, b in zip(asked, lines)):
        print(f'Note: learned positions end at block_size={model.config.block_size}; texts end there')
    engine = make_engine(model, tokenizer, lines, ids, s.num_samples, s.parallel * ('parallel' in s.given), budget,
                         s.kv_dtype, s.pack, prefixes)
    rows, max_seq_len = engine.cache.batch_size, engine.cache.max_seq_len
    figures = complete(engine, lines, ids, s.num_samples, s.seed, write)
    figures |= {'batch': rows, 'max_seq_len': max_seq_len, 'kv_dtype': engine.cache.kv_dtype,
                'kv_bytes': engine.cache.nbytes, 'kv_bytes_counted': 'allocated',
                'kv_bytes_vanilla': model.plan.vanilla().nbytes(rows, max_seq_len, engine.cache.kv_dtype),
                'kv_bytes_vanilla_bf16': model.plan.vanilla().nbytes(rows, max_seq_len, 'bfloat16')} | machine(model)
    if s.report:
        show_engine_report(figures)
    if s.json:
        write(figures)
    return figures['failed']


def memory_of(device: torch.device) -> int:
    """Bytes in all, free ones on a GPU; KV memory takes at most half of it, unless `kv_budget` says otherwise."""
    return torch.cuda.mem_get_info(device)[0] if device.type == 'cuda' else physical_memory() or 2 ** 35


def machine(model) -> dict:
    return {'device': device_name(model.device), 'threads': torch.get_num_threads(), 'torch': torch.__version__,
            'weights': weights_dtype(model)}


def show_engine_report(f):
    Console(stderr=True).print(
        f"\n{f['requests']:,} requests ({f['failed']:,} failed), {f['prompt_tokens']:,} prompt tokens, {f['tokens']:,} "
        f"generated in {f['seconds']:.1f} s: {f['tokens_per_second']:,.1f} tokens/s\n"
        f"KV memory of {f['batch']} rows of up to {f['max_seq_len']:,} tokens in {f['kv_dtype']}: {nice_bytes(f['kv_bytes'])} "
        f"allocated, at most {nice_bytes(f['kv_held_peak'])} held\nvanilla GPT-2 would allocate "
        f"{nice_bytes(f['kv_bytes_vanilla'])} in {f['kv_dtype']}, {nice_bytes(f['kv_bytes_vanilla_bf16'])} in bfloat16\n"
        f"on {f['device']}, {f['threads']} threads, weights {f['weights']}", highlight=False, soft_wrap=True)


def sample_start(s):
    """Samples of one prompt, streamed or in batches of `parallel`, as nanoGPT would draw them."""
    stops = parse_stops(s.stop)
    model, tokenizer, texts, first = load_all(s, lambda: read_prompts(s.start, ''))
    [prompt] = encode_prompts(tokenizer, texts)
    note_what_is_special(s, model, tokenizer, stops, len(prompt))

    if s.pack:
        pack_weights(model, min(s.parallel, s.num_samples))
    timings, cache = Timings(), None
    for k in range(0, s.num_samples, s.parallel):
        rows = min(s.parallel, s.num_samples - k)
        generators = first * (k == 0) + sample_generators(s.seed, max(k, 1), rows - (k == 0), model.device)
        if cache is None or cache.batch_size != rows:  # the last batch may be smaller
            cache = None  # freed before the next is allocated
            cache = model.new_cache(rows, cache_length(model, len(prompt), s.max_new_tokens), s.kv_dtype)
        cache.reset()
        generate_batch(s, model, tokenizer, [prompt] * rows, generators, stops, cache, timings)
        if k == 0:
            figures = account(model.plan, cache.batch_size, cache.max_seq_len, cache.kv_dtype, allocated=cache.nbytes)
    figures |= timings.summary() | {'num_samples': s.num_samples, 'prompt_tokens': len(prompt),
                                    'new_tokens': s.max_new_tokens} | machine(model)
    if s.report:
        show_report(figures)
    if s.json:
        print(json.dumps(figures))


def show_report(figures):
    console = Console()
    print_report(figures, console, f"\nKV cache, as allocated for {figures['batch']} x {figures['max_seq_len']:,} tokens")
    n = figures['prompt_tokens']
    tpot = f"{figures['tpot_ms']:.2f} ms" if figures['tpot_ms'] is not None else '-'
    console.print(f"TTFT {figures['ttft_ms']:.1f} ms ({n} prompt token{'s' * (n != 1)}), TPOT {tpot}, "
                  f"{figures['tokens_per_second']:,.1f} tokens/s\n"
                  f"at batch {figures['batch']} on {figures['device']}, "
                  f"{figures['threads']} threads, weights {figures['weights']}", highlight=False)


if __name__ == '__main__':
    configurator.run_program(main)
