"""Measurements on a GPU that bench.py has no mode for; a part of lab/scripts/gpu_check.sh.

    python lab/scripts/gpu_times.py engine FILE 64     # a decode step of both kinds of engine
    python lab/scripts/gpu_times.py profile FILE 1     # kernels of 8 decode steps, slowest first
    python lab/scripts/gpu_times.py linears FILE       # fused Linear layers against torch's

The number is the batch size. The model is GPT-2 124M's shape with all savings, in bfloat16. FILE
gets a JSON document with 'title', 'columns' and 'rows', or with 'text'.
"""
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bench
import configurator
from data.datasets import DATA_ROOT
from engine.engine import Engine
from engine.steps.fused_linear import fused_linear
from engine.requests.params import SamplingParams
from engine.steps.prepare import prepare
from engine.weights.quantized import Int8Linear
from lab.benchmarks.decode import DecodeRound
from lab.benchmarks.kernels import milliseconds_a_call, n_copies
from lab.benchmarks.setting import model_config, prepared, random_tokens
from model import GPT, LayerNorm

FULL = 'config/train_gpt2_mqa_local.py'
STEPS = 8  # profiled steps


def full_model(parameters: torch.dtype | None = None):
    """parameters: their dtype, bfloat16 if None."""
    s = configurator.parse(bench.Settings, [FULL, '--device=cuda', '--dtype=bfloat16'], echo=False)
    return prepared(GPT(model_config(s, DATA_ROOT)), s, parameters)


def engine_texts(model, params: list[SamplingParams], asynchronous: bool):
    """Return (texts, the median seconds of a decode step) of prompts of 16 tokens."""
    torch.manual_seed(0)
    prompts = random_tokens(model, len(params), 16).tolist()
    n = params[0].max_new_tokens
    runs = Engine(model, len(params), n + 40, asynchronous=asynchronous)
    prepare(runs)
    for prompt, each in zip(prompts, params):
        runs.submit(prompt, each)

    events, times = [], [time.perf_counter()]
    while runs.n_unfinished:
        events += runs.step()
        times.append(time.perf_counter())
    texts = {event.index: event.completion.tokens for event in events if event.completion}
    steps = [after - before for before, after in zip(times, times[1:])]
    return texts, statistics.median(steps[n // 4:-n // 4])


def engine(batch: int) -> dict:
    """The host's time of an asynchronous step is hidden, that of a synchronous one is not."""
    model, rows = full_model(), []
    for asynchronous in (True, False):
        _, seconds = engine_texts(model, [SamplingParams(256, temperature=0)] * batch, asynchronous)
        rows.append(['asynchronous' if asynchronous else 'synchronous', f'{1e6 * seconds:,.0f}'])
    return {'title': f'A decode step of the engine, {batch} rows', 'columns': ['engine', 'us'],
            'rows': rows}


@torch.inference_mode()
def profile(batch: int) -> dict:
    decode = DecodeRound(full_model(), batch, 1024, 1024 + 2 * STEPS, STEPS, 'auto')
    for _ in range(3):
        decode()
    with torch.profiler.profile() as profiler:
        decode.generate()
    table = profiler.key_averages().table('self_device_time_total', row_limit=30,
                                          max_name_column_width=60)
    return {'title': f'{STEPS} decode steps, {batch} rows', 'text': table}


def linear_cases(rows: int, device, dtype, shape=(768, 3840), int8: bool = False) -> dict:
    """The arguments of `fused_linear` in a layer that owns its K and V, with random weights.
    shape: widths of the residual stream and of the MLP."""
    how, (C, hidden) = dict(device=device, dtype=dtype), shape

    def case(n_in, n_out, norm, activation, adds):
        weights = torch.nn.Linear(n_in, n_out, bias=False, **how)
        return (torch.randn(rows, n_in, **how), Int8Linear(weights) if int8 else weights,
                LayerNorm(n_in, False).to(**how) if norm else None, activation,
                torch.randn(rows, n_out, **how) if adds else None)

    return {'qkv': case(C, C + C // 6, True, '', False), 'out': case(C, C, False, '', True),
            'up': case(C, hidden, True, 'tanh', False), 'down': case(hidden, C, False, '', True)}


def plain_linear(x, linear, norm=None, activation='', residual=None) -> torch.Tensor:
    """`fused_linear` in torch."""
    y = linear(x if norm is None else norm(x))
    y = F.gelu(y, approximate='tanh') if activation else y
    return y if residual is None else residual + y


@torch.inference_mode()
def linears() -> dict:
    """Where torch is faster, `fused_linear.MOST_FLOAT_ROWS` is too large."""
    device, table = torch.device('cuda'), []
    for rows in (1, 8, 16, 32, 64):
        for name, case in linear_cases(rows, device, torch.bfloat16).items():
            copies = [linear_cases(rows, device, torch.bfloat16)[name]
                      for _ in range(n_copies(case[1].weight.nbytes))]
            cells = [str(rows), name]
            for function in (fused_linear, plain_linear):
                calls = [partial(function, *each) for each in copies]
                cells.append(f"{1000 * milliseconds_a_call(calls, device)['median']:.1f}")
            table.append(cells)
    return {'title': 'Linear layers of few rows', 'columns': ['rows', 'layer', 'ours, us',
                                                              'torch, us'], 'rows': table}


if __name__ == '__main__':
    what, file, *batch = sys.argv[1:]
    measure = {'engine': engine, 'profile': profile, 'linears': linears}[what]
    Path(file).write_text(json.dumps(measure(*map(int, batch))) + '\n', encoding='utf-8')
