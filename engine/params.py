"""What one request asks for (`SamplingParams`) and what it gets (`Completion`). No torch here."""
import difflib
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from config.errors import UserError

LARGEST = 2 ** 31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and where they end.

    The restrictions apply in the order of Hugging Face's `generate`: repetition penalty,
    temperature, top-k, top-p, min-p; `engine/sampler.py` says exactly what each keeps.

    Raises:
        UserError: a value of the wrong type or out of range; the message names it and what is
            allowed.
    """
    max_new_tokens: int = 128
    temperature: float = 1.0         # divides the logits; 0 = greedy, else at least 1e-4
    top_k: int = 0                   # only the k likeliest; 0 = all
    # only the likeliest that together have this probability (Holtzman et al. 2019); 1 = all
    top_p: float = 1.0
    # only those with this share of the likeliest's probability (Nguyen et al. 2024); 0 = all
    min_p: float = 0.0
    # above 1: tokens seen in prompt or text get less likely (Keskar et al. 2019); 1 = off
    repetition_penalty: float = 1.0
    seed: int = 0                    # the random number of token t is a function of (seed, t) alone
    stop_tokens: tuple[int, ...] = ()  # token ids that end the text
    stop: tuple[str, ...] = ()       # texts that end the text, looked for by engine/stopping.py
    # -1 none; 0 of each chosen token; k > 0 also the k likeliest at each place
    logprobs: int = -1

    def __post_init__(self):
        put = partial(object.__setattr__, self)  # how a frozen dataclass is given a value
        for name, low, high in (('max_new_tokens', 1, LARGEST), ('top_k', 0, LARGEST),
                                ('logprobs', -1, LARGEST), ('seed', -2 ** 63, 2 ** 64 - 1)):
            _check_int(name, getattr(self, name), low, high)
        for name in ('temperature', 'top_p', 'min_p', 'repetition_penalty'):
            put(name, _number(name, getattr(self, name)))
        if not (self.temperature == 0 or self.temperature >= 1e-4):
            raise UserError(f'temperature={self.temperature}: must be 0 (greedy) or at least 1e-4')
        if not 0 < self.top_p <= 1:
            raise UserError(f'top_p={self.top_p}: must be above 0 and at most 1')
        if not 0 <= self.min_p < 1:
            raise UserError(f'min_p={self.min_p}: must be at least 0 and below 1')
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise UserError(f'repetition_penalty={self.repetition_penalty}: '
                            'must be from 0.001 to 1000 (1 = off)')
        put('stop_tokens', _stop_tokens(self.stop_tokens))
        put('stop', _stop_texts(self.stop))

    @classmethod
    def from_dict(cls, given: dict, defaults: 'SamplingParams | None' = None) -> 'SamplingParams':
        """`defaults` with what a JSON object says otherwise; 'stop' may be one text or a list of
        them.

        Raises:
            UserError: an unknown key (with those that look like it, and all there are), or a wrong
                value.
        """
        if not isinstance(given, dict):
            raise UserError(f'{shown(given)}: must be an object of sampling parameters, '
                            'such as {"temperature": 0.8}')
        allowed = [f.name for f in fields(cls)]
        for key in given:
            if key not in allowed:
                near = difflib.get_close_matches(str(key), allowed, n=3)
                guess = f', did you mean {" or ".join(map(repr, near))}?' * bool(near)
                raise UserError(f'unknown key {shown(key)}{guess} '
                                f'(allowed are {", ".join(allowed)})')
        return replace(defaults or cls(), **given)


class TokenLogprob(NamedTuple):
    """Natural logarithms of probabilities at one place of the text, of the model's own
    distribution: before penalty, temperature and restrictions (as OpenAI's API and vLLM report
    them)."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob) of the likeliest, in falling order

    def as_json(self) -> dict:
        return {'token': self.token, 'logprob': self.logprob,
                'top': [{'token': token, 'logprob': logprob} for token, logprob in self.top]}


@dataclass
class Completion:
    """What the engine returns for one request."""
    prompt_tokens: list[int]
    tokens: list[int]                           # generated, without the prompt
    text: str                                   # of `tokens`, cut at a stop text
    finish_reason: str                          # one of FINISH_REASONS
    error: str = ''                             # what went wrong, if finish_reason is 'error'
    logprobs: list[TokenLogprob] | None = None  # one per token, if they were asked for
    # from submission to the first token; None = there was none
    ttft_s: float | None = None
    seconds: float | None = None                # from submission to the end
    # prompt tokens that an earlier request had computed (`prefix_budget`)
    n_cached: int = 0

    FINISH_REASONS = ('length', 'stop', 'error', 'cancelled')

    def __post_init__(self):
        if self.finish_reason not in self.FINISH_REASONS:
            raise ValueError(f'finish_reason={self.finish_reason!r}: '
                             f'must be one of {self.FINISH_REASONS}')

    def as_json(self) -> dict:
        """A dict of plain lists, numbers and texts."""
        logprobs = self.logprobs and [entry.as_json() for entry in self.logprobs]
        return asdict(self) | {'logprobs': logprobs}


def sample_seed(seed: int, k: int) -> int:
    """The seed of sample k of a run with `seed`: that itself for k = 0, for others a number mixed
    from both."""
    mixed = np.random.SeedSequence((seed % 2 ** 64, k)).generate_state(2).view(np.uint64)[0]
    return seed if k == 0 else int(mixed >> 1)


def shown(value) -> str:
    """`repr`, cut to a length that suits a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more than 4,300 digits, a list nested too deep
        return f'a very large {type(value).__name__}'
    return text if len(text) <= 60 else text[:57] + '...'


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value, low: int, high: int):
    if not _is_int(value):
        raise UserError(f'{name}={shown(value)}: must be an integer')
    if not low <= value <= high:
        allowed = f'at least {low:,}' if value < low else f'at most {high:,}'
        allowed = 'at least -2**63 and below 2**64' if name == 'seed' else allowed
        raise UserError(f'{name}={shown(value)}: must be {allowed}')


def _number(name: str, value) -> float:
    try:
        if isinstance(value, float) or _is_int(value):
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:  # an int that no float can hold
        pass
    raise UserError(f'{name}={shown(value)}: must be a finite number')


def _stop_tokens(value) -> tuple[int, ...]:
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(_is_int(token) and token >= 0 for token in value):
        raise UserError(f'stop_tokens={shown(value)}: must be a list of token ids '
                        '(integers of at least 0)')
    return tuple(value)


def _stop_texts(value) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise UserError(f'stop={shown(value)}: must be a text or a list of texts')
    for stop in stops:
        if not stop:
            raise UserError(f'stop={shown(value)}: a stop text must have at least one character')
        if has_surrogate(stop):
            raise UserError(f'stop={shown(value)}: a stop text must not have half a surrogate '
                            'pair: it can never come up')
    return tuple(stops)


def has_surrogate(text: str) -> bool:
    """Half a surrogate pair is no character: JSON can spell it, UTF-8 cannot."""
    return any('\ud800' <= c <= '\udfff' for c in text)
