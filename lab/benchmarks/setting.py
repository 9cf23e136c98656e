"""Common to the modes of bench.py: checked settings, models with random weights, caches, and the
facts of the run (hardware, versions, dtypes) that every result file carries."""
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

MIN_REPEATS = 5  # the median of fewer rounds says little
AGAINST = {  # mode -> what it can be compared with
    'train': ('nanogpt',), 'serve': ('vllm',), 'prefill': ('vanilla', 'untrimmed', 'vllm'),
    'decode': ('vanilla', 'vanilla_float32', 'float32_kv', 'hf', 'nanogpt', 'llama.cpp',
               'ctranslate2'),
    'recompute': ('vanilla',), 'lengths': ('vanilla',)}


def check_against(s) -> None:
    """Raises UserError where the mode has no such comparison."""
    allowed = AGAINST.get(s.mode, ())
    if not s.against or s.against in allowed:
        return
    modes = ' or '.join(f'mode={mode!r}' for mode, names in AGAINST.items() if s.against in names)
    named = ', '.join(map(repr, allowed)) or 'nothing'
    raise UserError(f'against={s.against!r}: mode={s.mode!r} is compared with {named}; '
                    f'{s.against!r} goes with {modes}')


def check_unused(s, *names: str) -> None:
    """Raises UserError where a setting is given that has no effect in this mode."""
    for name in names:
        if getattr(s, name):
            raise UserError(f'{name}={getattr(s, name)!r}: has no effect in mode={s.mode!r}')


def check_nanogpt_unused(s) -> None:
    """Raises UserError where a nanoGPT checkout is given but nothing is compared with nanoGPT."""
    if s.nanogpt and s.against != 'nanogpt':
        raise UserError(f"nanogpt={s.nanogpt!r} is a checkout to compare with: it needs "
                        "against='nanogpt'")


def compiles(s) -> bool:
    """Whether the command asks for torch.compile: here the setting's default, True, does not."""
    return s.compile and 'compile' in s.given


def numbers(name: str, text: str) -> list[int]:
    """'1,4,16' -> [1, 4, 16]; the brackets of Python lists and tuples are accepted too.

    Raises:
        UserError: not integers, a number below 1, or the same number twice.
    """
    values = []
    for piece in text.strip().strip('[]()').rstrip(', ').split(','):
        try:
            values.append(int(piece))
        except ValueError:
            raise UserError(f'{name}={text!r}: {piece.strip()!r} is no whole number; a list is '
                            "written as '1,4,16'") from None
        if values[-1] < 1:
            raise UserError(f'{name}={text!r}: {values[-1]} is too small, at least 1 is needed')
    if len(set(values)) < len(values):
        raise UserError(f'{name}={text!r} has a number twice')
    return values


def contexts_and_batches(s) -> list[tuple[int, int]]:
    """(context, batch size) of every cell of the tables, batch sizes innermost."""
    contexts = numbers('contexts', s.contexts)
    batches = numbers('batch_sizes', s.batch_sizes)
    return [(context, batch) for context in contexts for batch in batches]


def model_config(s, data_root: Path) -> GPTConfig:
    """The settings' model without dropout; the vocabulary is the data set's, if that is there."""
    vocab_size = (read_meta(data_root / s.dataset) or {'vocab_size': 50304})['vocab_size']
    shape = {key.name: getattr(s, key.name) for key in MODEL} | {'dropout': 0.0}
    return GPTConfig(vocab_size=vocab_size, **shape)


def vanilla_config(config: GPTConfig, longest: int) -> GPTConfig:
    """The baseline: GPT-2 in the shape of `config`, with learned positions for `longest` tokens."""
    kept = ('vocab_size', 'n_layer', 'n_head', 'n_embd', 'head_dim', 'bias', 'gelu')
    return GPTConfig(block_size=max(config.block_size, longest),
                     **{name: getattr(config, name) for name in kept})


def check_length(config: GPTConfig, contexts: list[int], further: int = 0) -> None:
    """Raises UserError where learned positions end before the longest context plus `further`."""
    longest = max(contexts)
    if config.pos_embedding == 'learned' and longest + further > config.block_size:
        steps = f' and {further} steps after it' if further else ''
        raise UserError(f'contexts: {longest}{steps} is more than block_size={config.block_size}, '
                        "for which pos_embedding='learned' has positions: at most "
                        f'{max(config.block_size - further, 0)}, or give a larger --block_size')


def build(config: GPTConfig, s, parameters: torch.dtype | None = None) -> GPT:
    """A model with random weights in eval mode; `parameters`: their dtype, if not the settings'."""
    return prepared(GPT(config), s, parameters)


def prepared(model: GPT, s, parameters: torch.dtype | None = None) -> GPT:
    """`model`, moved and changed in place as the settings ask: device, dtype, weights, backends."""
    device = pick_device(s.device)
    model = model.to(device, parameters or pick_dtype(s.dtype, device)).eval()
    native.use(s.native)
    quantize_weights(model, s.weight_dtype, s.int4_group)
    speed_up_few_rows(model)
    model.attention_backend = s.attention_backend
    # called for its error: a backend that cannot run here
    describe_attention(model, pick_dtype(s.dtype, device), dropout_p=0.0)
    compiled_as_a_whole = s.mode == 'decode' and s.captured and suits_capture(model)
    if compiles(s) and not compiled_as_a_whole:
        compile_for_decode(model)
    return model


def make_cache(model, batch: int, max_seq_len: int, kv_dtype: str):
    """`model.new_cache`; UserError where it does not fit into memory. A cache larger than the
    machine's memory is not even tried: the system might only notice later, and kill the program."""
    planned = model.plan.nbytes(batch, max_seq_len, model.resolved_kv_dtype(kv_dtype))
    memory = physical_memory()
    too_large = f'a cache of {batch} x {max_seq_len} tokens takes {planned / 1e9:.1f} GB'
    if model.device.type == 'cpu' and memory and planned > memory:
        raise UserError(f'{too_large}, this machine has {memory / 1e9:.1f} GB of memory: ask for '
                        'fewer or shorter sequences')
    try:
        return model.new_cache(batch, max_seq_len, kv_dtype)
    except (MemoryError, torch.OutOfMemoryError) as e:
        raise UserError(f'{too_large}, which cannot be allocated: ask for fewer or shorter '
                        'sequences') from e


def random_tokens(model, batch: int, t: int) -> torch.Tensor:
    """(B, t) ids."""
    return torch.randint(model.config.vocab_size, (batch, t), device=model.device)


def facts(s, models: dict[str, GPT]) -> dict:
    """Command, hardware, versions, dtypes, and the shapes of the models."""
    model = next(iter(models.values()))
    return run_facts(s, model.device) | {
        'dtype': weights_dtype(model), 'captured': s.captured and suits_capture(model),
        'compile': compiles(s), 'native': native.library() is not None,
        'kv_dtype': model.resolved_kv_dtype(s.kv_dtype),
        'models': {name: shape(m) for name, m in models.items()}}


def run_facts(s, device: torch.device) -> dict:
    """The facts that need no model."""
    given = [f'--{name}={value}' for name, value in vars(s).items()
             if name in s.given and name not in ('save', 'json')]
    return {'mode': s.mode, 'against': s.against,
            'command': shlex.join(['python', 'bench.py', *given]),
            'device': device_name(device), 'processor': processor(),
            'threads': torch.get_num_threads(), 'torch': torch.__version__,
            'seed': s.seed, 'repeats': s.repeats}


def shape(model) -> dict:
    """Every field of the config, the number of parameters, and the bytes of the weights."""
    return dataclasses.asdict(model.config) | {
        'params': parameters(model.config, model.plan), 'weight_bytes': weight_bytes(model)}


def processor() -> str:
    """'Intel(R) Xeon(R) ..., 2 cores, 25 GB': the host's, even where a GPU does the work."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines():
            if line.startswith('model name'):
                name = line.partition(':')[2].strip()
                break
    except OSError:
        pass
    return f'{name}, {os.cpu_count()} cores, {physical_memory() / 1e9:.0f} GB'
