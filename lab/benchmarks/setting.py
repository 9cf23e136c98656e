"""Code common to the modes of bench.py: checked settings, models with random weights, caches, and
the facts about the run (hardware, versions, dtypes) that every result file contains."""
import dataclasses
import os
import platform
import re
import shlex
from pathlib import Path

import torch

from common.errors import UserError, at_least
from common.gpt_config import GPTConfig
from common.sizes import physical_memory
from data.tokenfiles import read_meta
from engine import native
from engine.steps.captured import suits_capture
from engine.weights.linear import speed_up_on_cpu
from engine.weights.quantize import (
    compile_for_decode, n_parameters, quantize_weights, weight_bytes, weights_dtype)
from model import GPT
from training.device import device_name, pick_device, pick_dtype
from training.step.kernels import describe_attention

MIN_REPEATS = 5  # the median of fewer rounds means little
AGAINST = {  # mode -> what it can be compared with
    'train': ('nanogpt',), 'serve': ('vllm',), 'prefill': ('vanilla', 'untrimmed', 'vllm'),
    'decode': ('vanilla', 'vanilla_float32', 'float32_kv'), 'recompute': ('vanilla',)}


def check_against(s) -> None:
    """Raise UserError if the mode does not support the given comparison, or ignores a setting."""
    allowed = AGAINST.get(s.mode, ())
    if s.against and s.against not in allowed:
        named = ', '.join(map(repr, allowed)) or 'nothing'
        raise UserError(f'against={s.against!r}: mode={s.mode!r} is compared with {named}')
    used = {'nanogpt': (s.against == 'nanogpt', "with against='nanogpt'"),
            'budget': (s.mode == 'decode', "in mode='decode'"),
            'profile': (s.mode == 'train' and not s.against, "in mode='train' without against")}
    for name, (has_effect, where) in used.items():
        if getattr(s, name) and not has_effect:
            raise UserError(f'{name}={getattr(s, name)!r}: has an effect only {where}')


def compiles(s) -> bool:
    """Whether torch.compile was requested explicitly: here the default, True, does not count."""
    return s.compile and 'compile' in s.given


def numbers(name: str, text: str, least: int = 1) -> list[int]:
    """'1,4,16' -> [1, 4, 16]; the brackets of Python lists and tuples are accepted too. UserError:
    if these are not integers, a number is below `least`, or one is given twice."""
    try:
        values = [int(piece) for piece in text.strip('[]() ,').split(',')]
    except ValueError:
        raise UserError(f"{name}={text!r}: must be whole numbers, as '1,4,16'") from None
    if min(values) < least or len(set(values)) < len(values):
        raise UserError(f'{name}={text!r}: each number must be at least {least}, and come '
                        'only once')
    return values


def begin(s, data_root: Path, **least: int):
    """Check what all modes share, and seed the random numbers. Returns (context, batch size) of
    every cell, batch sizes innermost, and the model's config. UserError: if settings are invalid.

    least: smallest values of other settings."""
    at_least(s, repeats=MIN_REPEATS, **least)
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    torch.manual_seed(s.seed)
    shapes = [(context, batch) for context in contexts for batch in batches]
    return shapes, model_config(s, data_root)


def model_config(s, data_root: Path) -> GPTConfig:
    """The settings' model without dropout, with the data set's vocabulary if it is present."""
    vocab_size = (read_meta(data_root / s.dataset) or {'vocab_size': 50304})['vocab_size']
    return dataclasses.replace(s.config(vocab_size), dropout=0.0)


def compared(config: GPTConfig, longest: int, s, parameters: torch.dtype | None = None) -> dict:
    """Return name -> model: ours, and the baseline if it is vanilla GPT-2 in our shape, with
    learned positions for `longest` tokens, or ours with another cache."""
    models = {'ours': prepared(GPT(config), s, parameters)}
    if s.against == 'float32_kv':
        models['float32 K/V'] = models['ours']
    elif s.against in ('vanilla', 'vanilla_float32'):
        kept = ('vocab_size', 'n_layer', 'n_head', 'n_embd', 'head_dim', 'bias', 'gelu')
        vanilla = GPT(GPTConfig(block_size=max(config.block_size, longest),
                                **{name: getattr(config, name) for name in kept}))
        if s.against == 'vanilla_float32':
            s = dataclasses.replace(s, dtype='float32', weight_dtype='auto')
        models[s.against.replace('_', ' ')] = prepared(vanilla, s, parameters)
    return models


def prepared(model: GPT, s, parameters: torch.dtype | None = None) -> GPT:
    """Move and change `model` in place to match the settings: device, dtype, weights, backends."""
    device = pick_device(s.device)
    model = model.to(device, parameters or pick_dtype(s.dtype, device)).eval()
    native.use(s.native)
    quantize_weights(model, s.weight_dtype, s.int4_group)
    speed_up_on_cpu(model)
    model.attention_backend = s.attention_backend
    # raises an error if a backend cannot run here
    describe_attention(model, pick_dtype(s.dtype, device), dropout_p=0.0)
    compiled_as_a_whole = s.mode == 'decode' and s.captured and suits_capture(model)
    if compiles(s) and not compiled_as_a_whole:
        compile_for_decode(model)
    return model


def make_cache(model, batch: int, max_seq_len: int, kv_dtype: str):
    """Like `model.new_cache`, but UserError if it is larger than this machine's memory: the system
    may kill the program only later."""
    planned = model.plan.nbytes(batch, max_seq_len, model.resolved_kv_dtype(kv_dtype))
    memory = physical_memory()
    if model.device.type == 'cpu' and memory and planned > memory:
        raise UserError(f'a cache of {batch} x {max_seq_len} tokens takes {planned / 1e9:.1f} GB, '
                        f'more than this machine has ({memory / 1e9:.1f} GB): ask for less')
    return model.new_cache(batch, max_seq_len, kv_dtype)


def random_tokens(model, batch: int, t: int) -> torch.Tensor:
    """(B, t) ids."""
    return torch.randint(model.config.vocab_size, (batch, t), device=model.device)


def facts(s, models: dict[str, GPT]) -> dict:
    """Command, hardware, versions, dtypes, the models' shapes, parameters and bytes of weights."""
    model = next(iter(models.values()))
    on_cpu = model.device.type == 'cpu'  # elsewhere the extension need not be compiled
    return run_facts(s, model.device) | {
        'dtype': weights_dtype(model), 'captured': s.captured and suits_capture(model),
        'compile': compiles(s), 'native': on_cpu and native.library() is not None,
        'kv_dtype': model.resolved_kv_dtype(s.kv_dtype),
        'models': {name: dataclasses.asdict(m.config) | {
            'params': n_parameters(m.config), 'weight_bytes': weight_bytes(m)}
                   for name, m in models.items()}}


def run_facts(s, device: torch.device) -> dict:
    """The facts that do not depend on a model."""
    given = [f'--{name}={value}' for name, value in s.values().items()
             if name in s.given and name not in ('save', 'json')]
    return {'mode': s.mode, 'against': s.against,
            'command': shlex.join(['python', 'bench.py', *given]),
            'device': device_name(device), 'processor': processor(),
            'threads': torch.get_num_threads(), 'torch': torch.__version__,
            'seed': s.seed, 'repeats': s.repeats}


def processor() -> str:
    """'Intel(R) Xeon(R) ..., 2 cores, 25 GB': the host's, even if a GPU does the work."""
    file = Path('/proc/cpuinfo')
    found = file.exists() and re.search(r'model name\s*:\s*(.*)', file.read_text())
    name = found.group(1) if found else platform.processor()
    return f'{name}, {os.cpu_count()} cores, {physical_memory() / 1e9:.0f} GB'


def check_target(path: str) -> None:
    """Raise UserError if no file can be written at `path` ('' = no file)."""
    if path and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise UserError(f'save={path!r}: must be a file in a folder that can be written to')
