"""--mode=decode --against=llama.cpp|ctranslate2: whole generations by other engines for CPUs.

They have the weights of our vanilla GPT-2 in formats of their own. In turns, on one clock:

    ours          these weights in the settings' dtype, weight_dtype and kv_dtype
    full stack    a model of ours with as many parameters and the full memory stack, random weights
    llama.cpp     f32, f16 and q8_0, made by its own quantizer; K and V in float16, its default
    ctranslate2   float32 and int8, made by its own converter

Before anything is timed the float32 logits must agree, and after it the tokens of the peer's
float32 side, if ours computes in float32 too; those of the others are only counted.
"""
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import tempfile
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.capacity import parameters
from kv.plan import plan_kv
from lab.benchmarks import clock
from lab.benchmarks.engines import Generated, Ours, check_vanilla, hugging_face
from lab.benchmarks.generation import (
    CHECKED,
    check_gap,
    check_settings,
    measure,
    prompts,
    with_biases,
)
from lab.benchmarks.report import show
from lab.benchmarks.setting import (
    build,
    check_length,
    facts,
    model_config,
    numbers,
    prepared,
    random_tokens,
)
from model import GPT
from training.device import pick_device

# against -> what it imports, and how that is installed
PACKAGES = {
    'llama.cpp': (('llama_cpp', 'gguf'),
                  'CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf'),
    'ctranslate2': (('ctranslate2', 'transformers'), 'pip install ctranslate2 transformers'),
}
FULL_STACK = dict(n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True,
                  window_size=256, pos_embedding='rope', qk_norm=True, bias=False)
PIECE = 512   # tokens of a prompt that llama.cpp is given at a time
CELLS = 256   # its contexts hold a multiple of this many positions
# our names of modules -> those of a GGUF file of arch gpt2
GGUF = {'wte': 'token_embd', 'wpe': 'position_embd', 'ln_f': 'output_norm', 'ln_1': 'attn_norm',
        'ln_2': 'ffn_norm', 'attn.c_attn': 'attn_qkv', 'attn.c_proj': 'attn_output',
        'mlp.c_fc': 'ffn_up', 'mlp.c_proj': 'ffn_down'}


def run(s, data_root: Path) -> dict:
    """All cells, printed as tables; returns what --json prints."""
    check_settings(s)
    check_peer(s)
    modules = imported(s.against)
    contexts, batches = numbers('contexts', s.contexts), numbers('batch_sizes', s.batch_sizes)
    config = model_config(s, data_root)
    config.bias, config.gelu = True, 'tanh'  # as OpenAI's GPT-2, which is what the others compute
    check_vanilla(config, s.against)
    check_length(config, contexts, s.steps)
    torch.manual_seed(s.seed)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = with_biases(config)
        peer = {'llama.cpp': LlamaCpp, 'ctranslate2': CTranslate2}[s.against](
            *modules, ours, folder, stack)
        gap = logit_gap(ours, peer)
        check_gap(gap, peer.tolerance, s.against)
        models = {'ours': prepared(ours, s), 'full stack': build(full_stack(config), s)}
        document = facts(s, models) | peer.facts() | {
            'steps': s.steps, 'max_logit_difference': gap, 'tolerance': peer.tolerance}
        document['cells'] = [cell(models, peer, prompt, s)
                             for prompt in prompts(ours, contexts, batches)]
    show(document)
    return document


def check_peer(s) -> None:
    """Raises UserError for settings that these engines cannot be compared under."""
    if s.compile and 'compile' in s.given:
        raise UserError(f'compile=True: against={s.against!r} nothing is compiled')
    if 'gelu' in s.given and s.gelu != 'tanh':
        raise UserError(f"gelu={s.gelu!r}: against={s.against!r} it is 'tanh', as in OpenAI's GPT-2")
    if pick_device(s.device).type != 'cpu':
        raise UserError(f'device={s.device!r}: against={s.against!r} all run on the CPU: '
                        'give --device=cpu')


def imported(against: str) -> list:
    """The modules of its packages.

    Raises:
        UserError: one is not installed, or its library cannot be loaded.
    """
    names, command = PACKAGES[against]
    try:
        return [importlib.import_module(name) for name in names]
    except (ImportError, OSError, RuntimeError) as e:
        raise UserError(f"against={against!r} needs the packages {' and '.join(names)}: {command}"
                        ) from e


def full_stack(config: GPTConfig) -> GPTConfig:
    """The full memory stack with as many parameters as `config`, up to the rounding of its MLPs'
    width to a multiple of 64."""
    least = dataclasses.replace(config, **FULL_STACK, mlp_hidden=64)
    missing = parameters(config, plan_kv(config)) - parameters(least, plan_kv(least))
    more = round(missing / (64 * 2 * config.n_embd * config.n_layer))
    return dataclasses.replace(least, mlp_hidden=64 * (1 + max(0, more)))


@torch.inference_mode()
def logit_gap(ours: GPT, peer) -> float:
    """By how much float32 logits of a random text differ at most."""
    idx = random_tokens(ours, 1, min(CHECKED, ours.config.block_size))
    return float((peer.logits(idx) - ours(idx, all_logits=True)[0]).abs().max())


def cell(models, peer, prompt, s) -> dict:
    """Figures of a prompt (B, T): `measure`'s, and the ratios of the full stack over each other."""
    own_float32 = s.kv_dtype in ('auto', 'float32')
    with contextlib.ExitStack() as stack:
        theirs = peer.sides(prompt, s.steps, stack)
        sides = {name: Ours(model, prompt, s.steps, kv_dtype=s.kv_dtype)
                 for name, model in models.items()} | theirs
        tolerances = {name: peer.tolerance if own_float32 and name == peer.float32 else None
                      for name in theirs}
        found = measure(models['ours'], sides, prompt, s, tolerances)
    figures = found['sides']
    rate, first = ({name: side[key]['each'] for name, side in figures.items()}
                   for key in ('tokens_per_second', 'ttft_ms'))
    others = [name for name in figures if name != 'full stack']
    found['full_stack_ratios'] = {
        'tokens_per_second': {x: clock.paired(rate['full stack'], rate[x]) for x in others},
        'ttft': {x: clock.paired(first[x], first['full stack']) for x in others}}
    return found


class LlamaCpp:
    """The weights of `ours` in llama.cpp: as f32, f16 and q8_0."""
    float32 = 'llama.cpp f32'
    tolerance = 5e-3  # its GELU is a table of float16: GPT-2 124M's logits are off by 1e-3

    def __init__(self, lib, gguf, ours, folder: Path, stack):
        self.lib, self.config, self.models = lib, ours.config, {}
        silence(lib)
        lib.llama_backend_init()
        path = folder / 'f32'
        write_gguf(gguf, ours, path)
        for name, kind in (('f32', None), ('f16', lib.LLAMA_FTYPE_MOSTLY_F16),
                           ('q8_0', lib.LLAMA_FTYPE_MOSTLY_Q8_0)):
            options = lib.llama_model_quantize_default_params()
            options.ftype, options.nthread = kind or 0, torch.get_num_threads()
            if kind and lib.llama_model_quantize(str(path).encode(), str(folder / name).encode(),
                                                 ctypes.byref(options)):
                raise UserError(f"against='llama.cpp': it cannot make {name} of this model")
            model = lib.llama_model_load_from_file(str(folder / name).encode(),
                                                   lib.llama_model_default_params())
            if not model:
                raise UserError(f"against='llama.cpp': it cannot load this model as {name}")
            stack.callback(lib.llama_model_free, model)
            self.models[f'llama.cpp {name}'] = model

    def facts(self) -> dict:
        return {'llama.cpp': f'(llama-cpp-python) {self.lib.__version__}',
                'llama.cpp K/V': 'float16',
                'llama.cpp processor': self.lib.llama_print_system_info().decode().strip(' |')}

    def logits(self, idx):
        """Of a sequence (1, T), at all positions, with K and V in float32: (1, T, V)."""
        with contextlib.ExitStack() as stack:
            one = LlamaRound(self, self.models[self.float32], idx, 1, stack, self.lib.GGML_TYPE_F32)
            return torch.from_numpy(one.append(idx.numpy(), 0, 0, range(idx.size(1))).copy())[None]

    def sides(self, prompt, steps: int, stack) -> dict:
        """Name -> what generates; `stack` frees them."""
        return {name: LlamaRound(self, model, prompt, steps, stack)
                for name, model in self.models.items()}


class LlamaRound:
    """Greedy generation in a context of its own, with a sequence for each row."""

    def __init__(self, peer: LlamaCpp, model, prompt, steps: int, stack, kv_type=None):
        self.lib, self.V, self.prompt, self.steps = lib, *_ = (
            peer.lib, peer.config.vocab_size, prompt.numpy(), steps)
        B, T = prompt.shape
        cells = -(-(T + steps) // CELLS) * CELLS
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_seq_max, p.kv_unified = B * cells, B, False
        p.n_batch, p.n_ubatch = max(PIECE, B), PIECE
        p.n_threads = p.n_threads_batch = torch.get_num_threads()
        if kv_type is not None:
            p.type_k = p.type_v = kv_type
        self.context = lib.llama_init_from_model(model, p)
        if not self.context:
            raise UserError(f"against='llama.cpp': it has no context for {B} x {T + steps} tokens")
        stack.callback(lib.llama_free, self.context)
        self.batch = lib.llama_batch_init(p.n_batch, 0, 1)
        stack.callback(lib.llama_batch_free, self.batch)
        self.kv_bytes = (2 * peer.config.n_layer * peer.config.n_embd * 2  # in float16
                         * lib.llama_n_ctx(self.context))

    def append(self, ids: np.ndarray, row: int, start: int, wanted) -> np.ndarray:
        """ids (n, t), from position `start` on, to sequences `row`, ...: logits of places `wanted`
        of each (n * wanted, V), valid until the next call."""
        batch, (n, t) = self.batch, ids.shape
        batch.n_tokens = n * t
        for i, token in enumerate(ids.ravel().tolist()):
            j = i % t
            batch.token[i], batch.pos[i], batch.logits[i] = token, start + j, j in wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row + i // t
        if self.lib.llama_decode(self.context, batch):
            raise UserError(f"against='llama.cpp': it cannot decode {n} x {t} tokens")
        self.lib.llama_synchronize(self.context)
        shape = (n * len(wanted), self.V)
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape)

    def prefill(self) -> np.ndarray:
        """First tokens (B,); short prompts share a piece, and long ones are cut."""
        B, T = self.prompt.shape
        together, first = max(1, PIECE // T), []
        for row in range(0, B, together):
            for start in range(0, T, PIECE):
                ids = self.prompt[row:row + together, start:start + PIECE]
                logits = self.append(ids, row, start, (ids.shape[1] - 1,))
            first.append(logits.argmax(1))
        return np.concatenate(first)

    def __call__(self) -> Generated:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        start = clock.now()
        tokens = [self.prefill()]
        first = clock.now()
        for j in range(self.steps - 1):
            position = self.prompt.shape[1] + j
            tokens.append(self.append(tokens[-1][:, None], 0, position, (0,)).argmax(1))
        return Generated.timed(start, (first, clock.now()), torch.from_numpy(np.stack(tokens, 1)))


@functools.cache  # what it sets has to live as long as the library
def silence(lib):
    """llama.cpp's messages go nowhere."""
    callback = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def write_gguf(gguf, ours, path: Path) -> None:
    """The model as llama.cpp reads it, in float32, without a tokenizer."""
    c = ours.config
    writer = gguf.GGUFWriter(path, 'gpt2')
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model('none')
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.block_size)
    writer.add_block_count(c.n_layer)
    writer.add_head_count(c.n_head)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.resolved_mlp_hidden)
    writer.add_layer_norm_eps(1e-5)
    for name, x in ours.transformer.state_dict().items():
        module, _, kind = name.rpartition('.')
        _, layer, inner = module.split('.', 2) if module.startswith('h.') else ('', '', module)
        prefix = f'blk.{layer}.' if layer else ''
        writer.add_tensor(f'{prefix}{GGUF[inner]}.{kind}', x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class CTranslate2:
    """The weights of `ours` in CTranslate2: as float32 and int8."""
    float32 = 'ctranslate2 float32'
    tolerance = 1e-4

    def __init__(self, lib, _transformers, ours, folder: Path, stack):
        self.lib, self.generators = lib, {}
        for kind in ('float32', 'int8'):
            converter(ours).convert(str(folder / kind), quantization=kind)
            generator = lib.Generator(str(folder / kind), device='cpu', compute_type=kind,
                                      inter_threads=1, intra_threads=torch.get_num_threads())
            stack.callback(generator.unload_model)
            self.generators[f'ctranslate2 {kind}'] = generator

    def facts(self) -> dict:
        return {'ctranslate2': self.lib.__version__}

    def logits(self, idx):
        """Of sequences (B, T), at all positions: (B, T, V)."""
        out = self.generators[self.float32].forward_batch(idx.tolist())
        return torch.from_numpy(np.array(out))

    def sides(self, prompt, steps: int, _stack) -> dict:
        """Name -> what generates."""
        return {name: CTranslate2Round(generator, prompt, steps)
                for name, generator in self.generators.items()}


class CTranslate2Round:
    """`generate_batch`, once for the first token and once for all: it has no clock in between."""

    def __init__(self, generator, prompt, steps: int):
        self.generator, self.steps = generator, steps
        self.prompt = [[str(token) for token in row] for row in prompt.tolist()]

    def __call__(self) -> Generated:
        first, _ = self.timed(1)
        seconds, tokens = self.timed(self.steps)
        return Generated(first, (seconds - first) / (self.steps - 1), torch.tensor(tokens))

    def timed(self, n: int) -> tuple[float, list]:
        """Seconds of n tokens, and the tokens; none of them ends a text."""
        start = clock.now()
        found = self.generator.generate_batch(
            self.prompt, max_length=n, max_batch_size=len(self.prompt), end_token=[],
            include_prompt_in_result=False)
        return clock.now() - start, [each.sequences_ids[0] for each in found]


def converter(ours):
    """CTranslate2's, which writes its format of `ours`; the token of an id is its number."""
    from ctranslate2.converters import Converter
    from ctranslate2.converters.transformers import GPT2Loader

    class FromMemory(Converter):
        def _load(self):
            loader = GPT2Loader()
            spec = loader.get_model_spec(hugging_face(ours))
            loader.set_vocabulary(spec, [str(i) for i in range(ours.config.vocab_size)])
            spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = '0'
            return spec
    return FromMemory()
