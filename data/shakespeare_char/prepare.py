"""Prepare the shakespeare_char dataset: nanoGPT's tiny Shakespeare, character by character.

    python data/shakespeare_char/prepare.py               # downloads input.txt (1.1 MB) if missing
    python data/shakespeare_char/prepare.py --input=FILE  # any other UTF-8 text

The ids are nanoGPT's: the characters in sorted order. Train has 1,003,854 tokens and val 111,540;
the vocabulary is 65.
"""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from common.errors import UserError
from common.files import read_text
from configurator import run_program
from data.download import fetch
from data.making import textfiles
from data.making.script import Arguments

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def main(argv: list[str] | None = None) -> None:
    prepare(__doc__, __file__, argv, 'char')


def prepare(doc: str, script: str, argv: list[str] | None, tokenizer: str) -> None:
    """Run the main function of a prepare.py, given its docstring and `__file__`. Only the download
    is verified (sha256). The split is nanoGPT's: the first 90% of the characters are train, the
    rest val. tokenizer: 'char' or 'gpt2'."""
    parser = Arguments(doc, script)
    parser.add_argument('--input', type=Path, metavar='FILE',
                        help='the text, instead of the download')
    args = parser.parse_args(argv)
    path = args.input or args.out / 'input.txt'
    if not args.input and not os.path.isfile(path):
        fetch(URL, path, SHA256, 'give the file, or any other text: python '
              f'data/{Path(script).resolve().parent.name}/prepare.py --input=FILE')
    text = read_text(path, repr(str(path)))
    if len(text) < 20:
        raise UserError(f'{str(path)!r} has {len(text)} characters; '
                        'allowed are at least 20, to train on and to validate')
    cut = int(len(text) * 0.9)
    textfiles.prepare(args.out, {'train': [text[:cut]], 'val': [text[cut:]]}, tokenizer,
                      several=False)


if __name__ == '__main__':
    run_program(main)
