"""A request's parameters (`SamplingParams`) and its result (`Completion`). No torch here."""
import copy
import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from common.errors import UserError, shown

MAX_INT = 2 ** 31 - 1
SURROGATE = re.compile('[\ud800-\udfff]')
MIN_TEMPERATURE = 1e-4  # below it, sampling is greedy
# limits of a JSON object
MAX_LOGPROBS = 20
MAX_STOP_LENGTH = 1_000  # characters
MAX_ITEMS = {'stop': (16, 'texts'), 'stop_tokens': (1_000, 'tokens')}

# parameter -> type, check for allowed values, and their description in errors
RANGES = {
    'max_new_tokens': (int, lambda x: 1 <= x <= MAX_INT, f'at least 1 and at most {MAX_INT:,}'),
    'temperature': (float, lambda x: x >= 0, 'at least 0 (greedy)'),
    'top_k': (int, lambda x: -1 <= x <= MAX_INT, f'at least -1 (all) and at most {MAX_INT:,}'),
    'top_p': (float, lambda x: 0 <= x <= 1, 'at least 0 and at most 1'),
    'min_p': (float, lambda x: 0 <= x < 1, 'at least 0 and below 1'),
    'repetition_penalty': (float, lambda x: 1e-3 <= x <= 1e3, 'from 0.001 to 1000 (1 = off)'),
    'seed': (int, lambda x: -2 ** 63 <= x < 2 ** 64, 'at least -2**63 and below 2**64'),
    'logprobs': (int, lambda x: -1 <= x <= MAX_INT, f'at least -1 and at most {MAX_INT:,}'),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are sampled, and where they end.

    The restrictions apply in the order of Hugging Face's `generate`: repetition penalty,
    temperature, top-k, top-p, min-p; `engine.requests.sampler.lowest_kept` defines the last three.

    Equivalent values become one: top_p=0 and temperatures below 1e-4 are greedy, top_k=-1 is 0, and
    '' is no stop text. Raises UserError if a value has the wrong type or is out of range.
    """
    max_new_tokens: int = 128
    temperature: float = 1.0         # divides the logits; 0 = greedy
    top_k: int = 0                   # only the k most likely; 0 = all
    top_p: float = 1.0               # only the most likely that sum to this probability; 1 = all
    min_p: float = 0.0               # relative to the most likely token's probability; 0 = all
    repetition_penalty: float = 1.0  # above 1, tokens in prompt or text become less likely
    seed: int = 0                    # the random number of token t depends only on (seed, t)
    stop_tokens: tuple[int, ...] = ()  # token ids that end the text
    stop: tuple[str, ...] = ()       # stop texts, see engine/requests/stopping.py
    logprobs: int = -1               # -1: none; 0: the sampled token; k: also the top k
    ignore_eos: bool = False         # do not end at the tokenizer's end-of-text token

    def __post_init__(self):
        checked = {'stop_tokens': _stop_tokens(self.stop_tokens), 'stop': _stop_texts(self.stop)}
        for name, (kind, allows, allowed) in RANGES.items():
            checked[name] = _number(name, getattr(self, name), kind)
            if not allows(checked[name]):
                raise UserError(f'{name}={shown(checked[name])}: must be {allowed}')
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f'ignore_eos={shown(self.ignore_eos)}: must be true or false')
        if checked['temperature'] < MIN_TEMPERATURE or checked['top_p'] == 0:
            checked |= {'temperature': 0.0, 'top_p': checked['top_p'] or 1.0}
        checked['top_k'] = max(checked['top_k'], 0)
        self.__dict__.update(checked)  # the dataclass is frozen

    @classmethod
    def from_dict(cls, given: dict, defaults: 'SamplingParams | None' = None) -> 'SamplingParams':
        """`defaults` updated from the `present` fields of a JSON object, in which 'stop' may also
        be a single text. Raises UserError for an unknown key or an invalid value."""
        allowed = [f.name for f in fields(cls)]
        given = present(given)
        for key in given:
            if key not in allowed:
                raise UserError(unknown('key', key, allowed))
        for key, (most, what) in MAX_ITEMS.items():  # before anything looks at each item
            items = given.get(key)
            if isinstance(items, (list, tuple)) and len(items) > most:
                raise UserError(f'{key}={shown(items)}: {len(items):,} {what}, at most {most:,}')
        params = replace(defaults or cls(), **given)
        if any(len(stop) > MAX_STOP_LENGTH for stop in params.stop) and 'stop' in given:
            raise UserError(f'stop={shown(params.stop)}: a text has more than {MAX_STOP_LENGTH:,} '
                            'characters')
        if params.logprobs > MAX_LOGPROBS and 'logprobs' in given:
            raise UserError(f'logprobs={params.logprobs}: must be at most {MAX_LOGPROBS}')
        return params

    def variant(self, **values) -> 'SamplingParams':
        """A copy with other values, which must be valid: nothing is checked again."""
        other = copy.copy(self)
        other.__dict__.update(values)
        return other


class TokenLogprob(NamedTuple):
    """Log-probabilities at one position, in nats, from the model's logits: before the repetition
    penalty, temperature and restrictions (as in OpenAI's API and vLLM)."""
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first

    def as_json(self) -> dict:
        return {'token': self.token, 'logprob': self.logprob,
                'top': [{'token': token, 'logprob': logprob} for token, logprob in self.top]}


@dataclass
class Completion:
    """The result of one request."""
    prompt_tokens: list[int]
    tokens: list[int]                           # generated, without the prompt
    text: str                                   # of `tokens`, cut at a stop text
    finish_reason: str                          # 'length', 'stop', 'error' or 'cancelled'
    error: str = ''                             # what went wrong, if finish_reason is 'error'
    logprobs: list[TokenLogprob] | None = None  # one per token, if requested
    ttft_s: float | None = None                 # from submission to the first token, if any
    seconds: float | None = None                # from submission to the end
    n_cached: int = 0                           # prompt tokens reused from the prefix cache


def sample_seed(seed: int, k: int) -> int:
    """The seed of sample k of a run: `seed` itself for k = 0, otherwise a hash of both."""
    mixed = np.random.SeedSequence((seed % 2 ** 64, k)).generate_state(2).view(np.uint64)[0]
    return seed if k == 0 else int(mixed >> 1)


def unknown(what: str, name, allowed: list[str]) -> str:
    """The message for a key or field of a JSON object that is not one of `allowed`."""
    near = difflib.get_close_matches(str(name)[:60], allowed, n=1)
    guess = f', did you mean {near[0]!r}?' if near else ''
    return f'unknown {what} {shown(name)}{guess} (allowed are {", ".join(allowed)})'


def present(given: dict) -> dict:
    """The fields of a JSON object that say something: null, '', [] and {}, and the seed -1, are
    the same as omitting one."""
    return {name: value for name, value in given.items()
            if value not in (None, '', [], {}) and (name, value) != ('seed', -1)}


def encodable(value):
    """JSON with U+FFFD for each half of a surrogate pair, which JSON can encode, UTF-8 cannot."""
    if isinstance(value, str):
        return SURROGATE.sub('\ufffd', value)
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return value


def whole(value) -> int | None:
    """An int, also of a float such as 50.0, as some JSON libraries write it; otherwise None."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else None


def check_prompt(ids: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for a prompt without tokens, or with one that the model does not have."""
    if not ids:
        raise UserError('the prompt has no tokens: give at least one')
    check_tokens('the prompt has token', ids, vocab_size)


def check_tokens(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError for a token that the model does not have."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UserError(f'{what} {shown(wrong)}: the model has tokens 0 to {vocab_size - 1}')


def _number(name: str, value, kind: type) -> int | float:
    number = whole(value) if kind is int else value
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not is_number or kind is float and not abs(number) <= sys.float_info.max:
        allowed = 'an integer' if kind is int else 'a finite number'
        raise UserError(f'{name}={shown(value)}: must be {allowed}')
    return kind(number)


def _stop_tokens(value) -> tuple[int, ...]:
    tokens = tuple(map(whole, value)) if isinstance(value, (list, tuple)) else (None,)
    if not all(token is not None and token >= 0 for token in tokens):
        raise UserError(f'stop_tokens={shown(value)}: must be a list of token ids '
                        '(integers of at least 0)')
    return tokens


def _stop_texts(value) -> tuple[str, ...]:
    stops, wrong = (value,) if isinstance(value, str) else value, ''
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        wrong = 'must be a text or a list of texts'
    elif any(map(SURROGATE.search, stops)):
        wrong = 'a stop text must not have half a surrogate pair: no token decodes to it'
    if wrong:
        raise UserError(f'stop={shown(value)}: {wrong}')
    return tuple(stop for stop in stops if stop)
