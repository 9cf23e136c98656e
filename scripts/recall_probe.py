"""Which layer order remembers beyond local reach? Trains small models on associative recall and compares them.

    python scripts/recall_probe.py                         # all arms, seed 1; writes results/recall/<arm>-seed1.json
    python scripts/recall_probe.py --arms=mha,LLLLLG-tied --seeds=1,2
    python scripts/recall_probe.py --table                 # only remake results/recall/README.md from the JSON files

Local layers carry information window - 1 positions each, so a stack of n_local of them reaches n_local * (W - 1) at the
very most; what is recalled from farther away came through the global layers. Finished runs are not repeated.
An arm counts only where plain multi-head attention (mha) reaches 95%.
"""
import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config.errors import UserError  # noqa: E402
from configurator import run_program  # noqa: E402
from data.recall.task import RecallTask  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

RESULTS = ROOT / 'results' / 'recall'
N_LAYER, WINDOW, BLOCK_SIZE = 12, 8, 128
TASK = RecallTask(block_size=BLOCK_SIZE, n_keys=16, n_values=16, n_pairs=6, n_queries=6, min_distance=2,
                  max_distance=110)
LOCAL_REACH = 10 * (WINDOW - 1)  # ten of the twelve layers are local
RANGES = {'in window': (1, WINDOW - 1), 'in local reach': (WINDOW, LOCAL_REACH), 'beyond': (LOCAL_REACH + 1, BLOCK_SIZE)}

SHARED = dict(n_kv_head=1, window_size=WINDOW)
LAST = dict(SHARED, layer_pattern='LLLLLG', kv_share='AABBBC')
FIRST = dict(SHARED, layer_pattern='GLLLLL', kv_share='ABBCCC')
ARMS = {
    'mha': {},                                         # every layer global, every head its own K/V: the yardstick
    'LLLLLG-tied': dict(LAST, share_global_kv=True),   # the default
    'LLLLLG-untied': LAST,
    'GLLLLL-tied': dict(FIRST, share_global_kv=True),  # the published drawing's order
    'GLLLLL-untied': FIRST,
    'local-only': dict(SHARED, layer_pattern='L'),     # control: must fail beyond its reach
}
BATCH, STEPS, WARMUP, LEARNING_RATE, EVAL_EVERY, EVAL_ROWS = 32, 2000, 100, 2e-3, 50, 256


def accuracy(model, task, seed) -> dict[str, float]:
    """Share of queries answered right by the likeliest token, by range of distance, on fixed sequences."""
    model.eval()
    x, y, distance = task.batch(np.random.default_rng(10_000 + seed), EVAL_ROWS)
    with torch.no_grad():
        right = torch.cat([model(rows, all_logits=True)[0].argmax(-1) for rows in torch.from_numpy(x).split(64)])
    right = right.numpy() == y
    model.train()
    return {name: float(right[(distance >= low) & (distance <= high)].mean()) for name, (low, high) in RANGES.items()}


def run(arm: str, seed: int) -> dict:
    """Train one arm until it recalls 99% beyond local reach at two evaluations running, or for STEPS steps."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=BLOCK_SIZE, vocab_size=TASK.vocab_size, n_layer=N_LAYER, n_head=4, n_embd=64, bias=False,
                       pos_embedding='rope', qk_norm=True, **ARMS[arm])
    model, rng = GPT(config), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    curve, started = [], time.perf_counter()
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group['lr'] = LEARNING_RATE * min(1.0, step / WARMUP)
        x, y, _ = (torch.from_numpy(a) for a in TASK.batch(rng, BATCH))
        loss = model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVAL_EVERY == 0:
            curve.append({'step': step, 'loss': loss.item(), **accuracy(model, TASK, seed)})
            last = curve[-1]
            print(f"{arm} seed {seed} step {step}: loss {last['loss']:.3f}, "
                  + ', '.join(f'{name} {last[name]:.1%}' for name in RANGES), flush=True)
            if len(curve) > 1 and min(row['beyond'] for row in curve[-2:]) >= 0.99:
                break
    reached = next((row['step'] for row in curve if row['beyond'] >= 0.95), None)
    return {'arm': arm, 'seed': seed, 'settings': ARMS[arm], 'n_layer': N_LAYER, 'n_head': 4, 'n_embd': 64,
            'T': BLOCK_SIZE, 'W': WINDOW, 'B': BATCH, 'max_steps': STEPS, 'learning_rate': LEARNING_RATE,
            'task': vars(TASK), 'local_reach': LOCAL_REACH, 'dtype': 'float32',
            'kv_bytes_bf16': model.plan.nbytes(1, BLOCK_SIZE, 'bfloat16'), 'params': model.get_num_params(),
            'steps': curve[-1]['step'], 'steps_to_95': reached, 'accuracy': {name: curve[-1][name] for name in RANGES},
            'seconds': time.perf_counter() - started, 'torch': torch.__version__, 'threads': torch.get_num_threads(),
            'hardware': platform.machine(), 'curve': curve}


def table(rows: list[dict]) -> str:
    """The Markdown page made from the runs."""
    first = rows[0]
    lines = ['# Recall beyond local reach', '',
             f"{first['n_layer']} layers, {first['n_embd']} wide, RoPE and qk_norm, T={first['T']}, W={first['W']}, "
             f"B={first['B']}, {first['dtype']} on {first['hardware']} CPU, torch {first['torch']}. "
             f"{first['task']['n_pairs']} key-value pairs, recalled {first['task']['min_distance']} to "
             f"{first['task']['max_distance']} positions later. Ten local layers reach at most "
             f"{first['local_reach']} positions back. At most {first['max_steps']} steps; a run ends early at 99% "
             'beyond that reach. Made by `python scripts/recall_probe.py`.', '',
             '| arm | seed | KV bytes (bf16) | steps to 95% beyond | steps run | in window | in local reach | beyond |',
             '|---|---|---|---|---|---|---|---|']
    for r in sorted(rows, key=lambda r: (list(ARMS).index(r['arm']), r['seed'])):
        lines.append(f"| {r['arm']} | {r['seed']} | {r['kv_bytes_bf16']:,} | {r['steps_to_95'] or '-'} | {r['steps']} | "
                     + ' | '.join(f"{r['accuracy'][name]:.1%}" for name in RANGES) + ' |')
    return '\n'.join(lines) + '\n'


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arms', default=','.join(ARMS), help='comma-separated; all by default')
    parser.add_argument('--seeds', default='1', help='comma-separated')
    parser.add_argument('--table', action='store_true', help='only remake the table from the JSON files')
    args = parser.parse_args(argv)
    unknown = [arm for arm in args.arms.split(',') if arm not in ARMS]
    if unknown:
        raise UserError(f"--arms: unknown {unknown[0]!r}; there are {', '.join(ARMS)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(',')):
        for arm in args.arms.split(',') if not args.table else []:
            path = RESULTS / f'{arm}-seed{seed}.json'
            if not path.exists():
                path.write_text(json.dumps(run(arm, seed), indent=1) + '\n')
    rows = [json.loads(path.read_text()) for path in sorted(RESULTS.glob('*-seed*.json'))]
    if rows:
        (RESULTS / 'README.md').write_text(table(rows))


if __name__ == '__main__':
    run_program(main)
