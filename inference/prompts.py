"""Prompts that people give: one text (`start`), or a file of many (`prompts`). No torch here."""
import json
from pathlib import Path

from config.errors import UserError


def read_prompts(start: str, path: str) -> list[tuple[str, str]]:
    """(where, text) of each prompt: those in the file `path` or, if that is '', the one that `start` is or names.

    A file has one prompt a line, without the line's end; in a `.jsonl` file each line is a JSON string, so that prompts
    may have several lines. Blank lines are passed over. `where` is for error messages: 'prompts='many.txt', line 3'.

    Raises:
        UserError: a file that cannot be read as UTF-8, without prompts, or with a line that is no JSON string.
    """
    if not path:
        where = f'start={start!r}' if len(start) <= 200 else f'start={start[:200]!r}...'
        return [(where, _read(start[5:], where) if start.startswith('FILE:') else start)]
    lines = _read(path, f'prompts={path!r}').split('\n')  # not splitlines(): a prompt may contain U+2028 and the like
    numbered = [(f'prompts={path!r}, line {n}', line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f'prompts={path!r}: the file has no prompts; write one a line')
    if path.lower().endswith('.jsonl'):
        return [(where, _json_string(where, line)) for where, line in numbered]
    return numbered


def encode_prompts(tokenizer, prompts: list[tuple[str, str]]) -> list[list[int]]:
    """Token ids of each prompt. UserError names the prompt with characters that the alphabet lacks, or no tokens."""
    encoded = []
    for where, text in prompts:
        try:
            encoded.append(tokenizer.encode(text))
        except UserError as e:
            raise UserError(f'{where}: {e}') from e
        if not encoded[-1]:
            raise UserError(f'{where}: the prompt has no tokens; give at least one character')
    return encoded


def _read(path: str, where: str) -> str:
    try:
        return Path(path).read_text(encoding='utf-8-sig')  # some editors begin UTF-8 files with a mark
    except (OSError, ValueError) as e:  # ValueError: not UTF-8, or a null character in the path
        raise UserError(f'{where}: cannot be read as UTF-8 text: {e}') from e


def _json_string(where: str, line: str) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f'{where}: {line[:60]!r} is not JSON ({e}): write each prompt as a JSON string, "like\\nthis"') from e
    if not isinstance(text, str):
        raise UserError(f'{where}: {line[:60]!r} is not a JSON string: write each prompt as one, "like\\nthis"')
    return text
