"""Why a decode step on a CPU is built as it is: the parts it could be built from, timed in turns, in GPT-2 124M's shape.

    python lab/scripts/decode_parts.py            # results/cpu/parts/ (about two minutes; leave it alone)
    python lab/scripts/decode_parts.py --table

Products of 1 to 32 rows with all the weights of a step, as `F.linear`, by chunks of 64 weight rows (`engine.linear`) and
packed (`engine.weights.pack_weights`); and attention of one token over K laid out by position or transposed
(`kv.slots.KVStore`). Bytes read over time, random float32.
"""
import functools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn import functional as F

from engine.linear import FewRowsLinear
from engine.weights import pack_weights
from lab.benchmarks import clock
from lab.benchmarks.bandwidth import Bandwidth
from lab.benchmarks.setting import processor

RESULTS = Path(__file__).resolve().parents[2] / 'results' / 'cpu' / 'parts'
SHAPES = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]  # of a layer of GPT-2 124M: c_attn, c_proj, c_fc, c_proj
ROWS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32)
ATTENTION = [(16, 12, 12, 4096), (4, 12, 12, 16384), (16, 12, 1, 4096), (4, 12, 1, 16384)]  # B, H, Hkv, S; D = 64
ROUNDS = 7


def seconds_of(sides: dict) -> dict[str, float]:
    """Median seconds of each, in turns."""
    def timed(run):
        start = clock.now()
        run()
        return clock.now() - start
    found = clock.alternate({name: functools.partial(timed, run) for name, run in sides.items()}, ROUNDS, 'parts')
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def products() -> list[dict]:
    """GB/s of a step's products, by number of rows."""
    with torch.inference_mode(False):  # inference tensors are not packed
        layers = [FewRowsLinear(n_in, n_out, bias=False) for _ in range(12) for n_out, n_in in SHAPES]
        layers.append(FewRowsLinear(768, 50304, bias=False))
    model, n_bytes = torch.nn.ModuleList(layers), sum(layer.weight.nbytes for layer in layers)
    rows = []
    for n in ROWS:
        x = {width: torch.randn(n, width) for width in (768, 3072)}
        sides = {'linear': lambda x=x: [F.linear(x[m.in_features], m.weight) for m in layers],
                 'chunks': lambda x=x: [m._in_chunks(x[m.in_features]) for m in layers]}
        if pack_weights(model, n):
            sides['packed'] = lambda x=x: [m(x[m.in_features]) for m in layers]
        seconds = seconds_of(sides)
        rows.append({'rows': n, **{name: n_bytes / s / 1e9 for name, s in seconds.items()}})
    return rows


def attend(q, k, v):
    """Each layer's: q (B, Hkv, H / Hkv, D), k and v lists of (B, Hkv, S, D)."""
    return [(q @ k.transpose(2, 3)).softmax(-1) @ v for k, v in zip(k, v)]


def attention() -> list[dict]:
    """GB/s of softmax(q K^T) V, by the layout of K."""
    rows = []
    for B, H, n_kv_head, S in ATTENTION:
        shape, n_layer = (B, n_kv_head, S, 64), 2
        q = torch.randn(B, n_kv_head, H // n_kv_head, 64)
        v = [torch.randn(shape) for _ in range(n_layer)]
        layouts = {'by position': [torch.randn(shape) for _ in range(n_layer)],
                   'transposed': [torch.randn(B, n_kv_head, 64, S).transpose(2, 3) for _ in range(n_layer)]}
        seconds = seconds_of({name: functools.partial(attend, q, k, v) for name, k in layouts.items()})
        n_bytes = 2 * n_layer * v[0].nbytes
        rows.append({'B': B, 'H': H, 'n_kv_head': n_kv_head, 'S': S})
        rows[-1] |= {name: n_bytes / s / 1e9 for name, s in seconds.items()}
    return rows


def table(found: dict) -> str:
    """Markdown."""
    lines = ['# Parts of a decode step', '',
             f"`python lab/scripts/decode_parts.py`: {found['processor']}, {found['threads']} threads, torch {found['torch']}, "
             f"float32, GB/s of weights or K/V read, medians of {found['rounds']} rounds; reading alone: "
             f"{found['bandwidth']:.1f} GB/s ({found['kernel']}).", '',
             'All products of a step in the shape of GPT-2 124M (494 MB of weights), by rows of the batch:', '',
             '| rows | ' + ' | '.join(str(r['rows']) for r in found['products']) + ' |',
             '|---' * (len(found['products']) + 1) + '|']
    for name in ('linear', 'chunks', 'packed'):
        lines.append(f'| {name} | ' + ' | '.join(f'{r[name]:.1f}' if name in r else '' for r in found['products']) + ' |')
    lines += ['', 'Attention of one token per row, head_dim 64, by the layout of K in memory:', '',
              '| B | H | Hkv | S | by position | transposed |', '|---' * 6 + '|']
    lines += [f"| {r['B']} | {r['H']} | {r['n_kv_head']} | {r['S']:,} | {r['by position']:.1f} | {r['transposed']:.1f} |"
              for r in found['attention']]
    return '\n'.join(lines) + '\n'


@torch.inference_mode()
def main():
    if '--help' in sys.argv or '-h' in sys.argv:
        return print(__doc__.strip())
    path = RESULTS / 'parts.json'
    if '--table' not in sys.argv:
        torch.manual_seed(1)
        bandwidth = Bandwidth(torch.device('cpu'))
        found = {'processor': processor(), 'threads': torch.get_num_threads(), 'torch': torch.__version__, 'dtype': 'float32',
                 'rounds': ROUNDS, 'products': products(), 'attention': attention(), 'bandwidth': bandwidth() / 1e9,
                 'kernel': bandwidth.kernel}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')
    page = table(json.loads(path.read_text(encoding='utf-8')))
    (RESULTS / 'README.md').write_text(page, encoding='utf-8')
    print(page)


if __name__ == '__main__':
    main()
