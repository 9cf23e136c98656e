"""What does a cache in int8 (or int4) cost? The demo config trained with and without int8 rounding, judged through the cache.

    python lab/scripts/quantization.py                            # all runs, two at a time; finished ones are not repeated
    python lab/scripts/quantization.py --runs plain --seeds 2
    python lab/scripts/quantization.py --table                    # only remake the page from the JSON files

Each run is `python train.py config/train_mqa_local.py --seed=SEED ...`, then losses over fixed windows of the validation
split. Writes results/quantization/RUN-seedSEED.json and results/quantization/README.md. Ctrl-C loses nothing: finished runs
stay, a run in training saves where it stands, and the same command goes on from there.
"""
import argparse
import json
import os
import platform
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.errors import UserError
from configurator import parse, run_program
from data.datasets import ensure_dataset
from data.tokenfiles import open_split
from engine.evaluate import forward, judge, spread_windows, through_cache, with_rounding
from lab.ablation.jobs import Job, run_jobs
from lab.scripts import kv_formats as kf
from lab.scripts.quantization_page import page
from model import GPT
from training.checkpoint import config_of, load_checkpoint, load_weights

RESULTS = ROOT / 'results' / 'quantization'
CONFIG = 'config/train_mqa_local.py'
# not the demo's
STEPS = ['--optimizer=adamw', '--max_iters=700', '--lr_decay_iters=700', '--warmup_iters=70', '--eval_interval=350']
# run -> what it changes in the demo config
RUNS = {
    'plain': [],
    'qat': ['--kv_quant_train=int8'],
    'head64': ['--n_head=2'],  # head vectors of 64 elements, as GPT-2 has them
}
SEEDS = {'plain': [1, 2], 'qat': [1, 2], 'head64': [1]}  # by default
KV_DTYPES = ('float32', 'bfloat16', 'float16', 'int8')
WINDOWS = 256          # of T tokens, spread over the validation split
FIRST, CHUNK = 64, 16  # the cache is given a prompt of FIRST tokens, then CHUNK at a time
PROMPTS, NEW = 64, 128  # greedy texts: from the first half of this many windows, as many tokens
BATCH = 16


# -- training -------------------------------------------------------------------------------------------------------------

def out_dir(name: str, seed: int) -> Path:
    return RESULTS / 'runs' / f'{name}-seed{seed}'


def settings(name: str, seed: int) -> list[str]:
    return [str(ROOT / CONFIG), *STEPS, *RUNS[name], f'--seed={seed}', f'--out_dir={out_dir(name, seed)}']


def training(name: str, seed: int) -> Job:
    """train.py as a process, from the start or from where it stands."""
    command = [str(ROOT / 'train.py'), *settings(name, seed)]
    if (out_dir(name, seed) / 'ckpt.pt').is_file():
        command.append('--init_from=resume')
    iterations = parse('train', settings(name, seed), echo=False).max_iters
    return Job(f'{name}-seed{seed}', [command], out_dir(name, seed), iterations)


def is_trained(name: str, seed: int) -> bool:
    path = out_dir(name, seed) / 'ckpt.pt'
    wanted = parse('train', settings(name, seed), echo=False).max_iters
    return path.is_file() and load_checkpoint(path)['iter_num'] == wanted


def train_all(runs: list[tuple[str, int]], jobs: int) -> None:
    """Train `runs`, `jobs` at a time, each with its share of the cores."""
    def ended(job, error):
        if error:
            raise UserError(f"training {job.name} failed: {error} (see {job.out_dir / 'train.log'})")
    run_jobs([training(*run) for run in runs if not is_trained(*run)], ['cpu'], jobs, ended)


def trained(name: str, seed: int):
    """The trained model (without rounding in its forward pass, whatever it was trained with) and its settings."""
    s, path = parse('train', settings(name, seed), echo=False), out_dir(name, seed) / 'ckpt.pt'
    checkpoint = load_checkpoint(path)
    if checkpoint['iter_num'] != s.max_iters:
        raise UserError(f"{path} stands at iteration {checkpoint['iter_num']} of {s.max_iters}: delete {out_dir(name, seed)}")
    same = [key for key in vars(s) if key not in ('init_from', 'device', 'out_dir')]
    stale = [key for key in same if checkpoint['config'].get(key, getattr(s, key)) != getattr(s, key)]
    if stale:
        raise UserError(f'{path} was trained with another {stale[0]}: delete {out_dir(name, seed)} to train it anew')
    model = GPT(config_of(checkpoint, path, kv_quant_train='')).eval()
    load_weights(model, checkpoint, path)
    return model, s


# -- measuring ------------------------------------------------------------------------------------------------------------

def measure_caches(model, windows) -> tuple[dict, dict]:
    """Loss and choices through a cache of each dtype, and how they differ from float32's; the raw losses by window too."""
    judged = {kind: judge(through_cache(model, kind, FIRST, CHUNK), windows, BATCH) for kind in KV_DTYPES}
    reference, choices = judged['float32'].by_window, judged['float32'].choices
    rows = {}
    for kind, found in judged.items():
        losses, top = found.by_window, found.choices
        change, se = kf.paired(losses, reference)
        rows[kind] = {'loss': losses.mean().item(), 'change': change, 'se': se,
                      'top1': (top == choices).double().mean().item(),
                      'kv_bytes': model.new_cache(1, windows.size(1) - 1, kind).nbytes}
    return rows, {kind: found.by_window for kind, found in judged.items()}


def measure_greedy(model, windows) -> dict:
    """Greedy texts against those of the float32 cache. 'float32, in chunks' differs in the order of its sums alone: what
    agreement means can be read off it."""
    prompts = windows[::max(1, len(windows) // PROMPTS)][:PROMPTS, :windows.size(1) // 2]
    reference = kf.greedy(model, prompts, NEW, 'float32')
    rows = {'float32, in chunks': kf.agreement(kf.greedy(model, prompts, NEW, 'float32', CHUNK), reference)}
    for kind in KV_DTYPES[1:]:
        rows[kind] = kf.agreement(kf.greedy(model, prompts, NEW, kind), reference)
    return rows


def measure_formats(model, windows, formats: dict, reference, tick=lambda: None) -> tuple[dict, dict]:
    """Loss with each of `formats` against `reference` (losses by window), errors of K and V, bytes per position of a slot."""
    rounding, plan, rows, raw = with_rounding(model, True), model.plan, {}, {}
    for name, (k, v) in formats.items():
        with kf.rounded(k, v) as errors:
            raw[name] = judge(forward(rounding), windows, BATCH).by_window
        change, se = kf.paired(raw[name], reference)
        rows[name] = {'change': change, 'se': se, 'k_error': errors.relative('k'), 'v_error': errors.relative('v'),
                      'bytes_per_position': kf.bytes_per_position(k, v, plan.n_kv_head, plan.head_dim)}
        tick()
    return rows, raw


def measure(model, name: str, windows, tick=lambda what: None) -> dict:
    """Everything about one trained model, on `windows` (n, T + 1)."""
    tick('caches')
    caches, raw = measure_caches(model, windows)
    tick('forward')
    plain = judge(forward(model), windows, BATCH).by_window
    own = judge(forward(with_rounding(model, True)), windows, BATCH).by_window
    tick('greedy')
    greedy = measure_greedy(model, windows)
    all_formats = name != 'qat'
    formats = (kf.scale_formats() if all_formats else {'int8': (kf.Format(), kf.Format())}) | \
        kf.int4_formats(model.plan.head_dim, halves=all_formats)
    formats, raw_formats = measure_formats(model, windows, formats, raw['float32'], lambda: tick('formats'))
    row = {'forward_loss': plain.mean().item(), 'forward_minus_cache': gap(plain, raw['float32']),
           'rounded_forward_loss': own.mean().item(), 'rounded_forward_minus_int8': gap(own, raw['int8']),
           'format_minus_int8': gap(raw_formats['int8'], raw['int8']), 'caches': caches, 'greedy': greedy, 'formats': formats}
    if row['forward_minus_cache']['largest'] > 1e-4:
        raise RuntimeError(f"the float32 cache and the plain forward pass differ: {row['forward_minus_cache']}")
    if abs(row['format_minus_int8']['mean']) > 1e-4:  # the formats would not be those of the cache
        raise RuntimeError(f"int8 in the forward pass and the int8 cache differ: {row['format_minus_int8']}")
    return row


def gap(a, b) -> dict:
    """Mean of a - b, and the largest of |a - b|, over windows."""
    return {'mean': (a - b).mean().item(), 'largest': (a - b).abs().max().item()}


def run(name: str, seed: int, tick=lambda what: None) -> dict:
    """Measure one trained run."""
    model, s = trained(name, seed)
    windows = spread_windows(open_split(ensure_dataset(s.dataset), 'val'), s.block_size, WINDOWS)
    return {'run': name, 'seed': seed, 'dataset': s.dataset, 'steps': s.max_iters, 'B': s.batch_size, 'T': s.block_size,
            'W': s.window_size, 'n_head': s.n_head, 'n_kv_head': model.plan.n_kv_head, 'head_dim': model.plan.head_dim,
            'windows': len(windows), 'tokens': windows[:, 1:].numel(), 'first': FIRST, 'chunk': CHUNK, 'eval_B': BATCH,
            'prompts': min(PROMPTS, len(windows)), 'prompt_tokens': s.block_size // 2, 'new_tokens': NEW,
            'dtype': 'float32', 'hardware': f'{os.cpu_count()} CPU cores ({platform.machine()})',
            'threads': torch.get_num_threads(), 'torch': torch.__version__, **measure(model, name, windows, tick)}


# -- the command line -----------------------------------------------------------------------------------------------------

def progress() -> Progress:
    return Progress(TextColumn('{task.description:28}'), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=Console(stderr=True))


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def committed() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob('*-seed*.json'))]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--runs', nargs='+', default=list(RUNS), choices=RUNS, metavar='NAME',
                        help=f"default: all of them, which are {', '.join(RUNS)}")
    parser.add_argument('--seeds', nargs='+', type=int, metavar='SEED',
                        help='default: ' + ', '.join(f"{name}: {' '.join(map(str, seeds))}" for name, seeds in SEEDS.items()))
    parser.add_argument('--jobs', type=int, default=2, metavar='N', help='runs that train at the same time (default: 2)')
    parser.add_argument('--table', action='store_true', help='only remake the page from the JSON files')
    args = parser.parse_args(argv)
    if args.jobs < 1:
        raise UserError(f'--jobs {args.jobs}: must be at least 1')
    path_of = {(name, seed): RESULTS / f'{name}-seed{seed}.json' for name in args.runs for seed in args.seeds or SEEDS[name]}
    wanted = [] if args.table else [run for run, path in path_of.items() if not path.exists()]
    if wanted:
        ensure_dataset(parse('train', settings(*wanted[0]), echo=False).dataset)
        train_all(wanted, args.jobs)
    for name, seed in wanted:
        with progress() as bars:
            task = bars.add_task(f'measuring {name}-seed{seed}', total=None)

            def tick(what):
                bars.update(task, advance=1, description=f'measuring {name}-seed{seed}: {what}')  # noqa: B023
            row = run(name, seed, tick)
        write(path_of[name, seed], json.dumps(row, indent=1) + '\n')
    rows = committed()
    if rows:
        write(RESULTS / 'README.md', page(rows))


if __name__ == '__main__':
    run_program(main)
