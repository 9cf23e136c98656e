"""Prepare the shakespeare_char dataset: nanoGPT's tiny Shakespeare, character by character.

    python data/shakespeare_char/prepare.py               # downloads input.txt (1.1 MB) if missing
    python data/shakespeare_char/prepare.py --input=FILE  # any other UTF-8 text

The ids are nanoGPT's: the characters in sorted order. Train has 1,003,854 tokens and val 111,540;
the vocabulary is 65.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.making import tinyshakespeare


def main(argv: list[str] | None = None) -> None:
    tinyshakespeare.prepare(__doc__, __file__, argv, 'char')


if __name__ == '__main__':
    run_program(main)
