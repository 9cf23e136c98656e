"""Products of int8 numbers in training: those of the blocks' matrices, forward and backward, by torchao.

Weights, activations and gradients are rounded as they come, a scale to each row, and the products are exact; what is kept and
stepped stays in floating point (Dettmers et al. 2022, "LLM.int8()", rounds so; SwitchBack, Wortsman et al. 2023, trains so).
On GPUs int8 products may take half the time of bfloat16's; on a CPU they work, and take longer.
"""
import functools

import torch
from torch.nn import Linear

from config.errors import UserError


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError: where int8 products cannot serve."""
    if dtype == torch.float16:
        raise UserError("dtype='float16' is too narrow for the scales of int8_training: use bfloat16 or float32")
    if device.type not in ('cuda', 'cpu'):
        raise UserError(f'int8_training runs on CUDA (and slowly on a CPU), not on {device.type!r}')


def train_in_int8(model) -> None:
    """Make the blocks' linear layers round in training; evaluation, sampling and checkpoints know nothing of it.

    Raises:
        UserError: torchao is missing, or of a version without this.
    """
    kind = int8_linear()
    layers = [m for m in model.transformer.h.modules() if type(m) is Linear]
    for layer in layers:
        layer.__class__ = kind
    print(f'training {len(layers)} matrices of blocks in int8')


@functools.cache
def int8_linear() -> type:
    """`Linear`, rounding in training. Raises UserError: as `train_in_int8`."""
    try:
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, Int8MixedPrecisionTrainingLinear
    except ImportError as e:
        raise UserError("int8_training=True needs the torchao package, and its prototype.quantized_training: "
                        "pip install -e '.[int8]'") from e

    class Int8Linear(Linear):
        config = Int8MixedPrecisionTrainingConfig()

        def forward(self, x):
            if not self.training:
                return super().forward(x)
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            return Int8MixedPrecisionTrainingLinear.forward(self, x).to(x.dtype)  # a bias in float32 was added
    return Int8Linear
