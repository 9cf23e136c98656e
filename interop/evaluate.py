"""Evaluate a model on a text in bits per byte, which are comparable between tokenizers.

    python -m interop.evaluate --out_dir=out-mqa-local --text=my.txt
    python -m interop.evaluate --out_dir=out-mqa-local --text=my.txt --stride=64 --kv_dtype=int8
    python -m interop.evaluate --init_from=gpt2 --text=my.txt
    python -m interop.evaluate --init_from=my-model --text=my.txt    # a folder of interop.export

A window of `context` tokens moves over the text by `stride`. Each token is predicted once, in the
first window that contains it, so after the first window each has at least context - stride tokens
of context. With byte pairs the text follows <|endoftext|>; with a character tokenizer, the
first character is not predicted and not counted. Line ends are one byte, as in the data sets.
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import itertools
import json
import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

import configurator
from common.errors import UserError, at_least
from common.files import read_text
from common.settings import KV_DTYPES, Json, Running, Source, key
from data.progress import tracked
from interop.load import load, with_newest_run
from training.evaluate import bits_per_byte, forward, through_cache


@dataclass(frozen=True)
class Settings(Source, Json, Running):
    text: str = key('', 'text file to evaluate')
    context: int = key(0, 'most tokens of context for a prediction; 0 = block_size')
    stride: int = key(0, 'tokens between windows: few = much context, slow; 0 = context / 2')
    batch_size: int = key(8, 'windows in a batch')
    kv_dtype: str = key('', "'' = no cache; else the dtype of a KV cache", ('', *KV_DTYPES))


def windows_of(n: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (begin, end, scored) of each window over n tokens: its input is tokens begin to
    end - 1, and it predicts begin + 1 to end, of which the last `scored` are new."""
    windows, num_predicted = [], 0
    while num_predicted < n - 1:
        end = min(num_predicted + stride if windows else context, n - 1)
        windows.append((max(0, end - context), end, end - num_predicted))
        num_predicted = end
    return windows


@torch.inference_mode()
def total_nats(logits_of, ids: torch.Tensor, context: int, stride: int, batch_size: int) -> float:
    """The sum of cross-entropies over all predictions of ids (n,), on the model's device."""
    total, windows = 0.0, tracked(windows_of(len(ids), context, stride), 'evaluating')
    for (_, scored), same_shape in itertools.groupby(windows, lambda w: (w[1] - w[0], w[2])):
        while batch := list(itertools.islice(same_shape, batch_size)):
            rows = torch.stack([ids[begin:end + 1] for begin, end, _ in batch])
            logits, targets = logits_of(rows[:, :-1])[:, -scored:], rows[:, -scored:]
            for row, y in zip(logits, targets):  # a row at a time: float64 logits are large
                total += F.cross_entropy(row.double(), y, reduction='sum').item()
    return total


def encode(name: str, text: str, tokenizer) -> tuple[list[int], int]:
    """Return the token ids and the number of bytes of the text that are predicted."""
    try:
        ids, n_bytes = tokenizer.encode(text, special=False), len(text.encode())
    except UserError as e:
        raise UserError(f'text={name!r}: {e}') from e
    if tokenizer.end_of_text is not None:
        ids = [tokenizer.end_of_text, *ids]
    elif ids:
        n_bytes -= len(tokenizer.decode(ids[:1]).encode())
    if len(ids) < 2:
        raise UserError(f'text={name!r} has nothing to predict')
    return ids, n_bytes


def evaluate(s) -> dict:
    """Return the metrics for the settings' model and text. UserError: if the input is invalid."""
    at_least(s, context=0, stride=0, batch_size=1)
    if not s.text:
        raise UserError('give the text to evaluate on: --text=FILE')
    text = read_text(s.text, f'text={s.text!r}')
    s = with_newest_run(s)
    model, tokenizer, _ = load(s)
    block_size = model.config.block_size
    context = s.context or block_size
    if model.config.pos_embedding == 'learned' and context > block_size:
        raise UserError(f'context={context}: the model has learned {block_size} positions')
    stride = s.stride or max(1, context // 2)
    if stride > context:
        raise UserError(f'stride={stride} is more than context={context}: it would skip tokens')
    ids, n_bytes = encode(s.text, text, tokenizer)
    logits_of, kv_dtype = forward(model), ''
    if s.kv_dtype:
        logits_of = through_cache(model, s.kv_dtype, max(1, context // 4), max(1, context // 16))
        kv_dtype = model.resolved_kv_dtype(s.kv_dtype)
    ids = torch.tensor(ids, device=model.device)
    n = len(ids) - 1
    nats = total_nats(logits_of, ids, context, stride, s.batch_size) / n
    return {'model': s.out_dir if s.init_from == 'resume' else s.init_from, 'text': s.text,
            'tokens': n, 'bytes': n_bytes, 'nats_per_token': nats,
            'perplexity': math.exp(min(nats, 700)),
            'bits_per_byte': bits_per_byte(nats, n, n_bytes),
            'context': context, 'stride': stride, 'kv_dtype': kv_dtype,
            'dtype': str(model.dtype).removeprefix('torch.')}


def main(argv=None):
    s = configurator.parse(Settings, argv, usage=__doc__, echo=False)
    found = evaluate(s)
    dtype = found['kv_dtype']
    how = f'through a cache in {dtype}' if dtype else 'by the forward pass'
    print(f"{found['bits_per_byte']:.4f} bits per byte, "
          f"{found['nats_per_token']:.4f} nats per token, perplexity {found['perplexity']:,.2f}: "
          f"{found['tokens']:,} tokens, {found['bytes']:,} bytes, windows of "
          f"{found['context']:,} that move by {found['stride']:,}, {how}, {found['dtype']}")
    if s.json:
        print(json.dumps(found))


if __name__ == '__main__':
    configurator.run_program(main)
