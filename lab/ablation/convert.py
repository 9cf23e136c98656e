"""Start a row's training from the converted weights of another row:

    python -m lab.ablation.convert ROW SEED CONFIG ...
"""
import sys

import configurator
from config.errors import UserError
from interop.convert import MEMORY, convert_checkpoint
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from training.checkpoint import load_checkpoint
from training.checkpoint_manager import CheckpointManager


def main(argv=None):
    name, seed, *rest = sys.argv[1:] if argv is None else argv
    seed = int(seed)
    _, ladder = read_ladder(rest, echo=False)
    results, row = Results(ladder), ladder.rows[name]
    origin = ladder.trainer(ladder.rows[row.converted_from])
    path = results.out_dir(origin, seed) / 'ckpt.pt'
    max_iters = ladder.settings(origin).max_iters
    if not path.is_file() or load_checkpoint(path)['iter_num'] != max_iters:
        raise UserError(f'row {name!r} begins with the weights of {origin.name!r}, seed {seed}, '
                        'which are not trained here: train that row first (delete its line in '
                        f'{results.path.name} if it was trained elsewhere)')
    config = ladder.trained_config(row)
    checkpoint = convert_checkpoint(path, {key: getattr(config, key) for key in MEMORY})
    CheckpointManager(results.out_dir(row, seed)).save(checkpoint | {'holds_best': False})


if __name__ == '__main__':
    configurator.run_program(main)
