"""Evaluate the trained weights of one run, for every row that uses them:

    python -m lab.ablation.measure ROW SEED CONFIG ...

ablate.py starts this after a run is trained. Appends a line to runs.jsonl for each row.
"""
import copy
import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch

import configurator
from common.errors import UserError
from data.datasets import ensure_dataset
from data.recall.tasks import task_of
from data.tokenfiles import open_split, read_meta
from data.tokenizer import load_tokenizer
from training import evaluate
from training.evaluate import judge, through_cache
from engine.weights.quantize import quantize_weights
from training.checkpoint.convert import convert_weights
from lab.ablation.identifiers import find_identifiers, loss_by_distance
from lab.ablation.ladder import read_ladder
from lab.ablation.lookup import lookup, recall
from lab.ablation.results import Results, core_digest
from model import GPT
from training.checkpoint.file import config_of
from training.device import device_name, pick_device
from training.checkpoint.load_model import model_of
from training.native.loading import training_dtype

# Largest difference in nats that rounding may cause between a window's mean loss with the cache and
# without it (for n windows together: divided by the root of n)
AGREE = 1e-4
# In int8, a different order of summation can move a value to the next quantization step, which
# changes the later layers. How far that goes depends on the model: MARGIN times as far as where the
# gains of its norms change by about NOISE, the rounding of float32.
NOISE, MARGIN = 1e-7, 3
BATCH, MOST_LOGITS = 16, 2 ** 26  # maximum windows and logits of an evaluation batch


def trained_model(ladder, row, saved, path) -> GPT:
    """Return the weights of `saved` as `row` uses them, on the CPU in float32. Raises UserError if
    they belong to a different model."""
    trained = config_of(saved, path)
    wanted = ladder.trained_config(row)
    if dataclasses.replace(trained, dropout=wanted.dropout) != wanted:
        raise UserError(f'{path} holds another model than row {row.name!r} trains: delete its '
                        'folder to train it again')
    model = model_of(saved, path)
    if row.at_inference:
        config, trained = ladder.config(row), dataclasses.replace(trained, dropout=0.0)
        weights = convert_weights(model.state_dict(), trained, config)
        model = GPT(config)
        model.load_state_dict(weights)
    return model.eval()


def losses(model, row, windows, tokenizer) -> tuple[dict, torch.Tensor]:
    """Return the losses without a cache and with the row's cache, and those of each target through
    the cache (n, T). Raises RuntimeError if they differ by more than rounding although the cache
    stores what the forward pass computes."""
    kv_dtype = model.resolved_kv_dtype(row.kv_dtype)
    T = windows.size(1) - 1
    first, chunk = max(1, T // 4), max(1, T // 16)
    batch = max(1, min(BATCH, MOST_LOGITS // (T * model.config.vocab_size)))
    plain_model = evaluate.with_rounding(model, True) if kv_dtype == 'int8' else model
    plain = judge(evaluate.forward(plain_model), windows, batch)
    cached = judge(through_cache(model, kv_dtype, first, chunk), windows, batch)
    apart = (plain - cached).mean(1).abs().max().item()
    plain_loss, loss = plain.mean().item(), cached.mean().item()
    apart_all = abs(plain_loss - loss)
    exact = kv_dtype in ('int8', str(model.dtype).removeprefix('torch.'))
    bound = AGREE
    if exact and 'int8' in (kv_dtype, row.weight_dtype):
        bound = max(AGREE, MARGIN * effect_of_noise(plain_model, plain, windows, batch))
    if exact and not (apart <= bound and apart_all <= bound / len(windows) ** 0.5):
        raise RuntimeError(
            f'row {row.name!r}: the loss through the cache is not that of the forward pass: a '
            f'window differs by {apart:.1e} nats, the mean of all {len(windows)} by '
            f'{apart_all:.1e}; rounding explains {bound:.0e} per window')
    tokens, size = windows[:, 1:].numel(), evaluate.n_bytes(tokenizer, windows)
    return {'val_loss': loss, 'val_loss_forward': plain_loss,
            'cache_minus_forward_largest': apart,
            'bits_per_byte': evaluate.bits_per_byte(loss, tokens, size),
            'kv_dtype': kv_dtype, 'windows': len(windows), 'tokens': tokens, 'bytes': size,
            'chunks': [first, chunk]}, cached


def effect_of_noise(model, plain, windows, batch: int) -> float:
    """The largest change of a window's loss if gains change by NOISE. plain: (n, T), without it."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in (p for p in twin.parameters() if p.dim() == 1):
            p.mul_(1 + NOISE * torch.randn(p.shape, generator=generator).to(p.device))
    changed = judge(evaluate.forward(twin), windows, batch)
    return (changed - plain).mean(1).abs().max().item()


def measure(ladder, row, seed: int, saved, path: Path) -> dict:
    """Return the result of one row with one seed."""
    s = ladder.settings(row)
    tokens_per_iter = s.batch_size * s.gradient_accumulation_steps * s.block_size
    device = pick_device(s.device)
    model = trained_model(ladder, row, saved, path).to(device)
    params = model.get_num_params()
    quantize_weights(model, row.weight_dtype)
    task, kv_dtype = task_of(s), model.resolved_kv_dtype(row.kv_dtype)
    if s.dataset == 'lookup':
        judged = {'lookup': lookup(model, kv_dtype, task)}
    elif task:
        judged = {'recall': recall(model, kv_dtype, task)}
    else:
        folder = ensure_dataset(s.dataset)
        tokens = open_split(folder, 'val', model.config.vocab_size)
        tokenizer, asked = load_tokenizer(read_meta(folder)), (s.block_size, ladder.s.eval_windows)
        windows = evaluate.spread_windows(tokens, *asked).to(device)
        judged, nats = losses(model, row, windows, tokenizer)
        if ladder.s.identifiers:
            found = find_identifiers(tokens.window(0, len(tokens)), tokenizer)
            starts = np.array(evaluate.window_starts(len(tokens), *asked))
            judged['identifiers'] = loss_by_distance(nats.numpy(), starts, found)
    return {'fingerprint': ladder.fingerprint(row), 'trained_as': ladder.trainer(row).name,
            'params': params, **judged,
            'training': {'iterations': s.max_iters, 'tokens': s.max_iters * tokens_per_iter},
            'settings': s.values() | {'seed': seed, 'out_dir': '', 'device': ''},
            'dtype': str(training_dtype(s.dtype, s.compile, device)).removeprefix('torch.'),
            'hardware': f'{device_name(device)}, {os.cpu_count()} cores',
            'torch': torch.__version__, 'core': core_digest()}


def main(argv=None):
    name, seed, *rest = sys.argv[1:] if argv is None else argv
    seed = int(seed)
    _, ladder = read_ladder(rest, echo=False)
    results, trained = Results(ladder), ladder.rows[name]
    saved, path = results.trained(trained, seed)
    for row in ladder.rows.values():
        # the trained row counts even with a seed that only rows converted from it need
        asked = row is trained or seed in ladder.seeds(row)
        if asked and ladder.training(row) == ladder.training(trained):
            print(f'measuring {row.name}, seed {seed}', flush=True)
            results.write(row, seed, measure(ladder, row, seed, saved, path))


if __name__ == '__main__':
    configurator.run_program(main)
