"""The command line of the prepare.py scripts, whose errors are one line."""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from config.errors import UserError


class Arguments(argparse.ArgumentParser):
    """A script's command line: --help prints the docstring, bad input raises UserError."""

    def __init__(self, doc: str, script: str = ''):
        """script: its `__file__`, whose folder is the default of --out; '' = no --out."""
        super().__init__(description=doc, allow_abbrev=False,
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


def fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


def whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


# names for argparse's errors
fraction.__name__, whole.__name__ = 'share between 0 and 1', 'positive whole number'
