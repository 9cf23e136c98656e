"""Does a model compute the same wherever it runs? The checks to run after a change to the core.

    python -m lab.conform config/train_mqa_local.py
    python -m lab.conform config/train_mqa_local.py --kv_latent=16 --rope_fraction_global=0
    python -m lab.conform config/train_rope_mha.py --plans=auto    # and each of these plans of it
    python -m lab.conform --random=20                  # as many random configs over all fields

A model of the config is made small (widths, windows and layers beyond two periods; its plan keeps
its form) and gets random weights, sharper than those of training. Sequences are twice as long as
the largest number of a field (a window, a number of a new field), up to 512; what is longer
is named. Each check prints a tick, in brackets what a program refuses by name, or the first
difference; any difference makes the exit status 1.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import contextlib
import copy
import dataclasses
import functools
import io
import json
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

import configurator
from common.errors import UserError
from common.gpt_config import GPTConfig, model_args, unknown_field
from common.settings import Model, Seed, key
from engine.engine import Engine
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.steps.captured import CapturedDecode
from engine.steps.native import native_decode, unsupported
from engine.weights.quantize import n_parameters
from kv.cache import KVCache
from kv.counts import parameters
from kv.console import output, print_table, table_of
from kv.plan import KV_DTYPES, plan_kv
from lab.random_config import VOCAB, WIDTH, distances, long_enough, random_config
from model import GPT
from training.elastic.plans import plans_of
from training.native.loading import library
from training.native.modules import speed_up
from training.memory.recompute import set_recompute

LONGEST_WINDOW = 16
BATCH = 3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Settings(Seed, Model):
    random: int = key(0, 'check so many random configs in place of one')
    as_given: bool = key(False, 'check the config itself, not a small one of the same form')
    plans: str = key('', "also check the model's smaller plans, as train.py's --plans")


class Refused(Exception):
    """A program does not take the model, and says why."""


def reduced(config: GPTConfig) -> GPTConfig:
    """A small config of the same form: two periods and a layer, windows in proportion."""
    windows = [n * LONGEST_WINDOW // max(LONGEST_WINDOW, *config.windows) for n in config.windows]
    windows = [max(n, was > 0) for n, was in zip(windows, config.windows)]
    texts = {'window_pattern': ','.join(map(str, windows))} if config.window_pattern else {}
    return long_enough(dataclasses.replace(
        config, vocab_size=VOCAB, n_embd=WIDTH, head_dim=config.resolved_head_dim, mlp_hidden=32,
        n_layer=min(config.n_layer, 2 * len(config.layer_pattern) + 1), dropout=0.0,
        block_size=2 * max(windows) + 40,
        window_size=max(windows) if config.window_size else 0, **texts))


def random_model(config: GPTConfig, dtype=torch.float64, seed: int = 0) -> GPT:
    """A model in eval mode whose weights are so large that a single wrong key shows."""
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + noise if p.dim() == 1 and name.endswith('weight') else noise)
    return model.to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    return model(idx[:, :-1], idx[:, 1:])[1]


def refuse_rounding(config: GPTConfig, why='a value between two steps may go either way') -> None:
    if config.kv_quant_train:
        raise Refused(f"kv_quant_train='int8': {why}")


def check(found: torch.Tensor, expected: torch.Tensor, what: str, limit: float, first_row: int = 0,
          first: int = 0) -> None:
    """Raise AssertionError, which names the first position with a difference above the limit.
    found, expected: logits (B, t, V) of rows from first_row and positions from `first` on."""
    gaps = (found.double() - expected.double()).abs().flatten(2).amax(-1)        # (B, T)
    wrong = (~(gaps <= limit)).nonzero()  # NaN included
    if len(wrong):
        row, position = wrong[wrong[:, 1].argmin()].tolist()
        raise AssertionError(f'{what}: {gaps[row, position]:.2g} at position {first + position} of '
                             f'row {first_row + row}, allowed {limit:g}')


# -- checks: each takes a config, and raises AssertionError or Refused -----------------------------

@torch.no_grad()
def cached(config: GPTConfig, dtype=torch.float64) -> None:
    """Chunks, single tokens and a resumed turn, past every wrap, give the full forward's logits."""
    if dtype == torch.float32:
        refuse_rounding(config)
    model, T = random_model(config, dtype), config.block_size
    idx, limit = tokens(BATCH, T), TOLERANCE[dtype]
    full, rng = model(idx, all_logits=True)[0], random.Random(0)
    any_chunks = []
    while sum(any_chunks) < T:
        any_chunks.append(rng.randint(1, min(T - sum(any_chunks), 2 * LONGEST_WINDOW)))
    for name, chunks in {'one chunk': [T], 'single tokens': [1] * T, 'chunks': any_chunks,
                         'a resumed turn': [T // 3, *[1] * (T // 4), T - T // 3 - T // 4]}.items():
        cache = model.new_cache(BATCH, T)
        for all_logits in (True, False):
            parts = [model(part, cache=cache, all_logits=all_logits)[0]
                     for part in idx.split(chunks, dim=1)]
            ends = torch.tensor(chunks).cumsum(0) - 1
            check(torch.cat(parts, 1), full if all_logits else full[:, ends], name, limit)
            cache.reset()


def in_pages(config: GPTConfig) -> dict:
    """Arguments of a paged cache for all rows."""
    return dict(cache_class=PagedKVCache, page_size=8, n_pages=BATCH * -(-config.block_size // 8))


@torch.no_grad()
def ragged(config: GPTConfig, dtype=torch.float64, paged=False) -> None:
    """Rows that append different numbers of tokens, and are emptied and filled again."""
    model, T, rng = random_model(config, dtype), config.block_size, random.Random(0)
    cache = model.new_cache(BATCH, T, **(in_pages(config) if paged else {}))
    for turn in range(2):
        idx, held = tokens(BATCH, T, turn), [0] * BATCH
        full = model(idx, all_logits=True)[0]
        while min(held) < T:
            most = rng.choice((1, 1, 4, 2 * LONGEST_WINDOW))
            lens = [min(rng.randint(0, most), T - n) for n in held]
            t, all_logits = max(1, *lens), rng.random() < 0.5
            x = torch.stack([torch.cat([row, row[:t]])[n:n + t] for row, n in zip(idx, held)])
            y = model(x, cache=cache, lens=lens, all_logits=all_logits)[0]
            for row, n in enumerate(lens):
                begin, end = held[row] + (0 if all_logits else max(0, n - 1)), held[row] + n
                check(y[row:row + 1, :end - begin], full[row:row + 1, begin:end],
                      f'{n} tokens from position {held[row]} on', TOLERANCE[dtype], row, begin)
                held[row] = end
        cache.reset([1])
        cache.reset()


@torch.no_grad()
def engine(config: GPTConfig) -> None:
    """Greedy tokens and log-probabilities, with prefix hits and resumed turns, are the model's."""
    model, n = random_model(config), 8
    longest = config.block_size - 2 * n
    if longest < 8:
        raise Refused(f'block_size={config.block_size} is too small')
    texts = [row.tolist()[:n] for row, n in zip(tokens(BATCH, longest), (longest, longest // 2, 9))]
    texts += [texts[0][:longest // 2] + row.tolist() for row in tokens(2, longest // 4, seed=1)]
    params = SamplingParams(max_new_tokens=n, temperature=0.0, logprobs=0)
    for chunk in (0, 7):
        runs = Engine(model, 2, config.block_size, page_size=8, prefill_chunk=chunk,
                      prefix_budget=10 ** 8)
        asked = texts
        for _ in range(2):  # the second turn goes on where the first ended
            done = runs.generate(asked, params)
            for text, found in zip(asked, done):
                assert not found.error, found.error
                logits = model(torch.tensor([text + found.tokens[:-1]]), all_logits=True)[0][0]
                due = (x.tolist() for x in logits[-n:].log_softmax(-1).max(-1))
                for one, logprob, token in zip(found.logprobs, *due, strict=True):
                    assert one.token == token and abs(one.logprob - logprob) < 1e-6, (
                        f'after {len(text)} tokens, {found.n_cached} of them cached: token '
                        f'{one.token} at {one.logprob:.7f}, expected {token} at {logprob:.7f}')
            asked = [text + found.tokens for text, found in zip(asked, done)]
        assert runs.prefix.stats.found, 'no request found its prefix'


def nbytes(config: GPTConfig) -> None:
    """In every dtype a cache allocates what the plan says, to the byte."""
    plan, T = plan_kv(config), config.block_size
    for kv_dtype in KV_DTYPES:
        cache = KVCache(plan, BATCH, T, kv_dtype)
        tensors = [x for store in (*cache.stores, *cache.states) for x in store.tensors]
        found = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
        planned = plan.nbytes(BATCH, T, kv_dtype)
        assert planned == cache.nbytes == found, (
            f'{kv_dtype}: {found:,} bytes are allocated, the plan says {planned:,}, cache.nbytes '
            f'is {cache.nbytes:,}')


@torch.no_grad()
def quantized(config: GPTConfig) -> None:
    """An int8 cache changes logits by less than a tenth of their standard deviation."""
    model, idx = random_model(config), tokens(BATCH, config.block_size)
    full, cache = model(idx, all_logits=True)[0], model.new_cache(BATCH, config.block_size, 'int8')
    found = torch.cat([model(part, cache=cache, all_logits=True)[0] for part in idx.split(7, 1)], 1)
    share = ((found - full).square().mean().sqrt() / full.std()).item()
    assert share < 0.1, f'the logits differ by {share:.2g} of their standard deviation'


def gradients(config: GPTConfig) -> None:
    """The gradient of each parameter, in a random direction, is what finite differences give, with
    the best of several steps: activations have kinks."""
    refuse_rounding(config, 'gradients pass rounding unchanged')
    model, idx = random_model(config), tokens(2, config.block_size)
    loss_of(model, idx).backward()
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        # in a window of one token no weight depends on a query
        assert p.grad is not None and (p.grad.any() or 1 in config.windows), f'{name}: no gradient'
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        expected = (p.grad * direction).sum().item()
        found = [slope(model, idx, p, step * direction) / step for step in (1e-6, 1e-7, 1e-8, 1e-9)]
        nearest = min(found, key=lambda each: abs(each - expected))
        assert abs(nearest - expected) <= 1e-5 * max(1.0, abs(expected)), (
            f'{name}: {expected:.8g} by backward, {nearest:.8g} by differences')


@torch.no_grad()
def slope(model, idx, p, change) -> float:
    """Half the difference of the losses with p + change and p - change."""
    p += change
    above = loss_of(model, idx).item()
    p -= 2 * change
    below = loss_of(model, idx).item()
    p += change
    return (above - below) / 2


def recomputed(config: GPTConfig) -> None:
    """Gradients do not depend on which activations are recomputed in the backward pass."""
    plain, idx = random_model(config).train(), tokens(2, config.block_size)
    other = copy.deepcopy(plain)
    set_recompute(other, 'block')
    for model in (plain, other):
        loss_of(model, idx).backward()
    for (name, p), q in zip(plain.named_parameters(), other.parameters()):
        assert torch.allclose(p.grad, q.grad, 1e-9, 1e-12), f'{name}: another gradient'


def kernels(config: GPTConfig, seed: int = 0) -> None:
    """Training with the C++ kernels gives float64's gradients as closely as torch in float32."""
    if library() is None:
        raise Refused('no C++ compiler')
    refuse_rounding(config)
    exact, plain = random_model(config), random_model(config, torch.float32)
    fast, idx = copy.deepcopy(plain), tokens(2, config.block_size, seed)
    speed_up(fast)
    losses = [loss_of(model, idx) for model in (exact, plain, fast)]
    for loss in losses:
        loss.backward()
    assert abs(losses[0] - losses[2]) < 1e-4, f'losses {losses[0].item()} and {losses[2].item()}'
    for (name, p), *others in zip(exact.named_parameters(), plain.parameters(), fast.parameters()):
        of_plain, of_fast = (((q.grad - p.grad).norm() / max(1e-2, p.grad.norm())).item()
                             for q in others)
        if of_fast > 1e-3 + 4 * of_plain and not seed:
            return kernels(config, 1)  # rounding may have moved an activation across a kink
        assert of_fast <= 1e-3 + 4 * of_plain, (
            f'{name}: gradients differ by {of_fast:.2g} of their norm, torch by {of_plain:.2g}')


def cpp_pair(config: GPTConfig, kv_dtype='auto', **kinds):
    """A model, the C++ decode step on a cache of its own, an equal cache for the model's forward,
    and the largest difference that is allowed. Raises Refused if the step does not take it."""
    model = random_model(config, torch.float32)
    cache, plain = (model.new_cache(BATCH, config.block_size, kv_dtype, **kinds) for _ in range(2))
    step = native_decode(model, cache)
    if step is None:
        why = unsupported(model, cache)
        assert why or library() is None, 'refused although it knows all settings'
        raise Refused(why or 'no C++ compiler')
    rounded = config.kv_quant_train or kv_dtype == 'int8'  # a value may be rounded either way
    return model, step, plain, 0.1 if rounded else 1e-3


@torch.no_grad()
def cpp_step(config: GPTConfig) -> None:
    """The C++ decode step takes the model, and gives its logits, or refuses it by name."""
    model, step, plain, limit = cpp_pair(config)
    for position in range(config.block_size):
        idx = tokens(BATCH, 1, position)
        expected = model(idx, cache=plain)[0]
        check(step(idx)[:, None], expected, 'a step', limit, first=position)


@torch.no_grad()
def cpp_prompts(config: GPTConfig) -> None:
    """Chunks of prompts and single tokens of other rows, in one C++ step on int8 pages."""
    model, step, plain, limit = cpp_pair(config, 'int8', **in_pages(config))
    idx, held, rng = tokens(BATCH, config.block_size), [0] * BATCH, random.Random(0)
    while min(held) < config.block_size:
        rows = [row for row, n in enumerate(held) if n < config.block_size]
        rows = rng.sample(rows, rng.randint(1, len(rows)))
        ends = [min(held[row] + rng.choice((1, 2, 5, 17)), config.block_size) for row in rows]
        chunks = [idx[row, held[row]:end] for row, end in zip(rows, ends)]
        logits = step.extend([chunk.tolist() for chunk in chunks], rows, [True] * len(rows))
        for row, end, chunk, y in zip(rows, ends, chunks, logits):
            expected = model(chunk[None], cache=plain, rows=[row])[0]
            check(y[None, None], expected, f'{len(chunk)} tokens', limit, row, end - 1)
            held[row] = end


@torch.no_grad()
def captured_step(config: GPTConfig) -> None:
    """The step that CUDA captures, here not captured, gives the model's logits, in rows and pages,
    also where rows sit out, or refuses a field by name."""
    if unknown := unknown_field(config, 'fast'):
        raise Refused(unknown)
    model, T = random_model(config), config.block_size
    idx = tokens(BATCH, T)
    full = model(idx, all_logits=True)[0]
    for kinds in ({}, in_pages(config)):
        cache = model.new_cache(BATCH, T, **kinds)
        step, held = CapturedDecode(model, cache, fused=False, capture=False), [0] * BATCH
        for turn in range(2 * T):  # each row sits out every fourth step
            rows = [row for row, n in enumerate(held) if n < T and (turn + row) % 4]
            for row in rows if kinds else ():
                cache.reserve(row, held[row] + 1)
            new = torch.tensor([[int(text[n % T])] for text, n in zip(idx, held)])
            y = step(new, [int(row in rows) for row in range(BATCH)])[:, None]
            for row in rows:
                check(y[row:row + 1], full[row:row + 1, held[row]:held[row] + 1], 'a step',
                      TOLERANCE[torch.float64], row, held[row])
                held[row] += 1
        assert held == [T] * BATCH


def counted(config: GPTConfig) -> None:
    """The report counts the model's parameters, or does not know a field and says so."""
    found, expected = parameters(config, plan_kv(config)), n_parameters(config)
    if found != expected and (unknown := unknown_field(config, 'count')):
        raise Refused(unknown)
    assert found == expected, f'{found:,} are counted, and the model has {expected:,}'


@torch.no_grad()
def exported(config: GPTConfig) -> None:
    """The class for transformers gives the same logits, or the export refuses a field by name."""
    from interop.export import hf_model
    model = random_model(config)
    try:
        hf = hf_model(model, torch.float64)
    except UserError as e:
        raise Refused(str(e).partition(' is not supported')[0]) from e
    idx = tokens(BATCH, config.block_size)
    limit = 0.1 if config.kv_quant_train else 1e-4  # softmax is in float32 there
    check(hf(idx).logits, model(idx, all_logits=True)[0], 'a sequence', limit)


def resumed(config: GPTConfig) -> None:
    """A training that is interrupted and resumed ends with the losses of one that was not."""
    fields = {name: value for name, value in model_args(config).items() if name != 'vocab_size'}
    flags = [f'--{name}={value}' for name, value in fields.items()]
    flags += ['--dataset=recall', '--recall_task=distances=1', '--batch_size=2', '--max_iters=6',
              '--eval_interval=3', '--eval_iters=1', '--log_interval=1', '--compile=False',
              '--gradient_accumulation_steps=1', '--learning_rate=1e-2', '--device=cpu']
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, 'whole'), Path(folder, 'parts')
        for out, more in ((whole, []), (parts, ['--max_iters=3']), (parts, ['--init_from=resume'])):
            done = subprocess.run([sys.executable, 'train.py', *flags, '--lr_decay_iters=6',
                                   f'--out_dir={out}', *more], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-300:]
        runs = [[json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]
                for out in (whole, parts)]
    losses = [{line['iter']: line['loss'] for line in run if 'loss' in line} for run in runs]
    assert losses[0] == losses[1] and losses[0], f'losses {losses[0]} and {losses[1]}'


CHECKS = {
    'parameters': counted, 'cache, float64': cached,
    'cache, float32': lambda config: cached(config, torch.float32), 'ragged rows': ragged,
    'pages': functools.partial(ragged, paged=True),
    'engine and prefix cache': engine, 'bytes': nbytes, 'int8 K and V': quantized,
    'gradients': gradients, 'recomputation': recomputed, 'training kernels': kernels,
    'resuming': resumed, 'C++ decode step': cpp_step, 'C++ prompts': cpp_prompts,
    'captured step': captured_step, 'export': exported}


def conform(config: GPTConfig, only=CHECKS) -> dict[str, str]:
    """Check name -> '' if it passes, the reason in brackets if it is refused, or what differs."""
    found = {}
    for name in only:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # notes of what is refused
                CHECKS[name](config)
            found[name] = ''
        except Refused as e:
            found[name] = f'({e})'
        except AssertionError as e:
            found[name] = str(e) or 'an assertion failed'
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            found[name] = f'{type(e).__name__}: {e} ({Path(where.filename).name}:{where.lineno})'
    return found


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    s = configurator.parse(Settings, argv, usage=__doc__)
    rng = random.Random(s.seed)
    configs = [random_config(rng) for _ in range(s.random)]
    if not configs:
        plans = plans_of(s.plans, s.config(VOCAB))
        configs = [plan.config if s.as_given else reduced(plan.config) for plan in plans]
    console, failed = output(), 0
    warnings.simplefilter('ignore')  # what plans warn of is no difference
    for config in configs:
        changed = {name: value for name, value in model_args(config).items()
                   if value != getattr(GPTConfig, name)}
        print('--as_given=True', *(f'--{name}={value}' for name, value in changed.items()
                                   if name != 'vocab_size'))
        found = conform(config)
        marks = {'': '\N{CHECK MARK}', '(': '-'}  # passed, refused; others differ
        rows = [(marks.get(why[:1], '\N{BALLOT X}'), name, why) for name, why in found.items()]
        print_table(console, table_of(('', 'check', ''), rows, left=('', 'check'), wrap=('',)))
        for name, n in distances(config).items():
            if 2 * n > config.block_size:
                print(f'not reached: {name}={getattr(config, name)!r}, sequences have only '
                      f'{config.block_size} tokens')
        failed += any(mark == '\N{BALLOT X}' for mark, *_ in rows)
    if failed:
        raise SystemExit(f'{failed} of {len(configs)} configs differ')


if __name__ == '__main__':
    sys.modules['torchao'] = None  # transformers imports it, which prints warnings; not needed here
    configurator.run_program(main)
