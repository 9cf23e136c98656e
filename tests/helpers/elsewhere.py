"""The section of docs/interop.md 'Take it elsewhere', and a model to try its commands on."""
import re
from pathlib import Path

import numpy as np

import train
from tests.helpers.datasets import write_dataset
from tests.programs.support import FULL_STACK, run_train

ROOT = Path(train.__file__).resolve().parent
ALPHABET = '\n' + ''.join(map(chr, range(32, 127)))


def commands(language: str) -> list[str]:
    """The section's code in `language`: each shell command, or each complete block of Python."""
    text = (ROOT / 'docs/interop.md').read_text()
    section = re.search(r'^## Take it elsewhere\n(.*?)^## ', text, re.M | re.S)[1]
    blocks = re.findall(rf'^```{language}\n(.*?)^```', section, re.M | re.S)
    return [line.partition('  #')[0].strip() for block in blocks
            for line in block.splitlines()] if language == 'sh' else blocks


def train_in(folder: Path, monkeypatch) -> Path:
    """Train a small version of the model that README exports in folder/out-mqa-local, on printable
    characters. Return the folder of the data sets."""
    ids = np.random.default_rng(3).integers(len(ALPHABET), size=2000)
    meta = {'vocab_size': len(ALPHABET), 'stoi': {c: i for i, c in enumerate(ALPHABET)},
            'itos': dict(enumerate(ALPHABET))}
    write_dataset(folder / 'data' / 'printable', {'train': ids, 'val': ids[:400]}, meta)
    monkeypatch.setattr(train, 'DATA_ROOT', folder / 'data')
    run_train(folder / 'out-mqa-local', FULL_STACK, dataset='printable', max_iters=3,
              eval_interval=3, block_size=64)
    return folder / 'data'
