"""State of a request that the engine keeps in addition to the scheduler's, and its events."""
import operator
from dataclasses import dataclass

import torch

from common.errors import UserError
from engine.requests.params import Completion, TokenLogprob, shown
from engine.requests.sampler import SampleRow
from engine.requests.scheduler import Request
from engine.requests.stopping import SampleText


@dataclass
class Event:
    """One token of a request, or its end.

    index: number of the request, in the order of submission. token: -1 = none (error, cancelled).
    text: new text that no stop text can still cut off. completion: only in the last event."""
    index: int
    token: int
    text: str = ''
    logprob: TokenLogprob | None = None
    completion: Completion | None = None


class Job:
    """The clock, sampler and text of a request."""

    def __init__(self, request: Request, tokenizer, now: float):
        self.request, self.tokenizer, self.submitted, self.first = request, tokenizer, now, None
        self.logprobs = [] if request.params.logprobs >= 0 else None
        self.num_emitted = 0  # number of tokens whose event was emitted
        self.stop_tokens = set(request.params.stop_tokens)
        if tokenizer and not request.params.ignore_eos:
            self.stop_tokens.add(tokenizer.end_of_text)  # None: no token equals it
        self.restore()

    def restore(self) -> list[str]:
        """Rebuild the sampler and the text from the tokens. Returns the text of each token."""
        params, tokens = self.request.params, self.request.tokens
        self.sampling = SampleRow(params, self.request.prompt + tokens, len(tokens))
        self.text = SampleText(self.tokenizer.stream(), params.stop) if self.tokenizer else None
        return [self._piece(token) for token in tokens]

    def _piece(self, token: int) -> str:
        is_text = self.text and token not in self.stop_tokens
        return self.text.add(token) if is_text else ''

    def launch(self) -> None:
        """Count a token that was sampled and is in flight."""
        self.request.in_flight = 1
        self.sampling.n_drawn += 1

    def take(self, token: int, logprob) -> str:
        """Append the token that was in flight. Returns the new text."""
        self.request.in_flight = 0
        if self.logprobs is not None:
            self.logprobs[len(self.request.tokens):] = [logprob]
        self.request.tokens.append(token)
        self.sampling.see(token)
        return self._piece(token)

    def ending(self) -> str:
        """'stop', 'length', or '' if the request continues."""
        params, tokens = self.request.params, self.request.tokens
        if tokens and (tokens[-1] in self.stop_tokens or (self.text and self.text.stopped)):
            return 'stop'
        return 'length' if len(tokens) >= params.max_new_tokens else ''


def prompt_ids(prompt: str | list[int], tokenizer) -> list[int]:
    """The token ids of a prompt. Raises UserError if it is neither a text nor a list of ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError('the prompt is text, and the engine has no tokenizer: give token ids')
        return tokenizer.encode(prompt)
    try:
        tokens = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        return list(map(operator.index, tokens))
    except TypeError:
        raise UserError(f'prompt={shown(prompt)}: must be a text or a list of token ids') from None
