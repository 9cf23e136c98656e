"""What int8 and int4 cost in loss: weights, activations, K and V, and all of them together.

    python lab/scripts/int8_loss.py out-a out-b out-c     # folders of trained runs, seeds of one row
    python lab/scripts/int8_loss.py --table               # only remake the page from the JSON file

Losses in nats over fixed windows of the runs' validation split, by the plain forward pass, or for K
and V through a cache. Writes results/int8_loss/loss.json and README.md. The committed page is of
the three seeds of the ladder's full stack, which this trains:

    python ablate.py config/ablate_shakespeare.py --only='+ wider heads and MLP'
    python lab/scripts/int8_loss.py results/ablate_shakespeare/runs/wider-heads-and-mlp-seed?-*
"""
import copy
import json
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import run_program
from data.datasets import ensure_dataset
from data.tokenfiles import open_split
from engine.evaluate import forward, judge, spread_windows, through_cache
from engine.quantized import quantize_rows
from engine.weights import quantize_weights
from lab.benchmarks.setting import processor
from model import GPT
from training.checkpoint import config_of, load_checkpoint, load_weights

RESULTS = ROOT / 'results' / 'int8_loss'
WINDOWS = 200  # of T tokens, spread over the validation split


def weights_only(model) -> GPT:
    """The model with its matrices rounded to int8 and back, computed in float32."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for module in rounded.modules():
            if isinstance(module, torch.nn.Linear):
                values, scale = quantize_rows(module.weight)
                module.weight.copy_(values * scale)
    return rounded


def quantized(model, weight_dtype: str, group: int = 8) -> GPT:
    twin = copy.deepcopy(model)
    quantize_weights(twin, weight_dtype, group)
    return twin


# what is rounded -> model -> idx to logits
KINDS = {
    'nothing (float32)': forward,
    'weights to int8': lambda model: forward(weights_only(model)),
    'weights and activations to int8': lambda model: forward(quantized(model, 'int8')),
    'K and V to int8': lambda model: through_cache(model, 'int8'),
    'all of these to int8': lambda model: through_cache(quantized(model, 'int8'), 'int8'),
    'weights to int4 in groups of 8, activations to int8':
        lambda model: forward(quantized(model, 'int4')),
}


def load(folder: Path):
    """The trained model, and the windows it is judged on."""
    path = folder / 'ckpt.pt'
    if not path.is_file():
        raise UserError(f'{path} is missing: train the run first (see --help)')
    checkpoint = load_checkpoint(path)
    model = GPT(config_of(checkpoint, path)).eval()
    load_weights(model, checkpoint, path)
    tokens = open_split(ensure_dataset(checkpoint['config']['dataset']), 'val')
    return model, spread_windows(tokens, model.config.block_size, WINDOWS), checkpoint


def measure(folders: list[Path]) -> dict:
    """Losses of every run by kind."""
    runs = []
    for folder in folders:
        model, windows, checkpoint = load(folder)
        losses = {}
        for kind, logits_of in KINDS.items():
            losses[kind] = judge(logits_of(model), windows).loss
            print(f'{folder.name}: {kind:52} {losses[kind]:.5f}', file=sys.stderr)
        runs.append({'seed': checkpoint['config']['seed'], 'steps': checkpoint['iter_num'],
                     'losses': losses})
    return {'processor': processor(), 'torch': torch.__version__, 'windows': len(windows),
            'T': model.config.block_size, 'W': model.config.window_size, 'B': 16,
            'params': model.get_num_params(), 'runs': runs}


def table(document: dict) -> str:
    """The Markdown page."""
    runs, seeds = document['runs'], ', '.join(str(run['seed']) for run in document['runs'])
    lines = ['# The loss that int8 and int4 cost', '',
             f"`python lab/scripts/int8_loss.py RUN...`: {document['processor']}, torch "
             f"{document['torch']}; {document['params'] / 1e6:.2f}M parameters, "
             f"{runs[0]['steps']:,} steps; {document['windows']} windows of T={document['T']}, "
             f"W={document['W']}, B={document['B']}, seeds {seeds}. Nats per token above the same "
             'model in float32.', '',
             '| rounded | loss | above float32, mean | smallest | largest |',
             '|---|---:|---:|---:|---:|']
    for kind in KINDS:
        loss = statistics.mean(run['losses'][kind] for run in runs)
        above = [run['losses'][kind] - run['losses']['nothing (float32)'] for run in runs]
        lines.append(f'| {kind} | {loss:.4f} | {statistics.mean(above):+.5f} | {min(above):+.5f} | '
                     f'{max(above):+.5f} |')
    return '\n'.join(lines) + '\n'


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ('-h', '--help'):
        print(__doc__)
        return
    path = RESULTS / 'loss.json'
    if argv != ['--table']:
        document = measure([Path(arg) for arg in argv])
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + '\n')
    page = table(json.loads(path.read_text()))
    (RESULTS / 'README.md').write_text(page)
    print(page)


if __name__ == '__main__':
    run_program(main)
