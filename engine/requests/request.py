"""A request: its prompt and progress, and what its samples, its text and its times depend on. No
torch here."""
import operator
import time
from dataclasses import dataclass, field

import numpy as np

from common.errors import UserError
from engine.requests.params import Completion, SamplingParams, TokenLogprob, shown
from engine.requests.stopping import SampleText

NUMBERS = 64  # random numbers that a request computes at a time


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


@dataclass(eq=False)
class Request:
    """A prompt with its parameters and progress. `number`: assigned in order of submission. client,
    salt: as in `Engine.submit`. tokenizer: None = it has no text.

    `Request(number, prompt, params, tokens=tokens)` resumes a request exactly."""
    number: int
    prompt: list[int]
    params: SamplingParams
    client: str = ''
    salt: bytes = b''
    tokenizer: object = None
    tokens: list[int] = field(default_factory=list)      # generated, and known on the host
    in_flight: int = 0                                   # 1 = one more was sampled, not read yet
    # of the scheduler
    num_computed_tokens: int = 0                         # prompt and generated, in the cache
    row: int = -1                                        # -1 = not running
    preempted: int = 0                                   # how many times
    last_block: object = None                            # in the prefix store
    chunk_ends: list[int] = field(default_factory=list)  # `PrefixStore.chunk_ends`
    num_cached_tokens: int = -1                          # reused when it first ran; -1 = not yet
    due: int = -1                                        # see `Scheduler.due`; -1 = never ran

    def __post_init__(self):
        p = self.params
        self.submitted, self.first_token = time.perf_counter(), None
        self.num_emitted = 0  # number of tokens whose event was emitted
        self.logprobs = [] if p.logprobs >= 0 else None
        self.stop_tokens = set(p.stop_tokens)
        if self.tokenizer and not p.ignore_eos:
            self.stop_tokens.add(self.tokenizer.end_of_text)  # None: no token equals it
        self.penalised = p.repetition_penalty != 1.0
        # whether only the temperature changes how it is sampled
        restrictions = p.top_k, p.top_p, p.min_p, p.logprobs
        self.plain = restrictions == (0, 1, 0, -1) and not self.penalised
        self._numbers, self._numbers_from = [], 0  # random numbers, the first one's token
        self.restore()

    def restore(self) -> list[str]:
        """Rebuild what depends on the tokens. Returns the text of each."""
        self.text = None
        if self.tokenizer:
            self.text = SampleText(self.tokenizer.stream(), self.params.stop)
        self.seen = set()  # for the repetition penalty
        if self.penalised:
            self.seen.update(self.prompt, self.tokens)
        return [self._piece(token) for token in self.tokens]

    def _piece(self, token: int) -> str:
        is_text = self.text and token not in self.stop_tokens
        return self.text.add(token) if is_text else ''

    def take(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Append a token, which is no longer in flight. Returns the new text."""
        self.in_flight = 0
        if self.logprobs is not None:
            self.logprobs[len(self.tokens):] = [logprob]
        self.tokens.append(token)
        if self.penalised:
            self.seen.add(token)
        return self._piece(token)

    def uniform(self) -> float:
        """The random number of the next token."""
        position = len(self.tokens) + self.in_flight
        place = position - self._numbers_from
        if not 0 <= place < len(self._numbers):
            self._numbers = uniforms(self.params.seed, position, NUMBERS)
            self._numbers_from, place = position, 0
        return self._numbers[place]

    def ending(self) -> str:
        """'stop', 'length', or '' if the request continues."""
        in_text = self.text and self.text.stopped
        if in_text or self.tokens and self.tokens[-1] in self.stop_tokens:
            return 'stop'
        return 'length' if len(self.tokens) >= self.params.max_new_tokens else ''

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens) + self.in_flight

    @property
    def max_positions(self) -> int:
        """Cache positions needed; the last sampled token is never appended to the cache."""
        return len(self.prompt) + self.params.max_new_tokens - 1

    @property
    def pending(self) -> int:
        """Number of tokens not in the cache yet; 1 while decoding: the last sampled token."""
        return self.length - self.num_computed_tokens

    @property
    def finishing(self) -> bool:
        """Whether its last token is in flight."""
        return self.in_flight > 0 and len(self.tokens) + 1 >= self.params.max_new_tokens

    @property
    def decoding(self) -> bool:
        return self.num_computed_tokens > 0 and self.pending == 1 and not self.finishing

    def next_tokens(self, n: int) -> list[int]:
        """The first n tokens that are not in the cache yet."""
        start = self.num_computed_tokens
        if start >= len(self.prompt):
            return self.tokens[start - len(self.prompt):][:n]
        return (self.prompt[start:start + n] + self.tokens)[:n]


def uniforms(seed: int, position: int, n: int) -> list[float]:
    """n numbers in [0, 1), each a function of only the seed (modulo 2**64) and its position, which
    count from `position`.

    Philox4x64-10 (Salmon et al. 2011) maps a key and a counter to four 64-bit numbers, without
    state. The first of them is used.
    """
    bits = np.random.Philox(key=seed % 2 ** 64, counter=position).random_raw(4 * n)[::4]
    return ((bits >> np.uint64(11)) * 2.0 ** -53).tolist()


def prompt_ids(prompt: str | list[int], tokenizer) -> list[int]:
    """The token ids of a prompt. Raises UserError if it is neither a text nor a list of ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError('the prompt is text, and the engine has no tokenizer: give token ids')
        return tokenizer.encode(prompt)
    try:
        tokens = prompt.tolist() if hasattr(prompt, 'tolist') else prompt  # of a tensor
        return list(map(operator.index, tokens))
    except TypeError:
        raise UserError(f'prompt={shown(prompt)}: must be a text or a list of token ids') from None
