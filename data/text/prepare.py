"""Prepare a dataset from text files of your own.

    python data/text/prepare.py --input=book.txt                           # one file, or several
    python data/text/prepare.py --input ~/src/project --glob='*.py' --tokenizer=gpt2 --name=mycode

writes data/text/ (or data/NAME/), which train.py knows as --dataset=text (or NAME).

Which files: those given, and in folders given the ones whose name matches --glob, at any depth, without hidden ones (.git).
They must be UTF-8; files that are not, that hold a zero byte, or that are empty are skipped, counted and named. Line ends
become \\n. The order is that of --input, and in a folder that of the paths.
The split: of several files whole ones are held out, in an order drawn from a hash of their paths, each that still fits into
the share --val of all characters. If they come to less than half of that share (large files, or only one), the last
characters of the largest file are held out instead.
What follows each file: with --tokenizer=gpt2 the token <|endoftext|> (50256); with char the end of its last line, if it
lacks one, and two empty lines. Nothing is added to a single file.
A folder under data/ with a dataset that this program did not make (it leaves source.json, which tells the settings) is only
written to with --overwrite.
With char, every character of the files gets an id, in sorted order (meta.pkl); with gpt2 there is no meta.pkl.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs as a script from anywhere

from configurator import run_program
from data.datasets import DATA_ROOT
from data.making.script import Arguments, fraction
from data.making.textfiles import check_name, find_files, prepare, scan, split

BY_HAND = 'it is made from files of your own, which --input names'


def main(argv: list[str] | None = None) -> None:
    """Make the dataset as the module's docstring says. UserError for files or options that give none."""
    parser = Arguments(__doc__)
    parser.add_argument('--input', type=Path, nargs='+', required=True, metavar='PATH', help='files and folders')
    parser.add_argument('--glob', default='*', metavar='PATTERN', help="which files of folders, e.g. '*.py' (default: all)")
    parser.add_argument('--tokenizer', choices=('char', 'gpt2'), default='char', help='(default: char)')
    parser.add_argument('--val', type=fraction, default=0.1, metavar='SHARE', help='share held out (default: 0.1)')
    parser.add_argument('--name', default='text', help='the folder under data/ to write to (default: text)')
    parser.add_argument('--overwrite', action='store_true', help='replace a dataset that this program did not make')
    args = parser.parse_args(argv)
    folder = check_name(args.name, DATA_ROOT, args.overwrite)
    texts, alphabet = scan(find_files(args.input, args.glob), args.tokenizer)
    settings = {'input': [str(path.resolve()) for path in args.input], 'glob': args.glob, 'tokenizer': args.tokenizer,
                'val': args.val}
    prepare(folder, split(texts, args.val), alphabet if args.tokenizer == 'char' else None, settings)
    where = '' if args.name == 'text' else f' --dataset={args.name} --out_dir=out-{args.name}'
    print(f'train a small model on it, of a size for a laptop: python train.py config/train_text.py{where}')


if __name__ == '__main__':
    run_program(main)
