"""The command lines of the prepare.py scripts and of others, whose errors are one line."""
import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from common.errors import UserError


class Arguments(argparse.ArgumentParser):
    """A script's command line: --help prints its docstring `doc`, bad input raises UserError.
    script: its `__file__`, whose folder is the default of --out; '' = no --out."""

    def __init__(self, doc: str, script: str = '', prog: str | None = None):
        super().__init__(prog, description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)
        if script:
            self.add_argument('--out', type=Path, metavar='DIR',
                              default=Path(script).resolve().parent,
                              help='where to write (default: the folder of this script)')

    def tokenizer(self, default: str, names: tuple[str, ...] = ('char', 'gpt2')) -> None:
        """Add --tokenizer, one of `names` or bpe:N."""
        def tokenizer_name(text: str) -> str:
            if text not in names and not re.fullmatch(r'bpe:\d{1,6}', text):
                raise argparse.ArgumentTypeError(
                    f'{text!r}: allowed are {", ".join(names)} and bpe:N')
            return text

        self.add_argument('--tokenizer', type=tokenizer_name, default=default, metavar='NAME',
                          help=f'{", ".join(names)} or bpe:N, N tokens learned from the training '
                               f'texts (default: {default})')

    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message} (--help lists what is allowed)')


def _number(kind: type, name: str, allowed: Callable) -> Callable:
    """Return a type for argparse, whose errors have its name."""
    def number(text: str):
        if not allowed(value := kind(text)):
            raise ValueError
        return value

    number.__name__ = name
    return number


fraction = _number(float, 'share between 0 and 1', lambda value: 0 < value < 1)
whole = _number(int, 'positive whole number', lambda value: value >= 1)
