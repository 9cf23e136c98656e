"""Prompts that people give: one text (`start`), or a file of many (`prompts`), plain or each with
parameters of its own. No torch here."""
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from config.errors import UserError
from engine.params import SamplingParams, has_surrogate, shown


def read_prompts(start: str, path: str) -> list[tuple[str, str]]:
    """(where, text) of each prompt: those in the file `path` or, if that is '', the one that
    `start` is or names.

    A file has one prompt a line, without the line's end; in a `.jsonl` file each line is a JSON
    string, so that prompts may have several lines. Blank lines are passed over. `where` is for
    error messages: 'prompts='many.txt', line 3'.

    Raises:
        UserError: a file that cannot be read as UTF-8, without prompts, or with a line that is no
            JSON string.
    """
    if not path:
        where = f'start={start!r}' if len(start) <= 200 else f'start={start[:200]!r}...'
        return [(where, _read(start[5:], where) if start.startswith('FILE:') else start)]
    lines = [(where, line) for where, _, line in _lines(path)]
    if _is_jsonl(path):
        return [(where, _json_string(where, line)) for where, line in lines]
    return lines


def encode_prompts(tokenizer, prompts: list[tuple[str, str]]) -> list[list[int]]:
    """Token ids of each prompt. UserError names the prompt with characters that the alphabet lacks,
    or no tokens."""
    encoded = []
    for where, text in prompts:
        try:
            encoded.append(tokenizer.encode(text))
        except UserError as e:
            raise UserError(f'{where}: {e}') from e
        if not encoded[-1]:
            raise UserError(f'{where}: the prompt has no tokens; give at least one character')
    return encoded


@dataclass(frozen=True)
class PromptLine:
    """One line of a file of prompts; an `error` that is not '' says what is wrong with it."""
    where: str                             # "prompts='many.jsonl', line 3"
    line_number: int                       # from 1
    # the line's own name for it, to be given back with the result; None = it has none
    id: str | int | float | bool | None
    prompt: str                            # '' = the line has none that can be read
    params: SamplingParams
    error: str = ''
    # the parameters that the line itself sets, such as ('seed',)
    given: tuple[str, ...] = ()


def read_requests(path: str, defaults: SamplingParams) -> list[PromptLine]:
    """The requests in the file `path`, in its order; blank lines are passed over.

    In a `.jsonl` file each line is a JSON string, the prompt, or an object with "prompt" and, as
    far as they differ from `defaults`, "id" and fields of `SamplingParams`; any other file has one
    prompt a line, without the line's end. A line with a mistake becomes one with an `error`, and
    the others still run.

    Raises:
        UserError: a file that cannot be read as UTF-8, or without prompts.
    """
    requests = []
    for where, number, line in _lines(path):
        request = PromptLine(where, number, None, '' if _is_jsonl(path) else line, defaults)
        try:
            if _is_jsonl(path):
                given = _json_object(line)
                request = replace(request, id=_id(given))  # known also if something else is wrong
                request = replace(request, prompt=_prompt(given))
                request = replace(request, params=SamplingParams.from_dict(given, defaults),
                                  given=tuple(given))
        except UserError as e:
            request = replace(request, error=f'{where}: {e}')
        requests.append(request)
    return requests


def encode_requests(tokenizer, requests: list[PromptLine]
                    ) -> tuple[list[PromptLine], list[list[int]]]:
    """The same requests with token ids of each; one whose prompt cannot be encoded gets an `error`
    and no ids."""
    checked, encoded = [], []
    for request in requests:
        ids = []
        try:
            if not request.error:
                [ids] = encode_prompts(tokenizer, [(request.where, request.prompt)])
        except UserError as e:
            request = replace(request, error=str(e))
        checked.append(request)
        encoded.append(ids)
    return checked, encoded


def _lines(path: str) -> list[tuple[str, int, str]]:
    """(where, number, line) of each line that is not blank. UserError if there are none."""
    # not splitlines(): a prompt may contain U+2028 and the like
    lines = _read(path, f'prompts={path!r}').split('\n')
    numbered = [(f'prompts={path!r}, line {n}', n, line)
                for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f'prompts={path!r}: the file has no prompts; write one a line')
    return numbered


def _is_jsonl(path: str) -> bool:
    return path.lower().endswith('.jsonl')


def _read(path: str, where: str) -> str:
    try:
        # some editors begin UTF-8 files with a mark
        return Path(path).read_text(encoding='utf-8-sig')
    except OSError as e:
        raise UserError(f'{where}: cannot be read: {e.strerror or e}') from e
    except ValueError as e:  # not UTF-8, or a null character in the path
        raise UserError(f'{where}: cannot be read as UTF-8 text: {e}') from e


def _json_string(where: str, line: str) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f'{where}: {line[:60]!r} is not JSON ({e}): '
                        'write each prompt as a JSON string, "like\\nthis"') from e
    if not isinstance(text, str):
        raise UserError(f'{where}: {line[:60]!r} is not a JSON string: '
                        'write each prompt as one, "like\\nthis"')
    return text


def _json_object(line: str) -> dict:
    """What the line says, as a dict."""
    try:
        given = json.loads(line, object_pairs_hook=_no_key_twice, parse_constant=_no_constant,
                           parse_float=_finite)
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        reason = 'nested too deep' if isinstance(e, RecursionError) else e
        raise UserError(f'{shown(line)} is not JSON ({reason}): write a string, "like\\nthis", '
                        'or an object, {"prompt": "like this", "temperature": 0.8}') from e
    given = {'prompt': given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise UserError(f'{shown(line)}: must be a JSON string, or an object with "prompt"')
    return given


def _id(given: dict):
    """Taken out of `given`; None if it has none."""
    name = given.pop('id', None)
    if isinstance(name, (dict, list)) or (isinstance(name, str) and has_surrogate(name)):
        raise UserError(f'id={shown(name)}: must be a text (without half a surrogate pair), '
                        'a number, true, false or null')
    return name


def _prompt(given: dict) -> str:
    """Taken out of `given`."""
    if 'prompt' not in given:
        raise UserError(f'{shown(given)}: must have "prompt", the text to go on from')
    prompt = given.pop('prompt')
    if not isinstance(prompt, str) or not prompt or has_surrogate(prompt):
        raise UserError(f'prompt={shown(prompt)}: must be a text of at least one character, '
                        'without half a surrogate pair')
    return prompt


def _no_key_twice(pairs):
    key, times = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ('', 1)
    if times > 1:
        raise UserError(f'key {shown(key)} is given twice')
    return dict(pairs)


def _no_constant(text: str):
    raise UserError(f'{text} is not a number that JSON has')


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise UserError(f'{shown(text)} is too large for a number')
    return float(text)
