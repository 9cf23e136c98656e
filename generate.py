"""The generation loop (one prefill, then one token at a time through the cache) and nanoGPT's
sampler.

    for tokens in Generation(model, prompts, 100, Sampler(temperature=0.8, top_k=200)):
        print(tokens)                        # (B, 1), one new token per prompt
"""
import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from common.errors import UserError


class Sampler:
    """Samples the next token of each row, as nanoGPT does.

    Args:
        temperature: divides the logits; 0 picks the most likely token.
        top_k: sample only from the k most likely tokens, and those that tie with the k-th; 0 = all.
        generators: one torch.Generator per row, so that a row's samples do not depend on the other
            rows; None = the global generator for all rows, as in nanoGPT.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, generators=None):
        self.temperature, self.top_k, self.generators = temperature, top_k, generators

    @torch.no_grad()
    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V) logits -> (B, 1) token ids."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits / self.temperature
        probs = F.softmax(logits.masked_fill(logits < self.lowest(logits), -torch.inf), dim=-1)
        if self.generators is None:
            return draw(probs)
        rows = zip(probs, self.generators, strict=True)
        return torch.cat([draw(row[None], generator) for row, generator in rows])

    def lowest(self, logits):
        """(B, 1): tokens with at least this logit may be sampled."""
        return kth_largest(logits, self.top_k)


def kth_largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """(B, V) -> (B, 1): the k-th largest, or -inf if k is 0 or V is not larger."""
    n = logits.size(-1)
    if not 0 < k < n:
        return torch.full_like(logits[:, :1], -torch.inf)
    if logits.device.type == 'cpu':  # NumPy is up to 80 times faster there
        kth = [np.partition(row, n - k)[n - k] for row in logits.numpy()]
        return torch.from_numpy(np.array(kth, logits.numpy().dtype)[:, None])
    return logits.topk(k).values[:, -1:]


def draw(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """(B, V) probabilities -> (B, 1) ids, like `torch.multinomial`."""
    if probs.device.type == 'cpu':
        return torch.multinomial(probs, num_samples=1, generator=generator)
    return draw_without_waiting(probs, generator)


def draw_without_waiting(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """Like `draw`, but without multinomial's check of `probs`, which waits for the device."""
    noise = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / noise).argmax(-1, keepdim=True)


def cache_length(config, n_prompt: int, max_new_tokens: int) -> int:
    """Number of positions that a cache needs; n_prompt is the length of the longest prompt."""
    total = n_prompt + max_new_tokens
    return total if config.pos_embedding == 'rope' else min(total, config.block_size)


class Generation:
    """Iterator over the next tokens of a batch of prompts, as (B, 1) tensors.

    It ends after `max_new_tokens`, or when all rows are finished, by a stop token (which is still
    yielded) or by `finish`. A row's tokens do not depend on the other prompts. Finished rows are
    still fed and repeat their last token: rows of equal length keep equal lengths, which is fast.

    With learned positions, nanoGPT crops to the last block_size tokens and renumbers them at every
    step. So past block_size, each token of a row needs a full forward pass, as in nanoGPT.

    Args:
        prompts: (B, t) tensor, or B lists (or 1-D tensors) of token ids, at least one token each.
        cache: an empty cache of B rows and at least `cache_length` positions; None = a new one.
        stop_tokens: ids that finish a row when sampled in it.
        decode: a faster decode step over `cache`, (B, 1) ids and lens -> (B, V) logits, such as an
            `engine.steps.captured.CapturedDecode`; None = the model's own.
    Raises UserError if there is no prompt, one is empty, or a token id is outside the vocabulary.
    """

    def __init__(self, model, prompts, max_new_tokens: int, sampler: Sampler, cache=None,
                 stop_tokens=(), decode=None):
        self.model, self.sampler, self.max_new_tokens = model.eval(), sampler, max_new_tokens
        self.prompts = _checked_prompts(prompts, model)               # B of (t_b,)
        self.prompt_lens = [p.numel() for p in self.prompts]
        self.stop_tokens, vocab_size = frozenset(map(int, stop_tokens)), model.config.vocab_size
        for token in self.stop_tokens:
            if not 0 <= token < vocab_size:
                raise UserError(f'stop token {token}: the model has tokens 0 to {vocab_size - 1}')
        self.limit = model.config.block_size if model.rotary is None else None
        if cache is None and any(self._fits(n) for n in self.prompt_lens):
            longest = max(self.prompt_lens)
            length = cache_length(model.config, longest, max_new_tokens)
            cache = model.new_cache(len(self.prompts), length)
        self.cache, self.decode = cache, decode
        self.finished = [False] * len(self.prompts)
        self.made = []                                                # one (B, 1) per step
        self.last = torch.stack([p[-1:] for p in self.prompts])       # (B, 1)

    def finish(self, row: int) -> None:
        """Mark a row as complete."""
        self.finished[row] = True

    def __iter__(self):
        return self

    @torch.inference_mode()
    def __next__(self) -> torch.Tensor:
        if len(self.made) >= self.max_new_tokens or all(self.finished):
            raise StopIteration
        logits = self._logits()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        # only once, since reading the logits waits for the device
        if not self.made and logits.isnan().any():
            raise UserError('the model gives NaN logits for the prompt: its weights have '
                            'diverged, or overflow in this dtype')
        new = self.sampler(logits)
        if any(self.finished):
            finished = torch.tensor(self.finished, device=new.device)[:, None]
            new = torch.where(finished, self.last, new)
        if self.stop_tokens:
            for row, token in enumerate(new.flatten().tolist()):
                self.finished[row] |= token in self.stop_tokens
        self.last = new
        self.made.append(new)
        return new

    def _fits(self, n: int) -> bool:
        return self.limit is None or n <= self.limit

    def _logits(self) -> torch.Tensor:
        """(B, V) logits of the next token of each row; undefined for finished rows."""
        cached = [self._fits(n + len(self.made)) for n in self.prompt_lens]
        beyond = [row for row, done in enumerate(self.finished) if not (done or cached[row])]
        logits = self._from_cache(cached) if any(cached) else None
        if beyond:
            contexts = torch.stack([self._context(row) for row in beyond])
            recomputed = self.model(contexts)[0][:, -1]
            if logits is None:
                logits = recomputed.new_zeros(len(cached), recomputed.size(1))
            logits[beyond] = recomputed
        return logits

    def _from_cache(self, cached: list[bool]) -> torch.Tensor:
        """(B, V) logits after appending prompts (right-padded) or last tokens to `cached` rows."""
        if self.made:
            idx, lens = self.last, [int(c) for c in cached]
            if self.decode:
                return self.decode(idx, lens)
        else:
            prompts = [p if c else p[:0] for p, c in zip(self.prompts, cached)]
            idx, lens = pad_sequence(prompts, batch_first=True), [len(p) for p in prompts]
        return self.model(idx, cache=self.cache, lens=lens)[0][:, -1]

    def _context(self, row: int) -> torch.Tensor:
        """(block_size,): the last tokens of a row that is longer than that."""
        made = [step[row] for step in self.made[-self.limit:]]
        return torch.cat([self.prompts[row], *made])[-self.limit:]


def _checked_prompts(prompts, model) -> list[torch.Tensor]:
    prompts = [torch.as_tensor(p, dtype=torch.int64, device=model.device) for p in prompts]
    if not prompts:
        raise UserError('there is no prompt: give at least one')
    for b, p in enumerate(prompts):
        if p.dim() != 1:
            raise UserError('prompts are a (B, t) tensor or a list of lists of ids; one has shape '
                            f'{tuple(p.shape)}')
        if not p.numel():
            which = f' ({b})' if len(prompts) > 1 else ''
            raise UserError(f'the prompt{which} has no tokens: give at least one')
    low, high = (int(x) for x in torch.cat(prompts).aminmax())
    if low < 0 or high >= model.config.vocab_size:
        raise UserError(f'the prompts have ids from {low} to {high}: the model has tokens 0 to '
                        f'{model.config.vocab_size - 1}')
    return prompts


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, stop_tokens=()):
    """nanoGPT's `generate`, cached: idx (B, t) -> (B, t + n), sampled with the global generator.

    n is max_new_tokens, or less if all rows end on a stop token. Shorter rows are padded
    with their stop token.
    """
    training, sampler = model.training, Sampler(temperature, top_k or 0)
    try:
        new = list(Generation(model, idx, max_new_tokens, sampler, stop_tokens=stop_tokens))
    finally:
        model.train(training)
    return torch.cat([idx, *new], dim=1)
