"""Prepare the openwebtext dataset: 8 million web pages, an open copy of GPT-2's data; GPT-2 BPE.

    python data/openwebtext/prepare.py                           # 9 billion tokens: 18 GB, hours
    python data/openwebtext/prepare.py --max_tokens=100_000_000  # the first 100 million
    python data/openwebtext/prepare.py --from dump.jsonl         # from a copy you have

Streamed from the Hugging Face hub (pip install 'datasets>=4') into train_00000.bin, ... and
val.bin, without a copy of the raw text on disk. An interrupted preparation starts again. One
document in 2,000 is for validation, by a hash of its text: about as many as nanoGPT's (4.4 million
tokens), but not the same ones. The order is the hub's.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.making.stream import arguments, prepare

BY_HAND = 'it is 9 billion tokens, 18 GB on disk and hours of streaming from the Hugging Face hub'


def main(argv: list[str] | None = None) -> None:
    # the repository has a program instead of files, so this is the hub's own conversion
    prepare(arguments(__doc__, __file__).parse_args(argv), 'Skylion007/openwebtext',
            revision='refs/convert/parquet')


if __name__ == '__main__':
    run_program(main)
