"""Compare nanoKV with nanoGPT itself: loss curves, exchanged checkpoints, text past block_size,
the CPU recipe.

    git clone https://github.com/karpathy/nanoGPT
    python lab/scripts/nanogpt_parity.py nanoGPT                   # all; 20 minutes on 2 cores
    python lab/scripts/nanogpt_parity.py nanoGPT curves exchange   # some of the parts

Keeps nothing of nanoGPT. Writes results/nanogpt/PART.json.
"""
import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import run_program
from data.datasets import DATA_ROOT, ensure_dataset
from data.tokenfiles import TokenSplit
from lab.benchmarks.nanogpt import nanogpt_module
from lab.files import write_json
from model import GPT
from training.checkpoint import load_checkpoint
from training.evaluate import forward, judge, spread_windows
from training.load_model import model_of

RESULTS = ROOT / 'results' / 'nanogpt'
# nanoGPT's README, "I only have a macbook"; 0.0 because its configurator rejects an int for a float
RECIPE = ['config/train_shakespeare_char.py', '--device=cpu', '--compile=False', '--eval_iters=20',
          '--log_interval=1', '--block_size=64', '--batch_size=12', '--n_layer=4', '--n_head=4',
          '--n_embd=128', '--max_iters=2000', '--lr_decay_iters=2000', '--dropout=0.0']
SHORT = ['--eval_interval=100', '--max_iters=100', '--always_save_checkpoint=True']
# nanoGPT's evaluations advance the generator of its training batches, so they are turned off here
NO_DRAWS = {'nanoGPT': ['--eval_iters=0'], 'ours': ['--eval_iters=1']}
STEP = re.compile(r'^iter (\d+): loss ([\d.]+|nan), time ([\d.]+)ms', re.MULTILINE)


class Programs:
    """The two train.py programs, each in its own folder with the same data."""

    def __init__(self, nanogpt: Path, work: Path):
        self.folders = {'nanoGPT': work / 'nanogpt', 'ours': ROOT}
        copy, data = self.folders['nanoGPT'], ensure_dataset('shakespeare_char')
        shutil.copytree(nanogpt, copy, ignore=shutil.ignore_patterns('.git', '*.bin', 'out*'))
        for name in ('train.bin', 'val.bin', 'meta.pkl'):
            shutil.copy(data / name, copy / 'data' / 'shakespeare_char')
        self.outs = {name: work / f'out-{name}' for name in self.folders}

    def train(self, name: str, out: str, *flags: str) -> tuple[Path, str]:
        """Run one of the programs. Returns its checkpoint and its output."""
        out_dir = self.outs[name] / out
        command = [sys.executable, 'train.py', *RECIPE, f'--out_dir={out_dir}', *flags]
        done = subprocess.run(command, cwd=self.folders[name], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{name}'s train.py failed: {done.stderr[-300:]}")
        print(f'{name:8} {out:12} {done.stdout.splitlines()[-1]}', flush=True)
        return out_dir / 'ckpt.pt', done.stdout

    def nanogpt_model(self, path: Path):
        """nanoGPT's own GPT with the checkpoint at `path`, loaded as its sample.py does."""
        module = nanogpt_module(str(self.folders['nanoGPT']))
        checkpoint = torch.load(path, weights_only=True)
        model = module.GPT(module.GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
        return model.eval()


def our_model(path: Path) -> GPT:
    return model_of(load_checkpoint(path), path).eval()


def losses(output: str) -> dict[int, float]:
    return {int(it): float(loss) for it, loss, _ in STEP.findall(output)}


def difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys(), 'the runs logged different iterations'
    return max(abs(a[it] - b[it]) for it in a)


def curves(programs: Programs) -> dict:
    """100 steps from scratch, two micro-batches each."""
    runs = {name: programs.train(name, 'curves', *SHORT, *NO_DRAWS[name],
                                 '--gradient_accumulation_steps=2') for name in programs.outs}
    theirs, ours = (losses(output) for _, output in runs.values())
    a, b = (torch.load(path, weights_only=True)['model'] for path, _ in runs.values())
    return {'steps': len(ours), 'first_loss': ours[0], 'last_loss': ours[max(ours)],
            'max_loss_difference': difference(theirs, ours),
            'max_weight_difference': max(float((a[k] - b[k]).abs().max()) for k in a)}


@torch.inference_mode()
def exchange(programs: Programs) -> dict:
    """Each program's checkpoint in the other program: logits, greedy text past block_size, and 20
    more training steps."""
    found = {}
    for writer in programs.outs:
        flag = '--seed=5' if writer == 'ours' else '--bias=True'
        path, _ = programs.train(writer, 'exchange', *SHORT, *NO_DRAWS[writer], flag)
        models = programs.nanogpt_model(path), our_model(path)
        idx = torch.randint(65, (8, 64), generator=torch.Generator().manual_seed(0))
        pairs = [[m(idx, idx)[0] for m in models], [m(idx)[0] for m in models]]
        texts = [m.double().generate(idx[:2, :7], 3 * 64, temperature=1.0, top_k=1)
                 for m in models]
        found[writer] = {
            'max_logit_difference': max(float((a - b).abs().max()) for a, b in pairs),
            'greedy_tokens': texts[0].numel(), 'greedy_equal': torch.equal(*texts),
            'max_loss_difference_resumed': resumed(programs, writer, path)}
    return found


def resumed(programs: Programs, writer: str, path: Path) -> float:
    """The largest difference in loss when both programs resume the checkpoint."""
    checkpoint = torch.load(path, weights_only=True)
    for key in ('rng', 'data_rng'):  # nanoGPT does not read them, so both start at the seed
        checkpoint.pop(key, None)
    flags = ['--init_from=resume', *SHORT, '--max_iters=120']
    flags += ['--bias=True'] * (writer == 'nanoGPT')
    outputs = []
    for reader, out in programs.outs.items():
        folder = out / f'from-{writer}'
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, folder / 'ckpt.pt')
        outputs.append(programs.train(reader, folder.name, *flags, *NO_DRAWS[reader])[1])
    return difference(*map(losses, outputs))


def recipe(programs: Programs) -> dict:
    """Run nanoGPT's CPU recipe to the end, and evaluate the best checkpoint (both programs select
    it on 20 batches) on the entire validation split."""
    tokens = TokenSplit([DATA_ROOT / 'shakespeare_char' / 'val.bin'])
    found = {'published': 1.88, 'val_tokens': len(tokens)}
    for name in programs.outs:
        path, output = programs.train(name, 'recipe')
        logged = [float(x) for x in re.findall(r'val loss ([\d.]+)', output)]
        windows = spread_windows(tokens, 64)
        found[name] = {'val_loss': judge(forward(our_model(path)), windows).mean().item(),
                       'logged_val_losses': logged}
    return found


PARTS = {'curves': curves, 'exchange': exchange, 'recipe': recipe}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('nanogpt', type=Path, help='a checkout of nanoGPT')
    parser.add_argument('parts', nargs='*', choices=PARTS)
    args = parser.parse_args(argv)

    command = ['git', '-C', str(args.nanogpt), 'rev-parse', '--short', 'HEAD']
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    facts = {'nanogpt': commit, 'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})',
             'threads': torch.get_num_threads(), 'torch': torch.__version__, 'arguments': RECIPE}
    with tempfile.TemporaryDirectory() as work:
        programs = Programs(args.nanogpt, Path(work))
        for part in args.parts or PARTS:
            write_json(RESULTS / f'{part}.json', facts | PARTS[part](programs))


if __name__ == '__main__':
    run_program(main)
