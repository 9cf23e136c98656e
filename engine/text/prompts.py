"""Prompts from the user: one text (`start`), or a file of many (`prompts`). No torch here."""
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import UserError
from common.files import read_text
from engine.requests.params import encodable, shown


def read_start(start: str) -> tuple[str, str]:
    """Return (where, text): `start` itself, or the file of 'FILE:path'. `where` is for messages.
    Raises UserError if the file cannot be read as UTF-8."""
    where = f'start={start!r}' if len(start) <= 200 else f'start={start[:200]!r}...'
    return where, read_text(start[5:], where) if start.startswith('FILE:') else start


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
    prompt: str = ''                       # '' if it cannot be read
    error: str = ''
    ids: Sequence[int] = ()                # token ids of the prompt, from `encode_lines`
    max_new_tokens: int = 0                # from `engine.text.many.fitted`


def read_lines(path: str) -> list[PromptLine]:
    """Read the prompts in the file `path`, in order; blank lines are skipped.

    In a `.jsonl` file each line is a JSON string, or an object with "prompt" alone. In any other
    file each line is a prompt, without its line end. An invalid line gets an `error`, and the
    other lines still run. Raises UserError if the file cannot be read as UTF-8 or has no prompts.
    """
    # not splitlines(): a prompt may contain U+2028 and the like
    lines = enumerate(read_text(path, f'prompts={path!r}').split('\n'), 1)
    prompts = [_line(path, number, line) for number, line in lines if line.strip()]
    if not prompts:
        raise UserError(f'prompts={path!r}: the file has no prompts; write one a line')
    return prompts


def _line(path, number, text) -> PromptLine:
    line = PromptLine(f'prompts={path!r}, line {number}', number)
    try:
        return replace(line, prompt=_prompt(text) if path.lower().endswith('.jsonl') else text)
    except UserError as e:
        return replace(line, error=f'{line.where}: {e}')


def encode_lines(tokenizer, lines: list[PromptLine]) -> list[PromptLine]:
    """Return the lines with token ids; one whose prompt cannot be encoded gets an `error`."""
    def encoded(line):
        try:
            return replace(line, ids=encode_prompt(tokenizer, line.where, line.prompt))
        except UserError as e:
            return replace(line, error=str(e))
    return [line if line.error else encoded(line) for line in lines]


def _prompt(line: str) -> str:
    """The prompt in a line of JSON."""
    try:
        given = encodable(json.loads(line))
    except (ValueError, RecursionError) as e:
        raise UserError(f'{shown(line)} is not JSON ({e}): write a string, "like\\nthis", '
                        'or an object, {"prompt": "like this"}') from e
    if isinstance(given, dict):
        for key in given:
            if key != 'prompt':
                raise UserError(f'unknown key {shown(key)}: an object has "prompt" alone; '
                                'settings are flags, for all lines')
        given = given.get('prompt')
    if not isinstance(given, str) or not given:
        raise UserError(f'{shown(line)}: must be a JSON string of at least one character, or an '
                        'object with such a "prompt"')
    return given
