"""How well a model predicts a text: bits per byte, which compares models of any alphabet or tokenizer.

    python -m interop.evaluate --out_dir=out-mqa-local --text=my.txt
    python -m interop.evaluate --out_dir=out-mqa-local --text=my.txt --stride=64 --kv_dtype=int8 --json=True
    python -m interop.evaluate --init_from=gpt2 --text=my.txt
    python -m interop.evaluate --init_from=my-model --text=my.txt        # what interop.export wrote

A window of `context` tokens moves over the text by `stride`; each token is predicted once, in the first window that has it, so
that all but those of the first window see at least context - stride tokens before them. GPT-2's text begins with <|endoftext|>,
from which the first token is predicted; a text of characters has nothing before its first one, which does not count. Line
ends count as one byte, however the file writes them.
"""
from config import missing  # noqa: F401  # isort: skip  (before packages that may be missing)
import json
import math
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F

import configurator
from config.errors import UserError, at_least
from data.tokenizer import CharTokenizer, GPT2Tokenizer
from engine.evaluate import bits_per_byte, forward, through_cache
from interop.load import load


def windows_of(n: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, scored) of windows over n tokens, of which all but the first are predicted: each takes tokens begin to
    end - 1 and predicts begin + 1 to end, of which the last `scored` are new."""
    found, done = [], 0  # predictions so far
    while done < n - 1:
        end = min(context if not found else done + stride, n - 1)
        found.append((max(0, end - context), end, end - done))
        done = end
    return found


@torch.inference_mode()
def nats_of(logits_of, ids: torch.Tensor, context: int, stride: int, batch_size: int) -> float:
    """The sum over all predictions of ids (n,), on the model's device."""
    windows, total = windows_of(len(ids), context, stride), 0.0
    batches: list[list] = []
    for window in windows:  # alike side by side
        alike = batches and len(batches[-1]) < batch_size and _shape(batches[-1][0]) == _shape(window)
        batches[-1].append(window) if alike else batches.append([window])
    for batch in track(batches, 'judging', console=Console(stderr=True), disable=not sys.stderr.isatty()):
        rows = torch.stack([ids[begin:end + 1] for begin, end, _ in batch])
        scored = batch[0][2]
        logits = logits_of(rows[:, :-1])[:, -scored:]
        total += sum(F.cross_entropy(one.double(), y, reduction='sum').item() for one, y in zip(logits, rows[:, -scored:]))
    return total


def _shape(window):
    begin, end, scored = window
    return end - begin, scored


def check_alphabet(name: str, text: str, alphabet) -> None:
    """Raises UserError: the file `name` has characters that the alphabet lacks; says where."""
    lacking = [i for i, c in enumerate(text) if c not in alphabet]
    if lacking:
        i = lacking[0]
        line, column = text.count('\n', 0, i) + 1, i - text.rfind('\n', 0, i)
        raise UserError(f'text={name!r}, line {line}, column {column}: '
                        f"{text[i]!r} is not in the model's alphabet; "
                        f'different characters that it lacks: {len({text[i] for i in lacking}):,}, '
                        f'occurrences: {len(lacking):,}')


def evaluate(s) -> dict:
    """The figures of the settings' model and text.

    Raises:
        UserError: no readable text, or one with characters that the model's alphabet lacks; numbers out of range.
    """
    if not s.text:
        raise UserError('give the text to judge: --text=FILE')
    at_least(s, context=0, stride=0, batch_size=1)
    try:
        text = Path(s.text).read_text(encoding='utf-8-sig')  # as data sets are read: line ends are \n
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f'text={s.text!r} cannot be read as UTF-8 text: {e}') from e
    model, tokenizer = load(s)
    context = s.context or model.config.block_size
    if model.config.pos_embedding == 'learned' and context > model.config.block_size:
        raise UserError(f'context={context}: the model has learned {model.config.block_size} positions')
    stride = s.stride or max(1, context // 2)
    if stride > context:
        raise UserError(f'stride={stride} is more than context={context}: some tokens would be in no window')
    if isinstance(tokenizer, CharTokenizer):
        check_alphabet(s.text, text, tokenizer.stoi)
    ids, uncounted = tokenizer.encode(text, special=False), 0
    if isinstance(tokenizer, GPT2Tokenizer):
        ids = [tokenizer.encoding.eot_token, *ids]
    elif ids:
        uncounted = len(tokenizer.decode(ids[:1]).encode())
    if len(ids) < 2:
        raise UserError(f'text={s.text!r} has nothing to predict')
    logits_of = through_cache(model, s.kv_dtype, max(1, context // 4), max(1, context // 16)) if s.kv_dtype else forward(model)
    nats = nats_of(logits_of, torch.tensor(ids, device=model.device), context, stride, s.batch_size)
    n, size = len(ids) - 1, len(text.encode()) - uncounted
    return {'model': s.out_dir if s.init_from == 'resume' else s.init_from, 'text': s.text,
            'tokens': n, 'bytes': size, 'nats_per_token': nats / n, 'perplexity': math.exp(min(nats / n, 700)),
            'bits_per_byte': bits_per_byte(nats / n, n, size), 'context': context, 'stride': stride,
            'kv_dtype': model.resolved_kv_dtype(s.kv_dtype) if s.kv_dtype else '',
            'dtype': str(model.dtype).removeprefix('torch.')}


def main(argv=None):
    s = configurator.parse('evaluate', argv, usage=__doc__, echo=False)
    found = evaluate(s)
    how = f"through a cache in {found['kv_dtype']}" if found['kv_dtype'] else 'by the forward pass'
    print(f"{found['bits_per_byte']:.4f} bits per byte, {found['nats_per_token']:.4f} nats per token, perplexity "
          f"{found['perplexity']:,.2f}: {found['tokens']:,} tokens, {found['bytes']:,} bytes, windows of {found['context']:,} "
          f"that move by {found['stride']:,}, {how}, {found['dtype']}")
    if s.json:
        print(json.dumps(found))


if __name__ == '__main__':
    configurator.run_program(main)
