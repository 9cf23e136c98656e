"""Prepare the pysource dataset: source code of Python packages, whole packages held out.

    python data/pysource/prepare.py                      # fetches the packages with pip (44 MB)
    python data/pysource/prepare.py --wheels=DIR         # from wheels that you have
    python data/pysource/prepare.py --tokenizer=gpt2 --out=DIR

packages.txt pins each package by version and sha256 and names its licence (MIT, BSD or Apache 2.0).
All are wheels of pure Python: pip runs none of their code, and texts are read from the archives.

A document is a file with its path as the first line, `# networkx/utils/heaps.py`, and
<|endoftext|> after it; the files of a package follow each other by path. Left out: tests,
database migrations, translations, copies of other packages, exact duplicates, and files of less
than 200 or more than 100,000 bytes (tables and generated code, mostly). Tabs, indentation and
comments stay. The tokens (default: 4,096) are learned from the training packages. Of all passages
of six lines in the held-out packages, 0.3% also occur in the training packages.
"""
import hashlib
import io
import re
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.download import pip_download, read_checked
from data.making.script import Arguments
from data.making.textfiles import prepare

PACKAGES = Path(__file__).with_name('packages.txt')
REQUIREMENT = re.compile(r'(\S+)==(\S+) --hash=sha256:(\w{64})')
LEFT_OUT = re.compile(
    r'(^|/)(tests?|testing|migrations|locale|_?vendor|_?vendored|extern|_distutils|typeshed)/'
    r'|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$|\.(data|dist-info)/')
SIZES = range(200, 100_001)  # bytes of a file


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__, __file__)
    parser.add_argument('--wheels', type=Path, metavar='DIR',
                        help='the folder with the wheels to read, instead of pip')
    parser.tokenizer('bpe:4096', ('gpt2',))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as tmp:
        if args.wheels is None:
            pip_download(PACKAGES.read_text(encoding='utf-8'), Path(tmp), '--only-binary=:all:',
                         what='the packages of data/pysource/packages.txt',
                         hint='give the files: python data/pysource/prepare.py --wheels=DIR')
        splits = read_packages(args.wheels or Path(tmp))
    for name, texts in splits.items():
        print(f'{name}: {len(texts):,} files, {sum(map(len, texts)):,} characters')
    prepare(args.out, splits, args.tokenizer, several=True)


def read_packages(folder: Path) -> dict[str, list[str]]:
    """Return {'train': texts, 'val': texts} of the wheels in `folder`. Raises UserError if one is
    missing or has another sha256."""
    wheels = {(name.lower(), version): path for path in sorted(folder.glob('*.whl'))
              for name, version in [path.name.split('-')[:2]]}
    train, held_out = PACKAGES.read_text(encoding='utf-8').split('# held out\n')
    seen, splits = set(), {'train': [], 'val': []}
    # the held-out packages first, so that no training file is a copy of one of theirs
    for split, lines in (('val', held_out), ('train', train)):
        for name, version, sha256 in REQUIREMENT.findall(lines):
            path = wheels.get((name.replace('-', '_'), version), folder / f'{name}-{version}*.whl')
            wheel = read_checked(path, sha256, f'{name} {version}')
            splits[split] += read_wheel(wheel, seen)
    return splits


def read_wheel(wheel: bytes, seen: set[bytes]) -> list[str]:
    """Return the documents of a wheel by path, without those hashed in `seen`; add theirs."""
    documents = []
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            path = entry.filename
            if not path.endswith('.py') or LEFT_OUT.search(path) or entry.file_size not in SIZES:
                continue
            content = archive.read(entry)
            digest = hashlib.sha256(content).digest()
            if digest in seen:
                continue
            seen.add(digest)
            try:
                text = content.decode('utf-8-sig')
            except UnicodeDecodeError:
                continue  # another encoding
            text = text.replace('\r\n', '\n').replace('\r', '\n').strip('\n')
            documents.append(f'# {path}\n{text}\n')
    return documents


if __name__ == '__main__':
    run_program(main)
