"""Prepare the fineweb_edu dataset: web pages chosen for their educational value; GPT-2 BPE.

    python data/fineweb_edu/prepare.py                           # 10 billion tokens: 20 GB, hours
    python data/fineweb_edu/prepare.py --max_tokens=100_000_000  # the first 100 million
    python data/fineweb_edu/prepare.py --sample=sample-100BT     # another configuration
    python data/fineweb_edu/prepare.py --from dump.jsonl         # from a copy you have

Streamed from the Hugging Face hub (pip install 'datasets>=4') into train_00000.bin, ... and
val.bin, without a copy of the raw text on disk. An interrupted preparation starts again. One
document in 2,000 is for validation, by a hash of its text (5 million tokens of 10 billion). The
order is the hub's.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run from anywhere

from configurator import run_program
from data.making.stream import arguments, prepare

BY_HAND = 'it is 10 billion tokens, 20 GB on disk and hours of streaming from the Hugging Face hub'


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, __file__)
    parser.add_argument('--sample', default='sample-10BT', metavar='CONFIG',
                        help='configuration of HuggingFaceFW/fineweb-edu (default: sample-10BT)')
    args = parser.parse_args(argv)
    prepare(args, 'HuggingFaceFW/fineweb-edu', name=args.sample)


if __name__ == '__main__':
    run_program(main)
