"""Three forms of a language model's loss and its gradients, timed in turns, with GPT-2's vocabulary and width.

    python lab/scripts/loss_forms.py            # results/cpu/loss/ (about three minutes; leave it alone)
    python lab/scripts/loss_forms.py --table

whole: `F.linear`, then `F.cross_entropy`. chunked: `training.loss`. torch: `F.linear_cross_entropy` in chunks (torch 2.13 on).
Forward and backward, float32.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn import functional as F

from lab.benchmarks import clock
from lab.benchmarks.report import spread
from lab.benchmarks.setting import processor
from training.loss import linear_cross_entropy

RESULTS = Path(__file__).resolve().parents[2] / 'results' / 'cpu' / 'loss'
TOKENS, WIDTH, VOCABULARY, ROUNDS = (1024, 4096), 768, 50304, 5
FORMS = {'whole': lambda x, w, y: F.cross_entropy(F.linear(x, w), y), 'chunked': linear_cross_entropy}
if hasattr(F, 'linear_cross_entropy'):
    FORMS['torch'] = lambda x, w, y: F.linear_cross_entropy(x, w, y, options=torch.nn.LinearCrossEntropyOptions())


def measure(n: int) -> dict:
    """Seconds of each form for n tokens, and how far its gradients are from those of 'whole', relative."""
    x, w = torch.randn(n, WIDTH, requires_grad=True), torch.nn.Parameter(0.02 * torch.randn(VOCABULARY, WIDTH))
    y, gradients = torch.randint(VOCABULARY, (n,)), {}

    def timed(name):
        x.grad = w.grad = None
        start = clock.now()
        FORMS[name](x, w, y).backward()
        seconds = clock.now() - start
        gradients[name] = w.grad
        return seconds

    found = clock.alternate({name: (lambda name=name: timed(name)) for name in FORMS}, ROUNDS, f'{n} tokens')
    truth = gradients['whole']
    return {'tokens': n, 'forms': {name: {'ms': clock.summary(1000 * s for s in seconds),
                                          'time_ratio': clock.paired(seconds, found['whole']),
                                          'gradient_difference': ((gradients[name] - truth).norm() / truth.norm()).item()}
                                   for name, seconds in found.items()}}


def table(found: dict) -> str:
    """Markdown."""
    lines = ['# Forms of the loss', '',
             f"`python lab/scripts/loss_forms.py`: {found['processor']}, {found['threads']} threads, torch {found['torch']}, "
             f"float32; forward and backward for width {found['width']} and {found['vocabulary']:,} tokens of vocabulary; "
             f"median (min-max) of {found['rounds']} rounds.", '',
             '| tokens | form | ms | time, x | gradient of the weight off by |', '|---:|---|---:|---:|---:|']
    lines += [f"| {cell['tokens']:,} | {name} | {spread(form['ms'], ',.0f')} | {spread(form['time_ratio'], '.2f')} | "
              f"{form['gradient_difference']:.0e} |" for cell in found['cells'] for name, form in cell['forms'].items()]
    return '\n'.join(lines) + '\n'


def main():
    if '--help' in sys.argv or '-h' in sys.argv:
        return print(__doc__.strip())
    path = RESULTS / 'loss.json'
    if '--table' not in sys.argv:
        torch.manual_seed(1)
        found = {'processor': processor(), 'threads': torch.get_num_threads(), 'torch': torch.__version__, 'dtype': 'float32',
                 'rounds': ROUNDS, 'width': WIDTH, 'vocabulary': VOCABULARY, 'cells': [measure(n) for n in TOKENS]}
        RESULTS.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + '\n', encoding='utf-8')
    page = table(json.loads(path.read_text(encoding='utf-8')))
    (RESULTS / 'README.md').write_text(page, encoding='utf-8')
    print(page)


if __name__ == '__main__':
    main()
