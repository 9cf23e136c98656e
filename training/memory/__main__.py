"""The memory of a training step for every recomputation policy, predicted without a step.

    python -m training.memory config/train_gpt2.py --batch_size=8
    python -m training.memory config/train_gpt2.py --device=cpu --dtype=bfloat16 --compile=False
    python -m training.memory --help

Predictions are for one process and the eager model (compiled models fuse operations and keep less).
"""
from common import startup  # noqa: F401  # isort: skip  (before torch is imported)
import json
import os
from dataclasses import dataclass

import configurator
from common.errors import at_least
from common.settings import Attention, Device, Json, Model, key
from common.sizes import nice_bytes
from data.datasets import DATA_ROOT
from data.tokenfiles import read_meta
from kv.console import output, print_table
from training.device import pick_device
from training.memory.measure import policy_table, predict
from training.native.loading import training_dtype


@dataclass(frozen=True)
class Settings(Json, Model, Device, Attention):
    """Those of train.py that a step's memory depends on."""
    batch_size: int = key(12, 'sequences in a micro-batch')
    gradient_accumulation_steps: int = key(40, 'micro-batches per iteration')
    dataset: str = key('openwebtext', 'folder under data/, of which only the vocabulary counts')
    optimizer: str = key('adamw', "'adamw' or 'muon'", ('adamw', 'muon'))
    recompute: str = key('none', 'a policy to predict beside those that have a name')
    chunked_loss: bool = key(True, 'compute large logits and their gradients in chunks')
    compile: bool = key(True, 'torch.compile the model')


def main(argv=None):
    s = configurator.parse(Settings, argv, usage=__doc__, echo=False)
    at_least(s, batch_size=1, gradient_accumulation_steps=1)
    device = pick_device(s.device)
    dtype = training_dtype(s.dtype, s.compile, device)
    meta = read_meta(DATA_ROOT / os.path.basename(s.dataset))
    vocab_size = meta['vocab_size'] if meta else 50304  # GPT-2's, if the data set is not prepared
    config = s.config(vocab_size)

    predictions = predict(s, config, device, dtype,
                          accumulate=s.gradient_accumulation_steps > 1)
    m, name = predictions['none'], str(dtype).removeprefix('torch.')
    title = f'a micro-batch of {s.batch_size} x {s.block_size:,} tokens on {device}, in {name}'
    print_table(output(), policy_table(predictions), title)
    print(f'parameters {nice_bytes(m.parameters)}, gradients {nice_bytes(m.gradients)}, '
          f'optimizer {nice_bytes(m.optimizer)} are in every peak')
    if s.json:
        print(json.dumps({'device': str(device), 'dtype': name, 'batch_size': s.batch_size,
                          'block_size': s.block_size, 'parameters': m.parameters,
                          'gradients': m.gradients, 'optimizer': m.optimizer,
                          'policies': {policy: vars(m) for policy, m in predictions.items()}}))


if __name__ == '__main__':
    configurator.run_program(main)
