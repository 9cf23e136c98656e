"""Int8 matmuls in training, forward and backward, for the blocks' linear layers, with torchao.

Weights, activations and gradients are rounded with a scale per row; parameters and optimizer state
stay in floating point (rounding: LLM.int8(), Dettmers et al. 2022; training: SwitchBack, Wortsman
et al. 2023). On GPUs int8 matmuls can take half the time of bfloat16; on CPUs they are slower.
"""
import functools

import torch
from torch.nn import Linear

from config.errors import UserError


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raise UserError if the dtype or the device does not support int8 training."""
    if dtype == torch.float16:
        raise UserError("dtype='float16' is too narrow for the scales of int8_training: use "
                        'bfloat16 or float32')
    if device.type not in ('cuda', 'cpu'):
        raise UserError(f'int8_training runs on CUDA (and slowly on a CPU), not on {device.type!r}')


def train_in_int8(model) -> None:
    """Train the blocks' linear layers with int8 matmuls. UserError if `int8_linear` raises it."""
    layers = [m for m in model.transformer.h.modules() if type(m) is Linear]
    for layer in layers:
        layer.__class__ = int8_linear()
    print(f'training {len(layers)} matrices of blocks in int8')


@functools.cache
def int8_linear() -> type:
    """`Linear` with int8 matmuls in training. Raises UserError if torchao is missing or too old."""
    try:
        from torchao.prototype.quantized_training import (
            Int8MixedPrecisionTrainingConfig, Int8MixedPrecisionTrainingLinear)
    except ImportError as e:
        raise UserError('int8_training=True needs the torchao package, and its '
                        "prototype.quantized_training: pip install -e '.[int8]'") from e

    class Int8Linear(Linear):
        config = Int8MixedPrecisionTrainingConfig()

        def forward(self, x):
            if not self.training:
                return super().forward(x)
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            y = Int8MixedPrecisionTrainingLinear.forward(self, x)
            return y.to(x.dtype)  # the bias may have made it float32
    return Int8Linear
