"""Time what the host does in a decode step of the engine: 64 rows, and a model that costs nothing.

    python lab/scripts/engine_host.py             # results/cpu/engine-host.json; half a minute

On a GPU this work overlaps with the device's, and limits the engine where it takes longer.
"""
import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from config.gpt_config import GPTConfig
from configurator import run_program
from engine.engine import Engine
from engine.params import SamplingParams
from lab.benchmarks.setting import processor
from model import GPT

RESULT = ROOT / 'results' / 'cpu' / 'engine-host.json'
ROWS, WARM_UP, STEPS, VOCAB = 64, 30, 500, 256
CONFIG = dict(n_layer=12, n_head=4, n_embd=64, n_kv_head=1, layer_pattern='LLLLLG', bias=False,
              kv_share='AABBBC', share_global_kv=True, window_size=64, pos_embedding='rope',
              qk_norm=True, block_size=2048, vocab_size=VOCAB)
SAMPLING = {'greedy': dict(temperature=0.0), 'temperature': dict(temperature=0.8),
            'top-k, top-p': dict(temperature=0.8, top_k=50, top_p=0.9)}


class Free:
    """A decode step that computes nothing: it counts the tokens, and returns the same logits."""

    def __init__(self, cache):
        self.cache, self.logits = cache, torch.randn(ROWS, VOCAB)

    def __call__(self, tokens, lens=None):
        self.cache.begin(1, lens, range(len(tokens)))
        self.cache.commit()
        return self.logits[:len(tokens)]


def milliseconds(model, asynchronous: bool, sampling: dict) -> float:
    """Median of the steps in which all rows decode."""
    engine = Engine(model, ROWS, prefix_budget=10 ** 9, asynchronous=asynchronous)
    engine.fast_decode, times = Free(engine.cache), []
    for row in range(ROWS):
        engine.submit([1, 2, 3, row], SamplingParams(1500, seed=row, **sampling))
    while any(job.request.num_computed_tokens < WARM_UP for job in engine.jobs.values()):
        engine.step()
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - start))
    return median(times)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--save', type=Path, default=RESULT, help='default: %(default)s')
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(GPTConfig(**CONFIG))
    found = {name: {kind: milliseconds(model, kind == 'asynchronous', sampling)
                    for kind in ('synchronous', 'asynchronous')}
             for name, sampling in SAMPLING.items()}
    facts = {'rows': ROWS, 'vocab_size': VOCAB, 'steps': STEPS, 'processor': processor(),
             'threads': 1, 'torch': torch.__version__, 'milliseconds': found}
    args.save.parent.mkdir(parents=True, exist_ok=True)
    args.save.write_text(json.dumps(facts, indent=1) + '\n')
    for name, times in found.items():
        print(name + ': ' + ', '.join(f'{kind} {ms:.2f} ms' for kind, ms in times.items()))


if __name__ == '__main__':
    run_program(lambda: main(sys.argv[1:]))
