"""Which layer order remembers beyond local reach? Trains small models to copy from far back and compares them.

    python scripts/recall_probe.py                         # all arms, seed 1; writes results/recall/<arm>-seed1.json
    python scripts/recall_probe.py --arms mha LLLLLG-tied --seeds 1 2
    python scripts/recall_probe.py --table                 # only remake results/recall/README.md from the JSON files

Local layers carry information window - 1 positions each, so a stack of n_local of them reaches n_local * (W - 1) at the
very most; what is recalled from farther away came through the global layers. Finished runs are not repeated.
The task is to repeat a string of random tokens after a fixed distance beyond that reach. An arm counts only where plain
multi-head attention (mha) reaches 95%. (With distances drawn at random mha itself stayed near chance for 1,050 steps at
this size, results/recall/variable-distance-mha.txt, so that harder task tells nothing here.)
"""
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import run_program
from data.recall.task import CopyTask
from model import GPT, GPTConfig
from scripts.runs import run_all

RESULTS = ROOT / 'results' / 'recall'
N_LAYER, N_HEAD, N_EMBD, WINDOW, BLOCK_SIZE = 12, 2, 64, 4, 96
TASK = CopyTask(block_size=BLOCK_SIZE, n_tokens=64, length=40, min_distance=48, max_distance=48)
LOCAL_REACH = 10 * (WINDOW - 1)  # ten of the twelve layers are local

SHARED = dict(n_kv_head=1, window_size=WINDOW)
LAST = dict(SHARED, layer_pattern='LLLLLG', kv_share='AABBBC')
FIRST = dict(SHARED, layer_pattern='GLLLLL', kv_share='ABBCCC')
RUNS = {
    'mha': {},                                         # every layer global, every head its own K/V: the yardstick
    'LLLLLG-tied': dict(LAST, share_global_kv=True),   # the default
    'LLLLLG-untied': LAST,
    'GLLLLL-tied': dict(FIRST, share_global_kv=True),  # the published drawing's order
    'GLLLLL-untied': FIRST,
    'local-only': dict(SHARED, layer_pattern='L'),     # control: must fail beyond its reach
}
SEEDS = [1]
BATCH, STEPS, WARMUP, LEARNING_RATE, EVAL_EVERY, EVAL_ROWS = 32, 1000, 100, 2e-3, 25, 128


@torch.no_grad()
def accuracy(model, seed) -> float:
    """Share of copied tokens that are the likeliest, on fixed sequences that training does not draw."""
    model.eval()
    x, y, _ = (torch.from_numpy(a) for a in TASK.batch(np.random.default_rng(10_000 + seed), EVAL_ROWS))
    right = torch.cat([model(rows, all_logits=True)[0].argmax(-1) for rows in x.split(32)]) == y
    model.train()
    return right[y >= 0].float().mean().item()


def run(arm: str, seed: int) -> dict:
    """Train one arm until it copies 99% at two evaluations running, or for STEPS steps."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=BLOCK_SIZE, vocab_size=TASK.vocab_size, n_layer=N_LAYER, n_head=N_HEAD, n_embd=N_EMBD,
                       bias=False,
                       pos_embedding='rope', qk_norm=True, **RUNS[arm])
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
            curve.append({'step': step, 'loss': loss.item(), 'accuracy': accuracy(model, seed)})
            print(f"{arm} seed {seed} step {step}: loss {loss.item():.3f}, accuracy {curve[-1]['accuracy']:.1%}", flush=True)
            if len(curve) > 1 and min(row['accuracy'] for row in curve[-2:]) >= 0.99:
                break
    reached = next((row['step'] for row in curve if row['accuracy'] >= 0.95), None)
    return {'arm': arm, 'seed': seed, 'settings': RUNS[arm], 'n_layer': N_LAYER, 'n_head': N_HEAD, 'n_embd': N_EMBD,
            'T': BLOCK_SIZE, 'W': WINDOW, 'B': BATCH, 'max_steps': STEPS, 'learning_rate': LEARNING_RATE,
            'task': vars(TASK), 'local_reach': LOCAL_REACH, 'dtype': 'float32',
            'kv_bytes_bf16': model.plan.nbytes(1, BLOCK_SIZE, 'bfloat16'), 'params': model.get_num_params(),
            'steps': curve[-1]['step'], 'steps_to_95': reached, 'accuracy': curve[-1]['accuracy'],
            'seconds': time.perf_counter() - started, 'torch': torch.__version__, 'threads': torch.get_num_threads(),
            'hardware': platform.machine(), 'curve': curve}


def table(rows: list[dict]) -> str:
    """The Markdown page made from the runs."""
    first, task = rows[0], rows[0]['task']
    lines = ['# Recall beyond local reach', '',
             f"Repeat {task['length']} random tokens from {task['max_distance'] - 1} positions back; ten local layers reach at "
             f"most {first['local_reach']}. {first['n_layer']} layers, {first['n_embd']} wide, RoPE and qk_norm, "
             f"T={first['T']}, W={first['W']}, B={first['B']}, {first['dtype']}, {first['hardware']} CPU, torch "
             f"{first['torch']}. At most {first['max_steps']} steps; a run ends early at 99%. "
             'Made by `python scripts/recall_probe.py`.', '',
             '| arm | seed | KV bytes (bf16) | steps to 95% | steps run | accuracy at the end |', '|---|---|---|---|---|---|']
    for r in sorted(rows, key=lambda r: (list(RUNS).index(r['arm']), r['seed'])):
        lines.append(f"| {r['arm']} | {r['seed']} | {r['kv_bytes_bf16']:,} | {r['steps_to_95'] or '-'} | {r['steps']} | "
                     f"{r['accuracy']:.1%} |")
    return '\n'.join(lines) + '\n'


def main(argv=None):
    run_all(globals(), 'arms', RUNS, argv)


if __name__ == '__main__':
    run_program(main)
