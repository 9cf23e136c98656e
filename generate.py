"""The generation loop, prefill once then a token at a time through the cache, and nanoGPT's
sampler.

    for tokens in Generation(model, prompts, 100, Sampler(temperature=0.8, top_k=200)):
        print(tokens)                        # (B, 1), one new token per prompt
"""
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from config.errors import UserError


class Sampler:
    """Draws the next token of each row.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest (ties with the k-th included, as in nanoGPT); 0 = all.
        top_p: only the likeliest that together have this probability, above 0 (Holtzman et al.
            2019); 1 = all.
        generators: one torch.Generator per row, so that a row's draws do not depend on what else is
            in the batch; None = all rows from the global generator, as in nanoGPT.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
                 generators=None):
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generators = generators

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, V) logits -> (B, 1) token ids."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        probs = F.softmax(self._restricted(logits / self.temperature), dim=-1)
        if self.generators is None:
            return draw(probs)
        rows = zip(probs, self.generators, strict=True)
        return torch.cat([draw(row[None], generator) for row, generator in rows])

    def _restricted(self, logits):
        if self.top_k:
            kth = torch.topk(logits, min(self.top_k, logits.size(-1))).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = logits.sort(dim=-1, descending=True)
            probs = ordered.softmax(-1)
            beyond = probs.cumsum(-1) - probs >= self.top_p  # those before it have that already
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        return logits


def draw(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """(B, V) probabilities -> (B, 1) ids, as `torch.multinomial`."""
    if probs.device.type == 'cpu':
        return torch.multinomial(probs, num_samples=1, generator=generator)
    return draw_without_waiting(probs, generator)


def draw_without_waiting(probs: torch.Tensor, generator=None) -> torch.Tensor:
    """The same draw from the same random numbers, without multinomial's check of `probs`, which
    waits for the device."""
    noise = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / noise).argmax(-1, keepdim=True)


def cache_length(model, n_prompt: int, max_new_tokens: int) -> int:
    """Positions a cache needs for this generation; with learned positions at most block_size.

    n_prompt: tokens of the longest prompt.
    """
    total = n_prompt + max_new_tokens
    return total if model.rotary is not None else min(total, model.config.block_size)


def recomputes(model, n_prompt: int, max_new_tokens: int) -> bool:
    """Whether tokens past block_size will take full forward passes (see `Generation`)."""
    return model.rotary is None and n_prompt + max_new_tokens - 1 > model.config.block_size


class Generation:
    """The next tokens of a batch of prompts, an iterator over (B, 1) tensors:

        generation = Generation(model, [[15496], [995, 11]], 100, Sampler(0.8), stop_tokens=[50256])
        for tokens in generation:
            if row_has_said_enough(tokens[1]):
                generation.finish(1)

    It ends after `max_new_tokens`, or when all rows are finished, by a stop token (which is the
    last one they give) or by `finish`. Each row gets the tokens that its prompt would get alone.
    Finished rows are fed as long as others go on: so rows of one length keep one length, which is
    the fast way through the cache, and what a row draws does not depend on when another is
    finished. They give their last token again. (Batches of another shape round differently.)

    With learned positions nanoGPT crops to the last block_size tokens and numbers them from 0 again
    at every step, which changes every cached key. So past block_size, and only there, each token
    of a row takes a full forward pass, as in nanoGPT; shorter rows go on through the cache.

    Args:
        prompts: (B, t) tensor, or B lists (or 1-D tensors) of token ids, at least one token each.
        max_new_tokens: per row.
        cache: an empty cache of B rows and at least `cache_length` positions; None = a new one.
        stop_tokens: ids that finish the row they are drawn in.
        decode: a faster decode step over `cache`, (B, 1) ids and lens -> (B, V) logits, such as an
            `engine.captured.CapturedDecode`; None = the model's own.
    Raises:
        UserError: no prompt, one without tokens or with ids outside the vocabulary, such a stop
            token.
    """

    def __init__(self, model, prompts, max_new_tokens: int, sampler: Sampler, cache=None,
                 stop_tokens=(), decode=None):
        self.model, self.sampler, self.max_new_tokens = model.eval(), sampler, max_new_tokens
        self.prompts = _checked_prompts(prompts, model)               # B of (t_b,)
        self.prompt_lens = [p.numel() for p in self.prompts]
        self.stop_tokens = _checked_stops(stop_tokens, model.config.vocab_size)
        self.limit = model.config.block_size if model.rotary is None else None
        if cache is None and any(self._fits(n) for n in self.prompt_lens):
            longest = max(self.prompt_lens)
            cache = model.new_cache(len(self.prompts), cache_length(model, longest, max_new_tokens))
        self.cache, self.decode = cache, decode
        self.finished, self.checked = [False] * len(self.prompts), False
        self.made = []                                                # one (B, 1) per step
        self.last = torch.stack([p[-1:] for p in self.prompts])       # (B, 1)

    def finish(self, row: int) -> None:
        """This row needs no more tokens."""
        self.finished[row] = True

    def __iter__(self):
        return self

    @torch.inference_mode()
    def __next__(self) -> torch.Tensor:
        if len(self.made) >= self.max_new_tokens or all(self.finished):
            raise StopIteration
        logits = self._logits()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self.checked:  # only once: to look at the logits is to wait for the device
            self.checked = True
            if logits.isnan().any():
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
        """(B, V), of the next token of each row; those of finished rows may mean nothing."""
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
        """(B, V) after appending, to the rows in `cached`, the prompts (padded on the right) or
        each row's last token."""
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


def _checked_stops(stop_tokens, vocab_size: int) -> frozenset[int]:
    stop_tokens = frozenset(int(token) for token in stop_tokens)
    for token in stop_tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f'stop token {token}: the model has tokens 0 to {vocab_size - 1}')
    return stop_tokens


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, stop_tokens=()):
    """nanoGPT's `generate`, cached: idx (B, t) -> (B, t + n), drawn from the global generator.

    n is max_new_tokens; with stop tokens it is less if all rows have ended on one. A row that ends
    before others is filled up with its stop token.
    """
    training, sampler = model.training, Sampler(temperature, top_k or 0)
    try:
        new = list(Generation(model, idx, max_new_tokens, sampler, stop_tokens=stop_tokens))
    finally:
        model.train(training)
    return torch.cat([idx, *new], dim=1)
