"""Begin a run with the converted weights of another row: `python -m ablation.convert ROW SEED CONFIG ...`, before it trains."""
import sys

import configurator
from ablation.ladder import read_ladder
from ablation.results import Results
from config.errors import UserError
from interop.convert import MEMORY, convert_checkpoint
from training.shelf import Shelf


def main(argv=None):
    name, seed, *rest = sys.argv[1:] if argv is None else argv
    _, ladder = read_ladder(rest, echo=False)
    results, row = Results(ladder), ladder.rows[name]
    origin = ladder.trainer(ladder.rows[row.converted_from])
    path = results.out_dir(origin, int(seed)) / 'ckpt.pt'
    if not path.is_file():
        raise UserError(f'{path} is not there: row {name!r} begins with the weights of {origin.name!r}, which were trained '
                        f'elsewhere; delete {results.path(origin, int(seed))} to train them here')
    config = ladder.trained_config(row)
    checkpoint = convert_checkpoint(path, {key: getattr(config, key) for key in MEMORY})
    Shelf(results.out_dir(row, int(seed))).save(checkpoint | {'holds_best': False})


if __name__ == '__main__':
    configurator.run_program(main)
