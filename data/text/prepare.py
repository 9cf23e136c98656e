"""Prepare a dataset from text files of your own.

    python data/text/prepare.py --input=book.txt                           # one file, or several
    python data/text/prepare.py --input ~/src/project --glob='*.py' --tokenizer=gpt2 --name=mycode
    python data/text/prepare.py --input=book.txt --tokenizer=bpe:1024

writes data/text/ (or data/NAME/), which train.py knows as --dataset=text (or NAME).

Files: the given ones, and in given folders those whose name matches --glob, at any depth, except
hidden ones (.git). Files that are not UTF-8, contain a zero byte, are empty or equal to an earlier
one are skipped and reported. Line ends become \\n. The order is that of --input, and in a folder
that of the paths. All texts are in memory while they are prepared.
Split: of several files, whole ones are held out, in the order of a hash of their texts, as long as
they fit into the share --val of all characters. If they make up less than half of that share (large
files, or a single one), the last characters of the largest file are held out instead.
Tokens (--tokenizer): char, every character of the files, in sorted order; gpt2, GPT-2's 50,257;
bpe:N, N tokens learned from the train split, of which each is about 2 (N=512) to 3 (N=2048)
characters of English. gpt2 writes no meta.pkl.
After each file, unless there is only one: the token <|endoftext|>; with char a line end, if it
lacks one, and two empty lines.
A dataset in data/NAME/ is only replaced with --overwrite.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from common.errors import UserError
from common.settings import Model
from configurator import parse, run_program
from data.datasets import DATA_ROOT
from data.making.script import Arguments, fraction
from data.making.textfiles import check_name, find_files, prepare, read_texts, split

CONFIG = 'config/train_text.py'
BY_HAND = 'it is made from files of your own, which --input names'


def main(argv: list[str] | None = None) -> None:
    parser = Arguments(__doc__)
    parser.add_argument('--input', type=Path, nargs='+', required=True, metavar='PATH',
                        help='files and folders')
    parser.add_argument('--glob', default='*', metavar='PATTERN',
                        help="which files of folders, e.g. '*.py' (default: all)")
    parser.tokenizer('char')
    parser.add_argument('--val', type=fraction, default=0.1, metavar='SHARE',
                        help='share held out (default: 0.1)')
    parser.add_argument('--name', default='text',
                        help='the folder under data/ to write to (default: text)')
    parser.add_argument('--overwrite', action='store_true', help='replace a dataset in data/NAME/')
    args = parser.parse_args(argv)
    folder = check_name(args.name, DATA_ROOT, args.overwrite)
    texts = read_texts(find_files(args.input, args.glob))
    splits = split(texts, args.val)
    if args.tokenizer == 'char' and len(texts) > 1:  # two empty lines
        splits = {name: [text.removesuffix('\n') + '\n\n\n' for text in part]
                  for name, part in splits.items()}
    tokens = prepare(folder, splits, args.tokenizer, several=len(texts) > 1)
    flags = '' if args.name == 'text' else f' --dataset={args.name} --out_dir=out-{args.name}'
    advice = ''
    block_size = parse(Model, [CONFIG], echo=False).block_size
    shorter = min(tokens, key=tokens.get)
    longest = tokens[shorter] - 1  # window, because targets are one token later
    if longest < block_size:
        remedy = f"more text or a {'larger' if shorter == 'val' else 'smaller'} --val"
        if longest < 1:
            raise UserError(f'{shorter} has a single token, too little to train: give {remedy}')
        advice = f' ({shorter} is too short for block_size={block_size}; {remedy} also helps)'
        flags += f' --block_size={1 << longest.bit_length() - 1}'
    print('train a small model on it, of a size for a laptop'
          f'{advice}: python train.py {CONFIG}{flags}')


if __name__ == '__main__':
    run_program(main)
