"""A checkpoint in shards (`training.shard_files`) as one file, or back.

    python -m training.shards out/ckpt.pt whole/ckpt.pt                # nanoGPT can read it, too
    python -m training.shards whole/ckpt.pt out/ckpt.pt --to=shards
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import argparse
import sys
from pathlib import Path

from config.errors import UserError
from configurator import run_program
from training.checkpoint import load_checkpoint, save_checkpoint
from training.shard_files import new_name, split, write


def convert(source: Path, target: Path, to: str) -> None:
    """Write the checkpoint at `source`, of either kind, as one of the other."""
    if target.exists():
        raise UserError(f'{target} is there already')
    checkpoint = load_checkpoint(source)
    if to == 'shards':
        checkpoint['model'].pop('lm_head.weight', None)
        tensors, checkpoint['optimizer'] = split(checkpoint['model'], checkpoint['optimizer'])
        folder = target.parent / new_name(checkpoint.get('run', 'whole'), checkpoint['iter_num'])
        checkpoint |= {'model': {}, 'shards': write(folder, tensors, alone=True)}
    save_checkpoint(target, checkpoint)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog='python -m training.shards',
        description='A checkpoint in shards as one file, or back.')
    parser.add_argument('source', type=Path, help='a ckpt.pt, with shards or whole')
    parser.add_argument('target', type=Path, help='the ckpt.pt to write')
    parser.add_argument('--to', choices=('whole', 'shards'), default='whole',
                        help='what to write (%(default)s)')
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    convert(args.source, args.target, args.to)
    print(f'{args.target} is written ({args.to})')


if __name__ == '__main__':
    run_program(main)
