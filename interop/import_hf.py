"""Make a checkpoint from a Hugging Face folder: one written by interop.export, or a GPT-2.

    python -m interop.import_hf FOLDER out-imported
    python sample.py --out_dir=out-imported
    python train.py CONFIG --init_from=resume --out_dir=out-imported      # continue training

Weights exported in float32 come back bit for bit. The checkpoint is at iteration 0, without
optimizer state.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import dataclasses
from pathlib import Path

import configurator
from common.errors import UserError
from data.making.script import Arguments
from interop.convert import new_checkpoint
from interop.huggingface import from_pretrained, noted_source, read_json
from training.checkpoint.manager import CheckpointManager


def checkpoint_of(folder: Path) -> dict:
    """Return the checkpoint. Raises the errors of `interop.huggingface.from_pretrained`."""
    model = from_pretrained(str(folder))
    dataset, tokens = noted_source(str(folder))
    fields = read_json(folder / 'config.json').get('nanokv', {})
    config = dataclasses.replace(model.config, dropout=fields.get('dropout', 0.0))
    return new_checkpoint(model, config, {'dataset': dataset, 'init_from': 'resume'}, tokens=tokens)


def main(argv=None):
    parser = Arguments(__doc__, prog='python -m interop.import_hf')
    parser.add_argument('folder', type=Path, help='with config.json and safetensors')
    parser.add_argument('out_dir', type=Path, help='folder for the ckpt.pt')
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        raise UserError(f'{args.folder} is not a folder')
    path = args.out_dir / 'ckpt.pt'
    if path.exists():
        raise UserError(f'{path} is there already: delete it or give another folder')
    CheckpointManager(args.out_dir).save(checkpoint_of(args.folder))
    print(f'{path} is written')


if __name__ == '__main__':
    configurator.run_program(main)
