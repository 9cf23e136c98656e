"""Judge the trained weights of one run, as every row that uses them: `python -m lab.ablation.measure ROW SEED CONFIG ...`.

ablate.py starts this when a run is trained. Writes measured/ROW-seedSEED.json for each of the rows.
"""
import dataclasses
import math
import os
import statistics
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

import configurator
from config.errors import UserError
from data.datasets import ensure_dataset
from data.recall.lags import read_task
from data.tokenfiles import open_split, read_meta
from data.tokenizer import load_tokenizer
from engine.evaluate import bits_per_byte, forward, judge, n_bytes, spread_windows, through_cache, with_rounding
from engine.weights import quantize_weights
from interop.convert import convert_weights
from kv.plan import LOCAL
from lab.ablation.ladder import read_ladder
from lab.ablation.results import Results
from model import GPT
from training.batches import RECALL
from training.checkpoint import config_of, load_checkpoint, load_weights
from training.device import device_name, pick_device, pick_dtype
from training.log import read_metrics

# nats: how far rounding may take the mean loss of a window through the cache from the forward pass (of n windows together, that
# over the root of n). In int8, a sum in another order may put a value over the edge to the next step, which later layers feel.
AGREE, AGREE_INT8 = 1e-4, 2e-3
BATCH, MOST_LOGITS = 16, 2 ** 26  # windows judged at once, and the logits that they may have
RECALL_ROWS, RECALL_SEED = 256, 10_000  # sequences judged for each distance, which training does not draw


def trained_model(ladder, row, saved, path) -> GPT:
    """The weights of `saved` as `row` uses them, on the CPU in float32."""
    trained = config_of(saved, path)
    wanted = ladder.trained_config(row)
    if dataclasses.replace(trained, dropout=wanted.dropout) != wanted:
        raise UserError(f'{path} holds another model than row {row.name!r} trains: delete its folder to train it anew')
    model = GPT(trained)
    load_weights(model, saved, path)
    config = ladder.config(row)
    if row.at_inference:
        changed = GPT(config)
        changed.load_state_dict(convert_weights(model.state_dict(), dataclasses.replace(trained, dropout=0.0), config))
        return changed.eval()
    return model.eval()


def losses(model, row, windows, tokenizer) -> dict:
    """Loss by the forward pass and through the row's cache, which must agree where both store the same."""
    kv_dtype = model.resolved_kv_dtype(row.kv_dtype)
    T = windows.size(1) - 1
    first, chunk = max(1, T // 4), max(1, T // 16)
    # a model that rounds in its forward pass does so for any cache that would not do it
    batch = max(1, min(BATCH, MOST_LOGITS // (T * model.config.vocab_size)))
    plain = judge(forward(with_rounding(model, True) if kv_dtype == 'int8' else model), windows, batch)
    cached = judge(through_cache(model, kv_dtype, first, chunk), windows, batch)
    apart, apart_all = (plain.by_window - cached.by_window).abs().max().item(), abs(plain.loss - cached.loss)
    exact = kv_dtype in ('int8', str(model.dtype).removeprefix('torch.'))
    bound = AGREE_INT8 if 'int8' in (kv_dtype, row.weight_dtype) else AGREE
    if exact and not (apart <= bound and apart_all <= bound / len(windows) ** 0.5):
        raise RuntimeError(f'row {row.name!r}: the loss through the cache is not that of the forward pass: a window differs by '
                           f'{apart:.1e} nats, all {len(windows)} together by {apart_all:.1e}; {bound:.0e} a window would be '
                           'rounding')
    tokens, size = windows[:, 1:].numel(), n_bytes(tokenizer, windows)
    return {'val_loss': cached.loss, 'val_loss_forward': plain.loss, 'cache_minus_forward_largest': apart,
            'bits_per_byte': bits_per_byte(cached.loss, tokens, size), 'perplexity': math.exp(cached.loss),
            'loss_by_position': [round(x, 5) for x in cached.by_position.tolist()], 'kv_dtype': kv_dtype,
            'windows': len(windows), 'tokens': tokens, 'bytes': size, 'chunks': [first, chunk]}


def training_figures(out_dir: Path, s) -> dict:
    """From metrics.jsonl: the curve, and pace and memory as they were while it trained (other runs beside it may have slowed
    it down: lab/ablation/cost.py measures)."""
    rows = read_metrics(out_dir / 'metrics.jsonl')
    evaluated = [[row['iter'], row['train_loss'], row['val_loss']] for row in rows if 'val_loss' in row]
    curve = [[row['iter'], None if row['loss'] is None else round(row['loss'], 5)] for row in rows]  # None: not finite
    return {'curve': curve, 'evaluations': evaluated,
            'seconds_per_iteration': statistics.median(row['time_ms'] for row in rows) / 1000,
            'memory_peak_bytes': max((row.get('memory_peak_bytes', 0) for row in rows), default=0),
            'skipped': rows[-1].get('skipped', 0), 'iterations': s.max_iters,
            'tokens': s.max_iters * s.batch_size * s.gradient_accumulation_steps * s.block_size}


def recall(model, row, task, rows: int = RECALL_ROWS) -> dict:
    """Share of the tokens named right (the likeliest is the one), by distance, through the row's cache."""
    logits_of = through_cache(model, model.resolved_kv_dtype(row.kv_dtype), task.block_size // 2, 16)
    accuracy = {}
    for distance in task.distances:
        rng = np.random.default_rng((RECALL_SEED, distance))
        x, y, _ = (torch.from_numpy(a).to(model.device) for a in task.batch(rng, rows, distance))
        with torch.inference_mode():
            choices = torch.cat([logits_of(some).argmax(-1) for some in x.split(BATCH)])
        accuracy[distance] = (choices == y)[y >= 0].float().mean().item()
    n_local = sum(layer.kind == LOCAL for layer in model.plan.layers)
    return {'accuracy': accuracy, 'rows': rows, 'local_reach': n_local * (model.config.window_size - 1)}


def measure(ladder, row, seed: int, saved, path: Path) -> dict:
    """One row with one seed."""
    s = ladder.settings(row)
    device = pick_device(s.device)
    model = trained_model(ladder, row, saved, path).to(device)
    sizes = {'params': model.get_num_params(), 'params_all': model.get_num_params(non_embedding=False)}
    quantize_weights(model, row.weight_dtype)
    if s.dataset == RECALL:
        judged = {'recall': recall(model, row, read_task(s.recall_task, s.block_size))}
    else:
        folder = ensure_dataset(s.dataset)
        windows = spread_windows(open_split(folder, 'val'), s.block_size, ladder.s.eval_windows).to(device)
        judged = losses(model, row, windows, load_tokenizer(read_meta(folder)))
    return {'row': row.name, 'seed': seed, 'fingerprint': ladder.fingerprint(row), 'trained_as': ladder.trainer(row).name,
            'command': ladder.command(row, seed), **sizes, **judged,
            'training': training_figures(path.parent, s), 'settings': vars(s) | {'seed': seed, 'out_dir': '', 'device': ''},
            'dtype': str(pick_dtype(s.dtype, device)).removeprefix('torch.'),
            'hardware': f'{device_name(device)}, {os.cpu_count()} cores', 'torch': torch.__version__}


def main(argv=None):
    name, seed, *rest = sys.argv[1:] if argv is None else argv
    _, ladder = read_ladder(rest, echo=False)
    results, trained = Results(ladder), ladder.rows[name]
    path = results.out_dir(trained, int(seed)) / 'ckpt.pt'
    saved = load_checkpoint(path)
    wanted = ladder.settings(trained).max_iters
    if saved['iter_num'] != wanted:
        raise UserError(f"{path} stands at iteration {saved['iter_num']} of {wanted}: run ablate.py again to go on")
    failures = []
    for row in ladder.rows.values():
        asked = row is trained or int(seed) in ladder.seeds(row)  # or trained for the sake of rows that begin with its weights
        if asked and ladder.training(row) == ladder.training(trained):
            print(f'measuring {row.name}, seed {seed}', flush=True)
            try:
                results.write(row, int(seed), measure(ladder, row, int(seed), saved, path))
            except Exception as e:  # the other rows with these weights may well be fine
                traceback.print_exc()
                failures.append(f'measuring {row.name}: {type(e).__name__}: {e}')
                results.write_failure(row, int(seed), failures[-1])
    if failures:
        raise UserError('; '.join(failures))


if __name__ == '__main__':
    configurator.run_program(main)
