"""Convert a checkpoint in shards (see `training.checkpoint`) to one file, or back.

    python -m training.shards out/ckpt.pt whole/ckpt.pt                # nanoGPT can read it, too
    python -m training.shards whole/ckpt.pt out/ckpt.pt --to=shards
"""
from config import startup  # noqa: F401  # isort: skip  (before torch is imported)
import argparse
from pathlib import Path

from config.errors import UserError
from configurator import run_program
from training import checkpoint as ckpt


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog='python -m training.shards',
        description='Convert a checkpoint in shards to one file, or back.')
    parser.add_argument('source', type=Path, help='a ckpt.pt, with shards or whole')
    parser.add_argument('target', type=Path, help='the ckpt.pt to write')
    parser.add_argument('--to', choices=('whole', 'shards'), default='whole',
                        help='what to write (%(default)s)')
    args = parser.parse_args(argv)
    if args.target.exists():
        raise UserError(f'{args.target} is there already')
    checkpoint = ckpt.load_checkpoint(args.source)
    if args.to == 'shards':
        checkpoint['model'].pop(ckpt.HEAD, None)  # the embedding
        name = ckpt.shards_name(checkpoint.get('run', 'whole'), checkpoint['iter_num'])
        checkpoint |= ckpt.write_shards(args.target.parent / name, checkpoint['model'],
                                        checkpoint['optimizer'])
    ckpt.save_checkpoint(args.target, checkpoint)
    print(f'{args.target} is written ({args.to})')


if __name__ == '__main__':
    run_program(main)
