"""Run the cells of the GPU check in a worker process of `lab.scripts.gpu.supervise`:

    python -m lab.scripts.gpu.measure --fd=N --device=cuda --cells=FILE name name ...

FILE has the arguments of each cell as JSON. --device=cpu is a dry run: tiny sizes, kernels in
Triton's interpreter, no timings.
"""
import contextlib
import gc
import importlib
import json
import os
import statistics
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

import configurator
from ablate import main as run_ladder
from attention.backends import triton_enabled
from data.datasets import DATA_ROOT
from engine.steps.captured import CapturedDecode, captured_decode
from engine.engine import Engine
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.steps.prepare import prepare
from kv.cache import KVCache
from kv.parts import tensor_nbytes
from lab.benchmarks import kernels
from lab.benchmarks.setting import build, model_config, random_tokens
from lab.benchmarks.train import TrainStep
from lab.scripts.gpu import exact
from lab.scripts.gpu.exact import ALLOWED, TINY, Machine, judged
from lab.scripts.gpu.supervise import ROOT, end_if_poisoned, worker_cells

STEPS = 8  # profiled steps
REHEARSED = [*TINY, '--batch_sizes=2', '--contexts=40', '--steps=4', '--requests=4',
             '--batch_size=2', '--compile=False', '--attention_backend=auto']


@torch.inference_mode()
def captured(machine, kv_dtype: str, paged: bool, compiled: bool = False) -> dict:
    """Logits of five captured steps at batch 1 and 64, in float32 with tf32 off, against plain
    torch without any kernel. In int8 a different order of summation may round a value to the next
    integer, so the median error over the decode steps is used, and the maximum has a looser bound.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    s = machine.settings()
    model = build(model_config(s, DATA_ROOT), s, torch.float32)
    room, errors = 600 if machine.real else 40, []
    batches = (1, 64) if machine.real else (1, 3)
    for batch in batches[-1:] if compiled else batches:  # compiling takes a minute per batch size
        pages = dict(n_pages=batch * room // 4, page_size=16) if paged else {}
        kind = PagedKVCache if paged else KVCache
        caches = [model.new_cache(batch, room, kv_dtype, kind, **pages) for _ in 'ab']
        prompt = torch.randint(model.config.vocab_size, (batch, room // 2), device=machine.device)
        for cache in caches:
            with triton_enabled(False):
                model(prompt, cache=cache)
        # Dynamo cannot trace interpreted kernels
        decode = CapturedDecode(model, caches[0], compiled and machine.real)
        for step in range(5 if machine.real else 1):
            tokens = prompt[:, step:step + 1]
            for row in range(batch if paged else 0):
                caches[0].reserve(row, caches[0].length(row) + 1)
            found = decode(tokens).clone()
            with triton_enabled(False):
                plain = model(tokens, cache=caches[1])[0][:, -1].double()
            errors.append(judged(found, plain, 1.0)['error'])
    largest = max(errors)
    error = largest if largest > (1e-3 if kv_dtype == 'auto' else 5e-2) else (
        statistics.median(errors))
    result = {'error': error, 'allowed': 1e-3, 'worst': largest}
    if machine.real:
        with contextlib.suppress(Exception):  # a profiler that fails must not cost the result
            step = next(iter(decode._steps.values()))
            with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step.run()
                torch.cuda.synchronize()
            result['nodes'] = sum(event.count for event in profiler.key_averages()
                                  if event.self_device_time_total > 0)
    return result


def bench(machine, args: list[str]) -> dict:
    """One run of bench.py."""
    args = [*args, *([] if machine.real else REHEARSED), f'--device={machine.device}']
    s = configurator.parse('bench', [*args, '--json=True'], echo=False)
    # entire models take minutes in the interpreter
    with contextlib.nullcontext() if machine.real else triton_enabled(s.mode == 'kernels'):
        document = importlib.import_module(f'lab.benchmarks.{s.mode}').run(s, DATA_ROOT)
    found = {'document': document}
    if s.mode == 'decode' and len(document['cells']) == 1:
        ours = document['cells'][0]['sides']['ours']
        found['measured_seconds'] = ours['tpot_ms']['median'] / 1000
    if s.mode == 'train':  # every step has the same batch, so its loss must fall
        found |= {'measured_seconds': document['median_ms'] / 1000,
                  'error': document['last_loss'], 'allowed': document['first_loss']}
    return found


def profile(machine, what: str, batch: int, context: int = 0) -> dict:
    """The kernels of captured decode steps or of a compiled training step, slowest first."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.real
    if what == 'decode':
        s = machine.settings()
        model = build(model_config(s, DATA_ROOT), s)
        call = decode_steps(model, batch, context if machine.real else 30)
    else:
        s = machine.settings(f'--batch_size={batch if machine.real else 2}',
                             f'--compile={machine.real}')
        call = TrainStep(s, DATA_ROOT)
    for _ in range(3 if machine.real else 1):
        call()
    with torch.profiler.profile(activities=activities) as profiler:
        call()
    slowest = f"self_{'device' if machine.real else 'cpu'}_time_total"
    table = profiler.key_averages().table(slowest, row_limit=30, max_name_column_width=60)
    folder = Path(os.environ.get('GPU_CHECK_DETAIL', tempfile.gettempdir()))
    with contextlib.suppress(OSError):  # a full disk
        profiler.export_chrome_trace(str(folder / f'trace-{what}.json.gz'))
    return {'table': table, 'steps': STEPS if what == 'decode' else 1}


def decode_steps(model, batch, held):
    """Return a function that runs STEPS decode steps after `held` tokens, captured if possible."""
    cache = model.new_cache(batch, held + 5 * STEPS).fill_(held)
    decode = captured_decode(model, cache) or (lambda ids: model(ids, cache=cache)[0][:, -1])
    first = random_tokens(model, batch, 1)

    @torch.inference_mode()
    def call():
        tokens = first
        for _ in range(STEPS):
            tokens = decode(tokens).argmax(-1, keepdim=True)
    return call


def engine(machine, batch: int, temperature: float = 0.0) -> dict:
    """Decode steps of the asynchronous engine, and of the synchronous one ('best'); the error is
    the share of requests whose texts differ."""
    s = machine.settings()
    model = build(model_config(s, DATA_ROOT), s)
    batch, n = (batch, 256) if machine.real else (2, 8)
    prompts, texts, ms = random_tokens(model, batch, 16).tolist(), [], []
    for asynchronous in (True, False):
        runs = Engine(model, batch, n + 40, asynchronous=asynchronous)
        prepare(runs)
        for k, prompt in enumerate(prompts):
            runs.submit(prompt, SamplingParams(n, temperature=temperature, seed=k))
        events, times = [], [time.perf_counter()]
        while runs.n_unfinished:
            events += runs.step()
            times.append(time.perf_counter())
        done = {event.index: event.completion.tokens for event in events if event.completion}
        texts.append(done)
        decoding = [1000 * (b - a) for a, b in zip(times, times[1:])][n // 4:-n // 4]
        ms.append(statistics.median(decoding))
    differ = sum(texts[0][k] != texts[1][k] for k in range(batch)) / batch
    return {'error': differ, 'allowed': 1e-3, 'measured_seconds': ms[0] / 1000,
            'best': 'synchronous', 'best_ms': ms[1]}


def tune(machine, batch: int, paged: bool, kv_dtype: str, time: bool = True) -> dict:
    """The decode kernel at 8,192 keys by layout (keys, warps, stages) and by number of splits."""
    from attention.kernels.decode import Tuning, stored_attention
    batch, context = (batch, 8192) if machine.real else (2, 128)
    q = torch.randn(batch, 1, 12, 64, device=machine.device, dtype=machine.dtype).transpose(1, 2)
    lengths = torch.full((batch,), context, device=machine.device)
    n_pages, page = (batch * context // 64, 64) if paged else (batch, context)
    table = torch.randperm(n_pages, device=machine.device).int().view(batch, -1) if paged else None
    stores = kernels.random_stores(n_pages, 1, page, 64, getattr(torch, kv_dtype), machine.dtype,
                                   machine.device)

    def call(store, how):
        return stored_attention(q, *store.tensors, kv_lens=lengths, table=table, tuning=how)
    default, found = call(stores[0], Tuning()), {}
    layouts = [dict(block_n=n, num_warps=warps, num_stages=stages) for n in (32, 64, 128)
               for warps in (1, 2, 4, 8) for stages in (2, 3, 4)
               if not (paged and n > 64) and n * 64 // (32 * warps) >= 16]
    hows = [{}, *layouts, *(dict(n_splits=n) for n in (1, 2, 4, 8, 16, 32, 64))]
    for how in hows[:None if machine.real else 3]:
        name = ' '.join(f'{key}={value}' for key, value in how.items()) or 'default'
        try:
            error = judged(call(stores[0], Tuning(**how)), default.double(), 1.0)['error']
            found[name] = {'error': error}
            if time:
                calls = [partial(call, store, Tuning(**how)) for store in stores]
                found[name]['ms'] = kernels.milliseconds_a_call(calls, machine.device)['median']
        except Exception as e:  # a layout that does not fit must not end the others
            found[name] = kernels.failure(e)
    good = {name: one for name, one in found.items() if 'failed' not in one}
    result = {'layouts': found, 'error': max(one['error'] for one in good.values()),
              'allowed': ALLOWED[torch.bfloat16]}
    if time:
        best = min(good, key=lambda name: good[name]['ms'])
        result |= {'measured_seconds': good['default']['ms'] / 1000,
                   'best': best, 'best_ms': good[best]['ms']}
    return result


@torch.inference_mode()
def few_rows(machine, rows: int) -> dict:
    """The fused Linear layers of one layer against torch's kernels: where torch is faster,
    `fused_linear.MOST_ROWS` is too large."""
    from engine.steps.fused_linear import fused_linear
    found, error = {}, 0.0
    for name, first in exact.linear_cases(machine, rows).items():
        n = kernels.n_copies(tensor_nbytes(first[1].weight)) if machine.real else 1
        given = [exact.linear_cases(machine, rows)[name] for _ in range(n)]
        ours, torchs = ([partial(call, *args) for args in given]
                        for call in (fused_linear, exact.plain_linear))
        error = max(error, judged(ours[0](), torchs[0]().double(), 1.0)['error'])
        found[name] = {side: kernels.milliseconds_a_call(calls, machine.device)['median']
                       for side, calls in (('ours', ours), ('torch', torchs))}
    total = {side: sum(each[side] for each in found.values()) for side in ('ours', 'torch')}
    return {'linears': found, 'error': error, 'allowed': ALLOWED[machine.dtype],
            'measured_seconds': total['ours'] / 1000, 'best': 'torch', 'best_ms': total['torch']}


def ladder(machine) -> dict:
    """A short ladder of GPT-2's shape, trained on torch's own Python files."""
    from data.text.prepare import main as prepare
    with tempfile.TemporaryDirectory() as folder:
        prepare(['--input', str(Path(torch.__file__).parent), '--glob', '*.py'])
        run_ladder(['config/ablate_gpu_short.py', f'--folder={folder}',
                    f'--device={machine.device}', '--pictures=False'])
        results = (Path(folder) / 'results.json').read_text(encoding='utf-8')
        return {'document': json.loads(results)}


KINDS = {'attention': exact.attention, 'write': exact.write, 'sequence': exact.sequence,
         'linear': exact.linear, 'vocabulary': exact.vocabulary, 'few-rows': few_rows,
         'captured': captured, 'engine': engine, 'bench': bench, 'profile': profile, 'tune': tune,
         'compile': partial(tune, time=False), 'ladder': ladder,
         'rates': lambda machine: kernels.rates(machine.device, machine.dtype)}


def run_cell(name: str, args: dict, machine: Machine) -> dict:
    """Return the result with its status: 'ok', 'wrong' (the error is too large) or 'failed' (an
    exception was raised, so there is no result)."""
    kind, *rest = name.split('/')
    if kind == 'profile':
        args = args | {'what': rest[0]}
    try:
        torch.manual_seed(0)
        found = KINDS[kind](machine, **args)
        if not machine.real:
            found.pop('measured_seconds', None)  # a CPU's time says nothing about a GPU
        if found.get('error', 0.0) < found.get('allowed', 1.0):
            return {'status': 'ok', **found}
        why = f"error {found['error']:.2e}, allowed {found['allowed']:.2e}"
        return {'status': 'wrong', **found, 'why': why}
    except Exception as e:
        traceback.print_exc()
        return {'status': 'failed', 'why': f'{type(e).__name__}: {str(e)[:600]}'}


def main():
    options, names, emit = worker_cells()
    cells = json.loads(Path(options['cells']).read_text(encoding='utf-8'))
    machine = Machine(options['device'])
    os.chdir(ROOT)
    with contextlib.nullcontext() if machine.real else triton_enabled(True):
        for name in names:
            emit(begin=name)
            emit(cell=name, **run_cell(name, cells[name], machine))
            end_if_poisoned()
            if machine.real:
                torch._dynamo.reset()
                gc.collect()  # caches and their graphs refer to each other
                torch.cuda.empty_cache()


if __name__ == '__main__':
    main()
