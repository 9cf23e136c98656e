"""The generation loop: prefill once, then a token at a time through the cache."""
import torch

from config.errors import UserError
from inference.sampler import Sampler


def cache_length(model, n_prompt: int, max_new_tokens: int) -> int:
    """Positions a cache needs for this generation; with learned positions never more than block_size."""
    total = n_prompt + max_new_tokens
    return total if model.rotary is not None else min(total, model.config.block_size)


def recomputes(model, n_prompt: int, max_new_tokens: int) -> bool:
    """Whether tokens past block_size will be made by full recomputation (learned positions only, see `token_stream`)."""
    return model.rotary is None and n_prompt + max_new_tokens - 1 > model.config.block_size


@torch.inference_mode()
def token_stream(model, idx: torch.Tensor, max_new_tokens: int, sampler: Sampler, cache=None):
    """Yield the next tokens, (B, 1) each time, `max_new_tokens` times.

    With learned positions nanoGPT crops to the last block_size tokens and numbers them from 0 again at every step, which
    changes every cached key: there, and only there, each token is made by a full forward, exactly as nanoGPT does.

    Args:
        idx: (B, t) prompt, t >= 1.
        cache: an empty cache of at least `cache_length` positions; made here if None.
    """
    if idx.size(1) == 0:
        raise UserError('the prompt has no tokens: give at least one')
    model.eval()
    limit = model.config.block_size if model.rotary is None else None
    if cache is None and (limit is None or idx.size(1) <= limit):
        cache = model.new_cache(idx.size(0), cache_length(model, idx.size(1), max_new_tokens))
    new = idx
    for _ in range(max_new_tokens):
        if limit is None or idx.size(1) <= limit:
            logits, _ = model(new, cache=cache)
        else:
            logits, _ = model(idx[:, -limit:])
        new = sampler(logits[:, -1].float() if logits.dtype != torch.float64 else logits[:, -1])
        idx = torch.cat([idx, new], dim=1)
        yield new


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None) -> torch.Tensor:
    """nanoGPT's `generate`, cached: idx (B, t) -> (B, t + max_new_tokens), drawn from the global generator."""
    training = model.training
    try:
        new = list(token_stream(model, idx, max_new_tokens, Sampler(temperature, top_k or 0)))
    finally:
        model.train(training)
    return torch.cat([idx, *new], dim=1)
