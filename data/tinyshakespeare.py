"""nanoGPT's tiny Shakespeare, the 1.1 MB that its shakespeare_char and shakespeare data sets are made of."""

from pathlib import Path

from config.errors import UserError
from data.download import fetch
from data.encode import read_blocks

URL = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def read_text(folder: Path, given: Path | None, script: str) -> str:
    """The text to prepare: of the file `given`, else of `folder`/input.txt, which is downloaded if it is not there.

    Only the download must be tiny Shakespeare to the byte (sha256); other texts are the user's own affair.
    script: the name of the prepare.py, for the advice in errors. UserError if there is no text to be had.
    """
    path = given
    if path is None:
        path = Path(folder) / 'input.txt'
        if not path.is_file():
            fetch(URL, path, SHA256, f'give the file, or any other text: python {script} --input=FILE')
    text = ''.join(read_blocks(path))
    if len(text) < 20:
        raise UserError(f'{str(path)!r} has {len(text)} characters; allowed are at least 20, to train on and to validate')
    return text


def halves(text: str) -> dict[str, str]:
    """nanoGPT's split: the first 90% of the characters are train, the rest val."""
    cut = int(len(text) * 0.9)
    return {'train': text[:cut], 'val': text[cut:]}
