"""nanoGPT itself beside ours: loss curves, exchanged checkpoints, text past block_size, speed, the CPU recipe.

    git clone https://github.com/karpathy/nanoGPT
    python lab/scripts/nanogpt_parity.py nanoGPT                       # everything, under half an hour on 2 CPU cores
    python lab/scripts/nanogpt_parity.py nanoGPT --parts curves exchange
    python lab/scripts/nanogpt_parity.py --table                       # only remake the table from the JSON files

Both train on shakespeare_char on the CPU in float32, from copies in a temporary folder; nothing of nanoGPT is kept.
Writes results/nanogpt/PART.json and results/nanogpt/README.md.
"""
import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import parse, run_program
from data.datasets import DATA_ROOT, ensure_dataset
from data.tokenfiles import open_tokens
from model import GPT
from training.checkpoint import config_of, load_checkpoint, load_weights

RESULTS = ROOT / 'results' / 'nanogpt'
# nanoGPT's README, "I only have a macbook"; 0.0 because its configurator takes no int for a float
RECIPE = ['config/train_shakespeare_char.py', '--device=cpu', '--compile=False', '--eval_iters=20', '--log_interval=1',
          '--block_size=64', '--batch_size=12', '--n_layer=4', '--n_head=4', '--n_embd=128', '--max_iters=2000',
          '--lr_decay_iters=2000', '--dropout=0.0']
SHORT = ['--eval_interval=100', '--max_iters=100', '--always_save_checkpoint=True']
# nanoGPT's evaluations draw from the generator of its training batches; without windows they draw nothing
NO_DRAWS = {'nanoGPT': ['--eval_iters=0'], 'ours': ['--eval_iters=1']}
STEP = re.compile(r'^iter (\d+): loss ([\d.]+|nan), time ([\d.]+)ms', re.MULTILINE)


class Sides:
    """The two programs, each in a folder of its own with the same data."""

    def __init__(self, nanogpt: Path, work: Path):
        self.folders = {'nanoGPT': work / 'nanogpt', 'ours': ROOT}
        shutil.copytree(nanogpt, self.folders['nanoGPT'], ignore=shutil.ignore_patterns('.git', '*.bin', 'out*'))
        data = ensure_dataset('shakespeare_char')
        for name in ('train.bin', 'val.bin', 'meta.pkl'):
            shutil.copy(data / name, self.folders['nanoGPT'] / 'data' / 'shakespeare_char' / name)
        self.outs = {name: work / f'out-{name}' for name in self.folders}

    def train(self, name: str, out: str, *flags: str) -> tuple[Path, str]:
        """Its checkpoint and its output."""
        out_dir = self.outs[name] / out
        command = [sys.executable, 'train.py', *RECIPE, f'--out_dir={out_dir}', *flags]
        done = subprocess.run(command, cwd=self.folders[name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{name}'s train.py failed: {done.stderr[-300:]}")
        print(f'{name:8} {out:12} {done.stdout.splitlines()[-1]}', flush=True)
        return out_dir / 'ckpt.pt', done.stdout

    def their_model(self, path: Path):
        """nanoGPT's own GPT with the checkpoint at `path`, loaded as its sample.py does."""
        spec = importlib.util.spec_from_file_location('nanogpt_model', self.folders['nanoGPT'] / 'model.py')
        module = importlib.util.module_from_spec(spec)
        sys.modules['nanogpt_model'] = module  # dataclasses look it up
        spec.loader.exec_module(module)
        checkpoint = torch.load(path, weights_only=True)
        model = module.GPT(module.GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
        return model.eval()


def our_model(path: Path) -> GPT:
    checkpoint = load_checkpoint(path)
    model = GPT(config_of(checkpoint, path))
    load_weights(model, checkpoint, path)
    return model.eval()


@torch.inference_mode()
def whole_split_loss(model, tokens, block_size, batch_size=16) -> float:
    """Mean loss in nats per token over a whole split, in windows that do not overlap (a last partial one left out)."""
    starts, total = range(0, len(tokens) - block_size, block_size), 0.0
    for first in range(0, len(starts), batch_size):
        some = starts[first:first + batch_size]
        rows = torch.stack([torch.from_numpy(tokens[i:i + block_size + 1].astype('int64')) for i in some])
        total += model(rows[:, :-1], rows[:, 1:])[1].item() * len(some)
    return total / len(starts)


def losses(output: str) -> dict[int, float]:
    return {int(it): float(loss) for it, loss, _ in STEP.findall(output)}


def difference(a: dict, b: dict) -> float:
    if a.keys() != b.keys():
        raise UserError(f'the runs logged different iterations: {sorted(a)[-1]} and {sorted(b)[-1]} at last')
    return max(abs(a[it] - b[it]) for it in a)


def curves(sides: Sides) -> dict:
    """100 steps from scratch, two micro-batches each."""
    runs = {name: sides.train(name, 'curves', *SHORT, *NO_DRAWS[name], '--gradient_accumulation_steps=2')
            for name in sides.outs}
    theirs, ours = losses(runs['nanoGPT'][1]), losses(runs['ours'][1])
    weights = [torch.load(path, weights_only=True)['model'] for path, _ in runs.values()]
    return {'steps': len(ours), 'first_loss': ours[0], 'last_loss': ours[max(ours)],
            'max_loss_difference': difference(theirs, ours),
            'max_weight_difference': max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0])}


@torch.inference_mode()
def exchange(sides: Sides) -> dict:
    """Each side's checkpoint in the other: logits, greedy text past block_size, and 20 further steps of training."""
    found = {}
    for writer in sides.outs:
        path, _ = sides.train(writer, 'exchange', *SHORT, *NO_DRAWS[writer], '--seed=5' if writer == 'ours' else '--bias=True')
        theirs, ours = sides.their_model(path), our_model(path)
        idx = torch.randint(65, (8, 64), generator=torch.Generator().manual_seed(0))
        logits = [m(idx, idx)[0] for m in (theirs, ours)]
        last = [m(idx)[0] for m in (theirs, ours)]
        theirs.double(), ours.double()
        texts = [m.generate(idx[:2, :7], 3 * 64, temperature=1.0, top_k=1) for m in (theirs, ours)]
        found[writer] = {'max_logit_difference': max(float((a - b).abs().max()) for a, b in (logits, last)),
                         'greedy_tokens': texts[0].numel(), 'greedy_equal': torch.equal(*texts),
                         'max_loss_difference_resumed': resumed(sides, writer, path)}
    return found


def resumed(sides: Sides, writer: str, path: Path) -> float:
    checkpoint = torch.load(path, weights_only=True)
    for key in ('rng', 'data_rng'):  # nanoGPT would not read them, so both start at the seed
        checkpoint.pop(key, None)
    outputs = []
    for reader in sides.outs:
        folder = sides.outs[reader] / f'from-{writer}'
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, folder / 'ckpt.pt')
        flags = ['--bias=True'] * (writer == 'nanoGPT')
        outputs.append(sides.train(reader, f'from-{writer}', '--init_from=resume', *SHORT, '--max_iters=120', *flags,
                                   *NO_DRAWS[reader])[1])
    return difference(*map(losses, outputs))


def speed(sides: Sides, rounds: int = 7, steps: int = 150) -> dict:
    """Training tokens per second, the sides alternating; the median step of each run, the first 30 left out."""
    times = {name: [] for name in sides.outs}
    for _ in range(rounds):
        for name in times:
            _, output = sides.train(name, 'speed', *SHORT, *NO_DRAWS[name], f'--max_iters={steps}', '--eval_interval=10000')
            times[name].append(statistics.median(float(ms) for it, _, ms in STEP.findall(output) if int(it) >= 30))
    ratios = [a / b for a, b in zip(times['nanoGPT'], times['ours'])]
    tokens = setting()['B'] * setting()['T']
    return {'rounds': rounds, 'steps': steps, 'step_ms': times,
            'tokens_per_second': {name: tokens / statistics.median(ms) * 1e3 for name, ms in times.items()},
            'ratio': {'median': statistics.median(ratios), 'min': min(ratios), 'max': max(ratios)}}


def recipe(sides: Sides) -> dict:
    """nanoGPT's CPU recipe to its end; the best checkpoint (by 20 batches, as both keep it) over the whole val split."""
    tokens, found = open_tokens(DATA_ROOT / 'shakespeare_char' / 'val.bin'), {'published': 1.88}
    for name in sides.outs:
        path, output = sides.train(name, 'recipe')
        found[name] = {'val_loss': whole_split_loss(our_model(path), tokens, 64),
                       'logged_val_losses': [float(x) for x in re.findall(r'val loss ([\d.]+)', output)]}
    return found | {'val_tokens': len(tokens)}


PARTS = {'curves': curves, 'exchange': exchange, 'speed': speed, 'recipe': recipe}


def setting() -> dict:
    """The shape that all parts share; W=0 is no window."""
    s = parse('train', RECIPE, echo=False)
    return {'dataset': s.dataset, 'dtype': 'float32', 'B': s.batch_size, 'T': s.block_size, 'W': s.window_size,
            'n_layer': s.n_layer, 'n_head': s.n_head, 'n_embd': s.n_embd}


def table(found: dict) -> str:
    """The Markdown page made from the parts."""
    any_part = next(iter(found.values()))
    lines = ['# nanoGPT beside ours', '',
             'nanoGPT {nanogpt}; {dataset}, {hardware}, {threads} threads, torch {torch}, {dtype}, B={B}, T={T}, no windows, '
             '{n_layer} layers, {n_head} heads, width {n_embd}. '.format(**any_part) +
             'Made by `python lab/scripts/nanogpt_parity.py NANOGPT_FOLDER`.', '', '| what | figure |', '|---|---|']
    if 'curves' in found:
        c = found['curves']
        lines += [f"| a logged loss (4 decimals) differs over {c['steps']} steps by at most | {c['max_loss_difference']:.1e} |",
                  f"| a weight after them by at most | {c['max_weight_difference']:.1e} |"]
    for writer in ('nanoGPT', 'ours') if 'exchange' in found else ():
        e = found['exchange'][writer]
        lines += [f"| checkpoint written by {writer}: logits of the two differ by at most | {e['max_logit_difference']:.1e} |",
                  f"| ... greedy text past block_size, {e['greedy_tokens']} tokens, float64 | "
                  f"{'equal' if e['greedy_equal'] else 'DIFFERENT'} |",
                  f"| ... losses of 20 resumed steps differ by at most | {e['max_loss_difference_resumed']:.1e} |"]
    if 'speed' in found:
        s = found['speed']
        lines += [f"| training tokens/s, nanoGPT / ours (median of {s['rounds']} alternating runs) | "
                  + ' / '.join(f'{x:,.0f}' for x in s['tokens_per_second'].values()) + ' |',
                  f"| ours over nanoGPT, median (min to max) | {s['ratio']['median']:.3f} "
                  f"({s['ratio']['min']:.3f} to {s['ratio']['max']:.3f}) |"]
    if 'recipe' in found:
        r = found['recipe']
        lines += [f"| CPU recipe, validation loss over the whole split, nanoGPT / ours (published {r['published']}, on "
                  f"sampled batches) | {r['nanoGPT']['val_loss']:.4f} / {r['ours']['val_loss']:.4f} |",
                  '| ... last logged by each (20 sampled batches) | '
                  + ' / '.join(f"{r[name]['logged_val_losses'][-1]:.4f}" for name in ('nanoGPT', 'ours')) + ' |']
    return '\n'.join(lines) + '\n'


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('nanogpt', nargs='?', type=Path, help='a checkout of nanoGPT')
    parser.add_argument('--parts', nargs='+', default=list(PARTS), choices=PARTS, metavar='PART', help=f"of {', '.join(PARTS)}")
    parser.add_argument('--table', action='store_true', help='only remake the table from the JSON files')
    args = parser.parse_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not args.table:
        if args.nanogpt is None or not (args.nanogpt / 'model.py').is_file():
            raise UserError(f'{args.nanogpt} is not a checkout of nanoGPT: give the folder with its train.py and model.py')
        commit = subprocess.run(['git', '-C', str(args.nanogpt), 'rev-parse', '--short', 'HEAD'], capture_output=True,
                                text=True, check=False).stdout.strip()
        with tempfile.TemporaryDirectory() as work:
            sides = Sides(args.nanogpt, Path(work))
            for part in args.parts:
                found = {'nanogpt': commit, 'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})',
                         'threads': torch.get_num_threads(), 'torch': torch.__version__} | setting() | PARTS[part](sides)
                (RESULTS / f'{part}.json').write_text(json.dumps(found, indent=1) + '\n')
    found = {part: json.loads((RESULTS / f'{part}.json').read_text()) for part in PARTS if (RESULTS / f'{part}.json').is_file()}
    if not found:
        raise UserError(f'no results in {RESULTS} yet: give a checkout of nanoGPT')
    (RESULTS / 'README.md').write_text(table(found))
    print((RESULTS / 'README.md').read_text())


if __name__ == '__main__':
    run_program(main)
