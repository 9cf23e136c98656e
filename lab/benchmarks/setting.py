"""What the modes decode and prefill start from: checked settings, models with random weights, caches, the facts of the run."""
import dataclasses
import os
import platform
import shlex
from pathlib import Path

import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from config.schema import MODEL
from config.sizes import physical_memory
from data.tokenfiles import read_meta
from engine import native
from engine.captured import suits_capture
from engine.linear import speed_up_few_rows
from engine.weights import compile_for_decode, quantize_weights, weight_bytes, weights_dtype
from kv.capacity import parameters
from model import GPT
from training.device import describe_attention, device_name, pick_device, pick_dtype

MIN_REPEATS = 5  # medians of fewer rounds say little
# mode -> what it can be timed against
AGAINST = {'train': ('nanogpt',), 'serve': ('vllm',), 'prefill': ('vanilla', 'untrimmed', 'vllm'),
           'decode': ('vanilla', 'vanilla_float32', 'float32_kv', 'hf', 'nanogpt', 'llama.cpp', 'ctranslate2'),
           'recompute': ('vanilla',), 'lengths': ('vanilla',)}


def check_against(s) -> None:
    """Raises UserError where the mode is not timed against that."""
    here = AGAINST.get(s.mode, ())
    if s.against and s.against not in here:
        modes = ' or '.join(f'mode={mode!r}' for mode, known in AGAINST.items() if s.against in known)
        these = f"is compared with {', '.join(map(repr, here))}" if here else 'is compared with nothing'
        raise UserError(f'against={s.against!r}: mode={s.mode!r} {these}; {s.against!r} goes with {modes}')


def numbers(name: str, text: str) -> list[int]:
    """'1,4,16' -> [1, 4, 16] (as Python writes lists and tuples, too).

    Raises:
        UserError: not whole numbers, or one below 1, or one twice.
    """
    found = []
    for piece in text.strip().strip('[]()').rstrip(', ').split(','):
        try:
            found.append(int(piece))
        except ValueError:
            raise UserError(f"{name}={text!r}: {piece.strip()!r} is no whole number; a list is written as '1,4,16'") from None
        if found[-1] < 1:
            raise UserError(f'{name}={text!r}: {found[-1]} is too small, at least 1 is needed')
    if len(set(found)) < len(found):
        raise UserError(f'{name}={text!r} has a number twice')
    return found


def model_config(s, data_root: Path) -> GPTConfig:
    """The settings' model, with the data set's vocabulary where that is known, without dropout."""
    vocab_size = (read_meta(data_root / s.dataset) or {'vocab_size': 50304})['vocab_size']
    shape = {key.name: getattr(s, key.name) for key in MODEL} | {'dropout': 0.0}
    return GPTConfig(vocab_size=vocab_size, **shape)


def vanilla_config(config: GPTConfig, longest: int) -> GPTConfig:
    """GPT-2 in the shape of `config`, with learned positions for `longest` tokens: what ours is compared with."""
    return GPTConfig(block_size=max(config.block_size, longest), bias=config.bias, gelu=config.gelu,
                     **{name: getattr(config, name) for name in ('vocab_size', 'n_layer', 'n_head', 'n_embd', 'head_dim')})


def check_length(config: GPTConfig, contexts: list[int], further: int = 0) -> None:
    """Raises UserError where learned positions end before the longest of `contexts` and `further` tokens do."""
    longest = max(contexts)
    if config.pos_embedding == 'learned' and longest + further > config.block_size:
        steps = f' and {further} steps behind it' if further else ''
        raise UserError(f"contexts: {longest}{steps} is more than block_size={config.block_size}, for which "
                        "pos_embedding='learned' has positions: at most "
                        f'{max(config.block_size - further, 0)}, or give a larger --block_size')


def build(config: GPTConfig, s, parameters: torch.dtype | None = None) -> GPT:
    """A model with random weights, in eval mode, parameters in the settings' dtype or in another."""
    return prepared(GPT(config), s, parameters)


def prepared(model: GPT, s, parameters: torch.dtype | None = None) -> GPT:
    """`model` as the settings run it, in place: device, dtype, quantized weights, backends."""
    device = pick_device(s.device)
    model = model.to(device, parameters or pick_dtype(s.dtype, device)).eval()
    native.use(s.native)
    quantize_weights(model, s.weight_dtype, s.int4_group)
    speed_up_few_rows(model)
    model.attention_backend = s.attention_backend
    describe_attention(model, pick_dtype(s.dtype, device), dropout_p=0.0)  # a backend that cannot serve is refused
    whole_step = s.mode == 'decode' and s.captured and suits_capture(model)  # that is compiled then
    if s.compile and 'compile' in s.given and not whole_step:
        compile_for_decode(model)
    return model


def make_cache(model, batch: int, max_seq_len: int, kv_dtype: str):
    """`model.new_cache`, refused where it is larger than the machine's memory (which the system might only notice later,
    by ending the program)."""
    planned, memory = model.plan.nbytes(batch, max_seq_len, model.resolved_kv_dtype(kv_dtype)), physical_memory()
    too_large = f'a cache of {batch} x {max_seq_len} tokens takes {planned / 1e9:.1f} GB'
    if model.device.type == 'cpu' and memory and planned > memory:
        raise UserError(f'{too_large}, this machine has {memory / 1e9:.1f} GB of memory: ask for fewer or shorter sequences')
    try:
        return model.new_cache(batch, max_seq_len, kv_dtype)
    except (MemoryError, torch.OutOfMemoryError) as e:
        raise UserError(f'{too_large}, which cannot be had: ask for fewer or shorter sequences') from e


def random_tokens(model, batch: int, t: int) -> torch.Tensor:
    """(B, t) ids."""
    return torch.randint(model.config.vocab_size, (batch, t), device=model.device)


def facts(s, models: dict[str, GPT]) -> dict:
    """What a figure means nothing without: command, hardware, versions, dtypes, the models' shapes."""
    model = next(iter(models.values()))
    return run_facts(s, model.device) | {
        'dtype': weights_dtype(model), 'captured': s.captured and suits_capture(model),
        'compile': s.compile and 'compile' in s.given, 'native': native.library() is not None,
        'kv_dtype': model.resolved_kv_dtype(s.kv_dtype), 'models': {name: shape(m) for name, m in models.items()}}


def run_facts(s, device: torch.device) -> dict:
    """Those that need no model."""
    given = [f'--{name}={getattr(s, name)}' for name in vars(s) if name in s.given and name not in ('save', 'json')]
    return {'mode': s.mode, 'against': s.against, 'command': shlex.join(['python', 'bench.py', *given]),
            'device': device_name(device), 'processor': processor(), 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'seed': s.seed, 'repeats': s.repeats}


def shape(model) -> dict:
    """Every field of the config, the number of parameters and their bytes."""
    return dataclasses.asdict(model.config) | {'params': parameters(model.config, model.plan),
                                               'weight_bytes': weight_bytes(model)}


def processor() -> str:
    """'Intel(R) Xeon(R) ..., 2 cores, 25 GB': of the host, also where the work is done by a GPU."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines():
            if line.startswith('model name'):
                name = line.partition(':')[2].strip()
                break
    except OSError:
        pass
    return f'{name}, {os.cpu_count()} cores, {physical_memory() / 1e9:.0f} GB'
