"""--mode=decode --against=llama.cpp|ctranslate2: generations by other inference engines for CPUs.

They have the weights of our vanilla GPT-2 in formats of their own. Interleaved, on one clock:

    ours          these weights in the settings' dtype, weight_dtype and kv_dtype
    full stack    a model of ours with as many parameters and the full memory stack, random weights
    llama.cpp     f32, f16 and q8_0, made by its own quantizer; K and V in float16, its default
    ctranslate2   float32 and int8, made by its own converter

Before anything is timed the float32 logits must agree, and after it the tokens of the peer's
float32 format, if ours computes in float32 too; equal rows of other formats are only counted.
"""
import contextlib
import dataclasses
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
    with_biases,
)
from lab.benchmarks.llama import LlamaCpp
from lab.benchmarks.setting import (
    build,
    check_length,
    compiles,
    contexts_and_batches,
    facts,
    model_config,
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


def run(s, data_root: Path) -> dict:
    """The document with all cells."""
    check_settings(s)
    check_peer(s)
    modules = imported(s.against)
    shapes, config = contexts_and_batches(s), model_config(s, data_root)
    config.bias, config.gelu = True, 'tanh'  # as OpenAI's GPT-2, which is what the others compute
    check_vanilla(config, s.against)
    check_length(config, [max(shapes)[0]], s.steps)
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
        document['cells'] = [cell(models, peer, random_tokens(ours, batch, context), s)
                             for context, batch in shapes]
    return document


def check_peer(s) -> None:
    """Raises UserError for settings that these engines cannot be compared under."""
    if compiles(s):
        raise UserError(f'compile=True: against={s.against!r} nothing is compiled')
    if 'gelu' in s.given and s.gelu != 'tanh':
        raise UserError(f"gelu={s.gelu!r}: against={s.against!r} it is 'tanh', OpenAI's GPT-2's")
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
    """The largest difference of float32 logits on a random text."""
    idx = random_tokens(ours, 1, min(CHECKED, ours.config.block_size))
    return float((peer.logits(idx) - ours(idx, all_logits=True)[0]).abs().max())


def cell(models, peer, prompt, s) -> dict:
    """`measure`'s cell of a prompt (B, T), with the ratios of the full stack to every side."""
    own_float32 = s.weight_dtype == 'auto' and s.kv_dtype in ('auto', 'float32')
    with contextlib.ExitStack() as stack:
        theirs = peer.sides(prompt, s.steps, stack)
        sides = {name: Ours(model, prompt, s.steps, kv_dtype=s.kv_dtype)
                 for name, model in models.items()} | theirs
        tolerances = {name: peer.tolerance if own_float32 and name == peer.float32 else None
                      for name in theirs}
        found = measure(models['ours'], sides, prompt, s, tolerances)
    tpot, ttft = ({name: side[key]['each'] for name, side in found['sides'].items()}
                  for key in ('tpot_ms', 'ttft_ms'))
    found['full_stack_ratios'] = {'tokens_per_second': clock.ratios(tpot, 'full stack'),
                                  'ttft': clock.ratios(ttft, 'full stack')}
    return found


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
        kinds = ', '.join(one.compute_type for one in self.generators.values())
        return {'ctranslate2': self.lib.__version__, 'ctranslate2 arithmetic': kinds}

    def logits(self, idx):
        """Of sequences (B, T), at all positions: (B, T, V)."""
        out = self.generators[self.float32].forward_batch(idx.tolist())
        return torch.from_numpy(np.array(out))

    def sides(self, prompt, steps: int, _stack) -> dict:
        """Name -> what generates."""
        return {name: CTranslate2Round(generator, prompt, steps)
                for name, generator in self.generators.items()}


class CTranslate2Round:
    """`generate_batch` of the prompt; it calls back for each token of each row (some 10 us)."""

    def __init__(self, generator, prompt, steps: int):
        self.generator, self.steps = generator, steps
        self.prompt = [[str(token) for token in row] for row in prompt.tolist()]

    def __call__(self) -> Generated:
        first = []

        def stamp(result):
            if result.step == 0:
                first.append(clock.now())
            return False  # go on
        start = clock.now()
        found = self.generator.generate_batch(
            self.prompt, max_length=self.steps, max_batch_size=len(self.prompt), callback=stamp,
            end_token=[], include_prompt_in_result=False)  # no token ends a text
        tokens = torch.tensor([each.sequences_ids[0] for each in found])
        return Generated.timed(start, (first[-1], clock.now()), tokens)


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
