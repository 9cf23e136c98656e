"""The generation loop: prefill once, then a token at a time through the cache; prompts may differ in length."""
import torch
from torch.nn.utils.rnn import pad_sequence

from config.errors import UserError
from engine.captured import captured_decode
from engine.sampler import Sampler

WORTH_CAPTURING = 32  # tokens: the capture takes as long as some dozens of plain steps


def cache_length(model, n_prompt: int, max_new_tokens: int) -> int:
    """Positions a cache needs for this generation; with learned positions never more than block_size.

    n_prompt: tokens of the (longest) prompt.
    """
    total = n_prompt + max_new_tokens
    return total if model.rotary is not None else min(total, model.config.block_size)


def recomputes(model, n_prompt: int, max_new_tokens: int) -> bool:
    """Whether tokens past block_size will be made by full recomputation (learned positions only, see `Generation`)."""
    return model.rotary is None and n_prompt + max_new_tokens - 1 > model.config.block_size


def longest_context(config) -> int:
    """Tokens that chat.py and serve.py let the model see by default.

    A model with RoPE and local layers gets 32 times its block_size, up to 8,192: as far as the demo
    model was found to predict as well as within its block_size (results/demo/contexts.jsonl)."""
    extends = config.pos_embedding == 'rope' and config.window_size and 'L' in config.layer_pattern
    return max(config.block_size, min(32 * config.block_size, 8192)) if extends else config.block_size


class Generation:
    """The next tokens of a batch of prompts, an iterator over (B, 1) tensors:

        generation = Generation(model, [[15496], [995, 11, 314]], 100, Sampler(0.8), stop_tokens=(50256,))
        for tokens in generation:
            if row_has_said_enough(tokens[1]):
                generation.finish(1)

    It ends after `max_new_tokens`, or when all rows are finished: by a stop token, which is the last one they give, or by
    `finish`. Each row gets the tokens that its prompt would get alone. Rows that are finished are fed all the same while
    others go on, so that rows of one length stay of one length (which is the fast way through the cache), and a row's
    random numbers do not depend on when another is finished; what comes out of them is their last token again.

    With learned positions nanoGPT crops to the last block_size tokens and numbers them from 0 again at every step, which
    changes every cached key: past block_size, and only there, each token of a row is made by a full forward, exactly as
    nanoGPT does, while shorter rows go on through the cache.

    Args:
        prompts: (B, t) tensor, or a list of B lists (or 1-D tensors) of token ids; each at least one token.
        max_new_tokens: per row.
        cache: an empty cache of B rows and at least `cache_length` positions; made here if None.
        stop_tokens: ids that finish the row they are drawn in.
    Raises:
        UserError: no prompt, one without tokens or with ids outside of the vocabulary, such a stop token.
    """

    def __init__(self, model, prompts, max_new_tokens: int, sampler: Sampler, cache=None, stop_tokens=()):
        self.model, self.sampler, self.max_new_tokens = model.eval(), sampler, max_new_tokens
        self.prompts = [torch.as_tensor(p, dtype=torch.int64, device=model.device) for p in prompts]  # B of (t_b,)
        self.prompt_lens = [p.numel() for p in self.prompts]  # on the host: a step must not wait for the device
        self.stop_tokens = _checked(stop_tokens, model.config.vocab_size)
        if not self.prompts:
            raise UserError('there is no prompt: give at least one')
        for p in self.prompts:
            if p.dim() != 1:
                raise UserError(f'prompts are a (B, t) tensor or a list of lists of ids; one has shape {tuple(p.shape)}')
        if 0 in self.prompt_lens:
            which = f' ({self.prompt_lens.index(0)})' if len(self.prompts) > 1 else ''
            raise UserError(f'the prompt{which} has no tokens: give at least one')
        low, high = (int(x) for x in torch.cat(self.prompts).aminmax())
        if low < 0 or high >= model.config.vocab_size:
            raise UserError(f'the prompts have ids from {low} to {high}: the model has tokens 0 to '
                            f'{model.config.vocab_size - 1}')
        self.limit = model.config.block_size if model.rotary is None else None
        if cache is None and any(self._fits(n) for n in self.prompt_lens):
            cache = model.new_cache(len(self.prompts), cache_length(model, max(self.prompt_lens), max_new_tokens))
        self.cache = cache
        worth_it = cache is not None and max_new_tokens >= WORTH_CAPTURING
        self.decode = captured_decode(model, cache) if worth_it else None
        self.finished = [False] * len(self.prompts)
        self.checked = False
        self.made = []                                                        # one (B, 1) per step
        self.last = torch.stack([p[-1:] for p in self.prompts])               # (B, 1)

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
        if not self.checked:  # once: a model that is broken is so from the start, and looking makes the device wait
            self.checked = True
            if logits.isnan().any():
                raise UserError('the model gives NaN logits for the prompt: its weights have diverged, or overflow in this '
                                'dtype')
        new = self.sampler(logits)
        if any(self.finished):
            new = new.where(~torch.tensor(self.finished, device=new.device)[:, None], self.last)
        if self.stop_tokens:
            for row, token in enumerate(new.flatten().tolist()):
                self.finished[row] |= token in self.stop_tokens
        self.last = new
        self.made.append(new)
        return new

    def _fits(self, n: int) -> bool:
        return self.limit is None or n <= self.limit

    def _logits(self) -> torch.Tensor:
        """(B, V): of the next token of each row; those of finished rows may mean nothing."""
        cached = [self._fits(n + len(self.made)) for n in self.prompt_lens]
        beyond = [row for row, done in enumerate(self.finished) if not (done or cached[row])]
        logits = self._from_cache(cached) if any(cached) else None
        if beyond:
            recomputed = self.model(torch.stack([self._context(row) for row in beyond]))[0][:, -1]
            logits = recomputed.new_zeros(len(cached), recomputed.size(1)) if logits is None else logits
            logits[beyond] = recomputed
        return logits

    def _from_cache(self, cached: list[bool]) -> torch.Tensor:
        """(B, V) after appending the prompts (padded on the right), or each row's last token, to the rows in `cached`."""
        if self.made:
            idx, lens = self.last, [int(c) for c in cached]
            if self.decode:
                return self.decode(idx, lens)
        else:
            idx = pad_sequence([p if c else p[:0] for p, c in zip(self.prompts, cached)], batch_first=True)
            lens = [n if c else 0 for n, c in zip(self.prompt_lens, cached)]
        return self.model(idx, cache=self.cache, lens=lens)[0][:, -1]

    def _context(self, row: int) -> torch.Tensor:
        """(block_size,): the last tokens of a row that is longer than that."""
        made = [step[row] for step in self.made[-self.limit:]]
        return torch.cat([self.prompts[row], *made])[-self.limit:]


def _checked(stop_tokens, vocab_size: int) -> frozenset[int]:
    stop_tokens = frozenset(int(token) for token in stop_tokens)
    for token in stop_tokens:
        if not 0 <= token < vocab_size:
            raise UserError(f'stop token {token}: the model has tokens 0 to {vocab_size - 1}')
    return stop_tokens


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, stop_tokens=()) -> torch.Tensor:
    """nanoGPT's `generate`, cached: idx (B, t) -> (B, t + n), drawn from the global generator.

    n is max_new_tokens; with stop tokens it may be less, when all rows have ended on one. A row that ends before others
    is filled up with the stop token it ended on; the others draw what they would without stop tokens.
    """
    training = model.training
    try:
        new = list(Generation(model, idx, max_new_tokens, Sampler(temperature, top_k or 0), stop_tokens=stop_tokens))
    finally:
        model.train(training)
    return torch.cat([idx, *new], dim=1)
