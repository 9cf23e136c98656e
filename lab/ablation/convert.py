"""Start a row's training from the converted weights of another row:

    python -m lab.ablation.convert ROW SEED CONFIG ...
"""
import sys

import configurator
from interop.convert import MEMORY, convert_checkpoint
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from training.checkpoint_manager import CheckpointManager


def main(argv=None):
    name, seed, *rest = sys.argv[1:] if argv is None else argv
    seed = int(seed)
    _, ladder = read_ladder(rest, echo=False)
    results, row = Results(ladder), ladder.rows[name]
    _, path = results.trained(ladder.trainer(ladder.rows[row.converted_from]), seed)
    config = ladder.trained_config(row)
    checkpoint = convert_checkpoint(path, {key: getattr(config, key) for key in MEMORY})
    CheckpointManager(results.out_dir(row, seed)).save(checkpoint | {'holds_best': False})


if __name__ == '__main__':
    configurator.run_program(main)
