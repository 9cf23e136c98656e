"""How much of the damage of a conversion does training repair, on 5% of the model's tokens?

    python lab/scripts/conversion.py results/elastic_NAME RUNS > FILE

Takes 'base alone' of each seed of the ladder config/ablate_elastic.py, whose models are in RUNS,
cuts it to each plan below, and trains it with the tokens or with itself as the teacher. A line is a
training: the losses of the plan when cut, after training, and trained alone, by the ladder.
"""
import contextlib
import itertools
import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from config.ablate_elastic import _plans  # noqa: E402
from data.datasets import ensure_dataset  # noqa: E402
from data.tokenfiles import open_split  # noqa: E402
from interop.convert import convert_checkpoint  # noqa: E402
from training.checkpoint.load_model import model_of  # noqa: E402
from training.evaluate import forward, judge, spread_windows  # noqa: E402

PLANS = 'MQA', 'MQA + window + sharing'
SHARE, BATCH, RATE, WARMUP = 0.05, 2, 1e-2, 20


def val_loss(file: Path, windows) -> float:
    model = model_of(torch.load(file, map_location='cpu', weights_only=True), file).eval()
    return judge(forward(model), windows, 16).mean().item()


def main(folder: Path, runs: Path):
    rows = {row['name']: row for row in
            json.loads((folder / 'results.json').read_text('utf-8'))['rows']}
    base = rows['base alone']
    words = shlex.split(base['command'])[2:]
    s = configurator.parse(train.Settings, words, echo=False)
    windows = spread_windows(open_split(ensure_dataset(s.dataset), 'val'), s.block_size, 500)
    n = round(SHARE * s.max_iters * s.batch_size / BATCH)

    def loss(row, seed):
        return dict(zip(rows[row]['seeds'], rows[row]['val_loss_forward']['each']))[seed]
    for seed, name, taught in itertools.product(base['seeds'], PLANS, (False, True)):
        [source] = runs.glob(f'base-alone-seed{seed}-*/ckpt.pt')
        with tempfile.TemporaryDirectory() as out:
            file = Path(out) / 'ckpt.pt'
            torch.save(convert_checkpoint(source, _plans[name]), file)
            cut = val_loss(file, windows)
            changes = _plans[name] | dict(
                seed=seed, data_seed=seed + 100, init_from='resume', out_dir=out, batch_size=BATCH,
                max_iters=n, lr_decay_iters=n, cooldown_iters=n - WARMUP, warmup_iters=WARMUP,
                learning_rate=RATE, eval_interval=n, log_interval=n)
            changes |= dict(teacher=source) if taught else {}
            with contextlib.redirect_stdout(sys.stderr):
                train.main([*words, *(f'--{key}={value}' for key, value in changes.items())])
            after = val_loss(file, windows)
        alone = loss(f'{name}, alone', seed)
        print(json.dumps(dict(
            plan=name, seed=seed, taught=taught, iterations=n, B=BATCH, T=windows.size(1) - 1,
            base=loss('base alone', seed), cut=cut, trained=after, alone=alone,
            left=(after - alone) / (cut - alone))), flush=True)


if __name__ == '__main__':
    main(*map(Path, sys.argv[1:3]))
