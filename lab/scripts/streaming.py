"""What does a trained model lose to a window with attention sinks (StreamingLLM, Xiao et al. 2023)?

    python lab/scripts/streaming.py results/elastic_NAME RUNS > FILE

Takes 'base alone' of each seed of the ladder config/ablate_elastic.py, whose models are in RUNS. In
every layer a token sees the first tokens of the text (the sinks) and the last ones. A line is a
seed and a size. The positions are those of the text, which are within the trained length here.
"""
import itertools
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from data.datasets import ensure_dataset  # noqa: E402
from data.tokenfiles import open_split  # noqa: E402
from training.checkpoint.load_model import model_of  # noqa: E402
from training.evaluate import forward, judge, spread_windows  # noqa: E402

SINKS, KEPT = 4, (16, 64, 10 ** 9)  # tokens that a layer holds, the sinks with them; the last: all


def attending(kept: int):
    """An attention function of a block (`attention.causal_attention`) that sees so many tokens."""
    def attend(q, k, v, *_):
        i, j = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
        mask = (j <= i) & ((i - j < kept - SINKS) | (j < SINKS))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return attend


def main(folder: Path, runs: Path):
    [base] = (row for row in json.loads((folder / 'results.json').read_text('utf-8'))['rows']
              if row['name'] == 'base alone')
    s = configurator.parse(train.Settings, shlex.split(base['command'])[2:], echo=False)
    windows = spread_windows(open_split(ensure_dataset(s.dataset), 'val'), s.block_size, 500)
    for seed, kept in itertools.product(base['seeds'], KEPT):
        [file] = runs.glob(f'base-alone-seed{seed}-*/ckpt.pt')
        model = model_of(torch.load(file, map_location='cpu', weights_only=True), file).eval()
        for block in model.transformer.h:
            block.attn.attend = attending(kept)
        held = min(kept, s.block_size)
        print(json.dumps(dict(
            seed=seed, sinks=SINKS, held=held, T=s.block_size,
            bytes_per_token=base['kv']['bytes_per_token'] * held / s.block_size,
            val_loss=judge(forward(model), windows, 16).mean().item())), flush=True)


if __name__ == '__main__':
    main(*map(Path, sys.argv[1:3]))
