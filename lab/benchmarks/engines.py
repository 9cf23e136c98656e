"""Greedy generation with our model and with other programs that have the same vanilla weights.

A peer is created from (our model in float32, a folder, an ExitStack), which raises ImportError if
the package is not installed, and has
    logits(idx)                 float32 logits of all positions: (B, T) -> (B, T, V)
    sides(prompt, steps, stack) name in the tables -> callable that returns a `Generated`
    facts()                     facts for the document
"""
import contextlib
import importlib.util
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from config.errors import UserError
from config.gpt_config import NANOGPT_FIELDS, GPTConfig
from engine.steps.decode import fast_decode
from interop.export import hf_model
from lab.benchmarks import clock, setting
from training.device import synchronize

# name in the tables -> generate's cache_implementation
HF_CACHES = {'hf dynamic': None, 'hf static': 'static'}


class Generated(NamedTuple):
    """One round: seconds to the first token and per later token; the new tokens (B, steps)."""
    ttft: float
    tpot: float
    tokens: torch.Tensor


def timed(generate, device=torch.device('cpu')) -> Generated:
    """Time `generate(stamp)`, which calls `stamp` after each token, or after the first and the last
    only, and returns the new tokens (B, steps)."""
    stamps = []

    def stamp(*_):
        synchronize(device)
        stamps.append(clock.now())

    stamp()
    tokens = generate(stamp)
    start, first, last = stamps[0], stamps[1], stamps[-1]
    return Generated(first - start, (last - first) / (tokens.size(1) - 1), tokens)


class Ours:
    """`model` with its cache: the prompt in one call, then token by token."""

    def __init__(self, model, prompt, steps: int, captured: bool = True, kv_dtype: str = 'auto'):
        self.model, self.prompt, self.steps = model, prompt, steps
        B, T = prompt.shape
        self.cache = model.new_cache(B, T + steps, kv_dtype)
        self.kv_bytes = self.cache.nbytes
        self.decode = fast_decode(model, self.cache, captured)
        if self.decode:
            self.decode.prepare(B)

    def __call__(self) -> Generated:
        self.cache.reset()
        return timed(self.generate, self.model.device)

    @torch.inference_mode()
    def generate(self, stamp) -> torch.Tensor:
        tokens = [setting.one_token(self.model, self.cache, None, self.prompt)]
        stamp()
        for _ in range(self.steps - 1):
            tokens.append(setting.one_token(self.model, self.cache, self.decode, tokens[-1]))
        stamp()
        return torch.cat(tokens, dim=1)


class HuggingFace:
    """transformers' GPT2LMHeadModel, with each of its caches."""
    exact, tolerance = tuple(HF_CACHES), 1e-4  # sides whose float32 logits are compared

    def __init__(self, ours, _folder, _stack):
        self.ours, self.model = ours, hf_model(ours)

    def facts(self) -> dict:
        return {'transformers': version('transformers'),
                'activation_function': self.model.config.activation_function}

    def logits(self, idx):
        return self.model(idx).logits

    def sides(self, prompt, steps: int, _stack) -> dict:
        self.model.to(self.ours.device, self.ours.dtype)
        return {name: partial(timed, partial(self.generate, prompt, steps, cache), prompt.device)
                for name, cache in HF_CACHES.items()}

    @torch.inference_mode()
    def generate(self, prompt, steps: int, cache: str | None, stamp) -> torch.Tensor:
        # the model's config has no end-of-text token, so every row gets all its tokens
        options = dict(max_new_tokens=steps, do_sample=False, pad_token_id=0,
                       attention_mask=torch.ones_like(prompt))
        if cache:
            options['cache_implementation'] = cache
        # it is given the prompt first, which is of two dimensions
        put = lambda tokens: stamp() if tokens.dim() == 1 else None
        streamer = SimpleNamespace(put=put, end=lambda: None)
        return self.model.generate(prompt, streamer=streamer, **options)[:, prompt.size(1):]


class NanoGPT:
    """nanoGPT's `generate`, which recomputes the context for every token; greedy is top_k=1."""
    exact, tolerance = ('nanogpt',), 1e-4

    def __init__(self, ours, folder, _stack):
        self.ours, self.model = ours, nanogpt(ours, folder)

    def facts(self) -> dict:
        return {}

    def logits(self, idx):
        return self.model(idx, idx)[0]  # it returns all logits only if given targets

    def sides(self, prompt, steps: int, _stack) -> dict:
        self.model.to(self.ours.device, self.ours.dtype)
        return {'nanogpt': partial(timed, partial(self.generate, prompt, steps), prompt.device)}

    @torch.inference_mode()
    def generate(self, prompt, steps: int, stamp) -> torch.Tensor:
        with self.model.register_forward_hook(stamp):
            return self.model.generate(prompt, steps, top_k=1)[:, prompt.size(1):]


def check_vanilla(config, against: str) -> None:
    """Raise UserError if the program given by `against` does not support the model."""
    shared = {*NANOGPT_FIELDS}
    if against != 'nanogpt':
        shared |= {'gelu', 'mlp_hidden'}
    wrong = [f'{name}={value!r}' for name, value in vars(config).items()
             if name not in shared and value != getattr(GPTConfig, name)]
    if wrong:
        raise UserError(f'against={against!r} runs both with the same weights, so the model must '
                        f"be vanilla GPT-2, without {', '.join(wrong)}; against='vanilla' measures "
                        'the gain of the memory settings')


def nanogpt_module(folder: str):
    """Return the module model.py of nanoGPT's checkout. UserError: if there is none."""
    path = Path(folder) / 'model.py'
    if not folder or not path.is_file():
        raise UserError(f"nanogpt={folder!r}: against='nanogpt' needs the folder of a nanoGPT "
                        'checkout, with its model.py')
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module  # needed by dataclasses
    spec.loader.exec_module(module)
    return module


def nanogpt(ours, folder: str):
    """Return nanoGPT's own GPT, from the checkout in `folder`, with our weights, in eval mode."""
    module = nanogpt_module(folder)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its size
        fields = {name: getattr(ours.config, name) for name in NANOGPT_FIELDS}
        model = module.GPT(module.GPTConfig(**fields))
    model.load_state_dict(ours.state_dict(), strict=False)  # its own may contain causal masks
    return model.eval()
