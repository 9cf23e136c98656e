"""Prepare the shakespeare dataset: nanoGPT's tiny Shakespeare in GPT-2 BPE, to finetune GPT-2.

    python data/shakespeare/prepare.py               # downloads input.txt (1.1 MB) if missing
    python data/shakespeare/prepare.py --input=FILE  # any other UTF-8 text

The ids are nanoGPT's: train has 301,966 tokens and val 36,059. There is no meta.pkl, which means
GPT-2's encoding.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.shakespeare_char import prepare


def main(argv: list[str] | None = None) -> None:
    prepare.prepare(__doc__, __file__, argv, 'gpt2')


if __name__ == '__main__':
    run_program(main)
