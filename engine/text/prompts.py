"""Prompts from the user: one text (`start`), or a file of many (`prompts`). No torch here."""
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from config.errors import UserError
from engine.requests.params import SamplingParams, encodable, present, shown


def read_start(start: str) -> tuple[str, str]:
    """Return (where, text): `start` itself, or the file of 'FILE:path'. `where` is for messages.
    Raises UserError if the file cannot be read as UTF-8."""
    where = f'start={start!r}' if len(start) <= 200 else f'start={start[:200]!r}...'
    return where, _read(start[5:], where) if start.startswith('FILE:') else start


def encode_prompt(tokenizer, where: str, text: str) -> list[int]:
    """Token ids of a prompt. Raises UserError for unknown characters or no tokens."""
    try:
        ids = tokenizer.encode(text)
    except UserError as e:
        raise UserError(f'{where}: {e}') from e
    if not ids:
        raise UserError(f'{where}: the prompt has no tokens; give at least one character')
    return ids


@dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts. A non-empty `error` explains what is wrong with it."""
    where: str                             # "prompts='many.jsonl', line 3"
    line_number: int                       # starting at 1
    id: str | int | float | bool | None    # from the line, returned with its answer
    prompt: str                            # '' if it cannot be read
    params: SamplingParams
    error: str = ''
    given: tuple[str, ...] = ()            # parameters that the line itself sets, e.g. ('seed',)
    ids: Sequence[int] = ()                # token ids of the prompt, from `encode_requests`


def read_requests(path: str, defaults: SamplingParams) -> list[PromptLine]:
    """Read the requests in the file `path`, in order; blank lines are skipped.

    In a `.jsonl` file each line is a JSON string, the prompt, or an object with "prompt" and
    optionally "id" and fields of `SamplingParams` that override `defaults`. In any other file each
    line is a prompt, without its line end. An invalid line gets an `error`, and the other lines
    still run. Raises UserError if the file cannot be read as UTF-8 or has no prompts.
    """
    # not splitlines(): a prompt may contain U+2028 and the like
    lines = enumerate(_read(path, f'prompts={path!r}').split('\n'), 1)
    requests = [_request(path, number, line, defaults) for number, line in lines if line.strip()]
    if not requests:
        raise UserError(f'prompts={path!r}: the file has no prompts; write one a line')
    return requests


def _request(path, number, line, defaults) -> PromptLine:
    where = f'prompts={path!r}, line {number}'
    if not path.lower().endswith('.jsonl'):
        return PromptLine(where, number, None, line, defaults)
    request = PromptLine(where, number, None, '', defaults)
    try:
        given = _json_object(line)
        request = replace(request, id=_id(given))  # kept even if the rest is wrong
        request = replace(request, prompt=_prompt(given), given=tuple(present(given)))
        return replace(request, params=SamplingParams.from_dict(given, defaults))
    except UserError as e:
        return replace(request, error=f'{where}: {e}')


def encode_requests(tokenizer, requests: list[PromptLine]) -> list[PromptLine]:
    """Return the requests with token ids; one whose prompt cannot be encoded gets an `error`."""
    def encoded(request):
        try:
            return replace(request, ids=encode_prompt(tokenizer, request.where, request.prompt))
        except UserError as e:
            return replace(request, error=str(e))
    return [request if request.error else encoded(request) for request in requests]


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text(encoding='utf-8-sig')  # some editors write a byte order mark
    except OSError as e:
        raise UserError(f'{where}: cannot be read: {e.strerror or e}') from e
    except ValueError as e:  # not UTF-8, or a null character in the path
        raise UserError(f'{where}: cannot be read as UTF-8 text: {e}') from e


def _json_object(line: str) -> dict:
    try:
        given = encodable(json.loads(line, parse_constant=_finite, parse_float=_finite))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f'{shown(line)} is not JSON ({e}): write a string, "like\\nthis", '
                        'or an object, {"prompt": "like this", "temperature": 0.8}') from e
    given = {'prompt': given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise UserError(f'{shown(line)}: must be a JSON string, or an object with "prompt"')
    return given


def _id(given: dict):
    """Remove and return the id from `given`; None if it has none."""
    name = given.pop('id', None)
    if isinstance(name, (dict, list)):
        raise UserError(f'id={shown(name)}: must be a text, a number, true, false or null')
    return name


def _prompt(given: dict) -> str:
    """Remove and return the prompt from `given`."""
    if 'prompt' not in given:
        raise UserError(f'{shown(given)}: must have "prompt", the text to continue')
    prompt = given.pop('prompt')
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f'prompt={shown(prompt)}: must be a text of at least one character')
    return prompt


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise UserError(f'{shown(text)} is not a finite number')
    return float(text)
