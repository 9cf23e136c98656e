"""Greedy generation by our model, transformers and nanoGPT from the same vanilla weights.

Each gives the time to the first token (TTFT), and the mean time per further output token (TPOT).
"""
import contextlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from config.errors import UserError
from config.gpt_config import NANOGPT_FIELDS
from engine.decode import fast_decode
from interop.huggingface import TRANSPOSED
from kv.plan import plan_kv
from lab.benchmarks import clock
from lab.benchmarks.setting import make_cache
from training.device import synchronize

# our gelu -> activation_function of transformers' GPT2Config
ACTIVATIONS = {'exact': 'gelu', 'tanh': 'gelu_new'}
# name in the tables -> generate's cache_implementation
HF_CACHES = {'hf dynamic': None, 'hf static': 'static'}


@dataclass
class Generated:
    """One round: seconds to the first token and per further token; the new tokens (B, steps)."""
    ttft: float
    tpot: float
    tokens: torch.Tensor

    @classmethod
    def timed(cls, start, stamps, tokens) -> 'Generated':
        """stamps: when each token was there, or only the first and the last."""
        return cls(stamps[0] - start, (stamps[-1] - stamps[0]) / (tokens.size(1) - 1), tokens)


class Ours:
    """`model` through its cache: the prompt in one piece, then token by token."""

    def __init__(self, model, prompt, steps: int, captured: bool = True, kv_dtype: str = 'auto'):
        self.model, self.prompt, self.steps = model, prompt, steps
        self.cache = make_cache(model, prompt.size(0), prompt.size(1) + steps, kv_dtype)
        self.kv_bytes = self.cache.nbytes
        self.decode = fast_decode(model, self.cache, captured)
        if self.decode:
            self.decode.prepare(prompt.size(0))

    @torch.inference_mode()
    def __call__(self) -> Generated:
        self.cache.reset()
        synchronize(self.model.device)
        start, stamps, tokens = clock.now(), [], [self.prompt]
        for j in range(self.steps):
            if self.decode and j > 0:
                logits = self.decode(tokens[-1])
            else:
                logits = self.model(tokens[-1], cache=self.cache)[0][:, -1]
            tokens.append(logits.argmax(-1, keepdim=True))
            if j in (0, self.steps - 1):
                synchronize(self.model.device)
                stamps.append(clock.now())
        return Generated.timed(start, stamps, torch.cat(tokens[1:], dim=1))


class Stamps:
    """A streamer of transformers' `generate`: when the prompt and then each token came."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(clock.now())

    def end(self):
        pass


class HuggingFace:
    """`generate` of a GPT2LMHeadModel; cache: its `cache_implementation`, None: dynamic."""

    def __init__(self, hf_model, prompt, steps: int, cache: str | None):
        self.model, self.prompt = hf_model, prompt
        # the model's config has no end-of-text token: every row gets all its tokens
        self.options = dict(max_new_tokens=steps, do_sample=False, pad_token_id=0,
                            attention_mask=torch.ones_like(prompt))
        if cache:
            self.options['cache_implementation'] = cache

    @torch.inference_mode()
    def __call__(self) -> Generated:
        stamps = Stamps()
        synchronize(self.prompt.device)
        start = clock.now()
        tokens = self.model.generate(self.prompt, streamer=stamps, **self.options)
        return Generated.timed(start, stamps.times[1:], tokens[:, self.prompt.size(1):])


class NanoGPT:
    """nanoGPT's `generate`, which recomputes the context for every token; greedy is top_k=1."""

    def __init__(self, their_model, prompt, steps: int):
        self.model, self.prompt, self.steps = their_model, prompt, steps

    @torch.inference_mode()
    def __call__(self) -> Generated:
        stamps = []

        def stamp(*_):
            synchronize(self.prompt.device)
            stamps.append(clock.now())
        hook = self.model.register_forward_hook(stamp)
        synchronize(self.prompt.device)
        start = clock.now()
        try:
            tokens = self.model.generate(self.prompt, self.steps, top_k=1)
        finally:
            hook.remove()
        return Generated.timed(start, stamps, tokens[:, self.prompt.size(1):])


def check_vanilla(config, against: str) -> None:
    """Raises UserError where the program named by `against` does not have the model."""
    plan, wrong = plan_kv(config), {}
    if config.pos_embedding != 'learned':
        wrong['pos_embedding'] = config.pos_embedding
    if config.qk_norm:
        wrong['qk_norm'] = config.qk_norm
    if plan != plan.vanilla():
        memory = ('n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv')
        wrong |= {name: getattr(config, name) for name in memory if getattr(config, name)}
    if config.resolved_head_dim * config.n_head != config.n_embd:
        wrong['head_dim'] = config.head_dim
    if against == 'nanogpt' and config.resolved_mlp_hidden != 4 * config.n_embd:
        wrong['mlp_hidden'] = config.mlp_hidden
    if against == 'nanogpt' and config.gelu != 'exact':
        wrong['gelu'] = config.gelu
    if wrong:
        named = ', '.join(f'{name}={value!r}' for name, value in wrong.items())
        raise UserError(f'against={against!r} runs both with the same weights, so the model must '
                        f"be vanilla GPT-2, without {named}; against='vanilla' measures the gain "
                        'of the memory settings')


def hugging_face(ours):
    """A GPT2LMHeadModel with the weights of `ours` (vanilla, with biases), in eval mode.

    Raises:
        UserError: transformers is not installed.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError as e:
        raise UserError("against='hf' needs the transformers package: "
                        'pip install transformers') from e
    logging.set_verbosity_error()
    c = ours.config
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer,
        n_head=c.n_head, n_inner=c.resolved_mlp_hidden, activation_function=ACTIVATIONS[c.gelu],
        bos_token_id=None, eos_token_id=None, attn_implementation='sdpa'))
    model.load_state_dict({name: x.t() if name.endswith(TRANSPOSED) else x
                           for name, x in ours.state_dict().items()})
    return model.eval()


def check_checkout(folder: str) -> Path:
    """The model.py of nanoGPT's checkout; UserError where there is none."""
    path = Path(folder) / 'model.py'
    if not folder or not path.is_file():
        raise UserError(f"nanogpt={folder!r}: against='nanogpt' needs the folder of a nanoGPT "
                        'checkout, with its model.py')
    return path


def nanogpt(ours, folder: str):
    """nanoGPT's own GPT, from its checkout in `folder`, with the weights of `ours`, in eval mode.

    Raises:
        UserError: no nanoGPT there.
    """
    path = check_checkout(folder)
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['nanogpt_model'] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints its size
            fields = {name: getattr(ours.config, name) for name in NANOGPT_FIELDS}
            model = module.GPT(module.GPTConfig(**fields))
        missing, unknown = model.load_state_dict(ours.state_dict(), strict=False)
    except (AttributeError, TypeError, RuntimeError) as e:
        raise UserError(f"nanogpt={folder!r}: its model.py is not nanoGPT's ({type(e).__name__})"
                        ) from e
    # its state dict may hold causal masks
    if unknown or any(not name.endswith('attn.bias') for name in missing):
        raise UserError(f"nanogpt={folder!r}: its model.py is not nanoGPT's (other tensor names)")
    return model.eval()
