"""The model in a checkpoint. A file of a few bytes can name any sizes, so they are compared with
the weights before a model is allocated."""
from pathlib import Path

import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from kv.weights import HEAD
from model import GPT
from training.checkpoint.file import config_of, load_weights, restoring

FEW_LAYERS = 100


def model_of(checkpoint: dict, path: Path, **overrides) -> GPT:
    """Return the model in a checkpoint with its weights. `overrides` replace fields of its config.
    Raises a UserError as `config_of` and `load_weights` do, before anything large is allocated."""
    config = config_of(checkpoint, path, **overrides)
    check_weights(config, checkpoint, path)
    model = GPT(config)
    load_weights(model, checkpoint, path)
    return model


def check_weights(config: GPTConfig, checkpoint: dict, path: Path) -> None:
    """Raise a UserError if the weights are not those of a model with this config."""
    weights = checkpoint['model']
    # building layers takes time even on the meta device
    if config.n_layer > max(len(weights), FEW_LAYERS):
        raise UserError(f'checkpoint {path}: n_layer={config.n_layer:,}, but it has only '
                        f'{len(weights):,} weights')
    with torch.device('meta'):
        model = GPT(config)
    with restoring(path, 'model'):
        model.load_state_dict({name: x.to('meta') if torch.is_tensor(x) else x
                               for name, x in weights.items()})
        shared = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                  for x in weights.values() if x.device.type == 'cpu'}
        own = sum(x.nbytes for name, x in weights.items() if name != HEAD)
    if own > sum(shared.values()):
        raise UserError(f'checkpoint {path}: its weights share memory, or repeat their elements; '
                        'allowed are weights of their own, as torch.save writes them')
