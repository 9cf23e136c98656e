"""Training for int8 weights: the blocks' linear layers round weights (a scale per row) and inputs
(a scale per token) in the forward pass as weight_dtype='int8' does (`engine.weights.quantized`), in
float32 exactly.

Gradients pass through the rounding unchanged (straight-through; Bengio et al. 2013), and backward
matmuls are not rounded. Parameters, moments and checkpoints stay in floating point. Evaluation
rounds too, so the validation loss is that of the int8 model, except for its embedding and lm_head.
"""
import torch
from torch.nn import Linear

from config.errors import UserError
from kv.int8_rows import int8_matmul, quantize_rows


def train_for_int8(model) -> None:
    """Make the blocks' linear layers round in the forward pass, in place."""
    for layer in model.transformer.h.modules():
        if type(layer) is Linear:
            widths = layer.in_features, layer.out_features
            if model.device.type == 'cuda' and any(width % 8 for width in widths):
                raise UserError(f'int8_forward=True: on CUDA the widths of all matrices must be '
                                f'multiples of 8, and one is {widths[0]} by {widths[1]}')
            layer.__class__ = RoundedLinear


class RoundedLinear(Linear):
    """A Linear whose forward pass is that of `engine.weights.quantized.Int8Linear`."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = RoundedMatmul.apply(x.flatten(0, -2), self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


class RoundedMatmul(torch.autograd.Function):
    """x (m, k), weight (n, k) -> (m, n) float32, with both rounded. The gradients are those of the
    matmul of the rounded matrices. They are rounded again in the backward pass, rather than kept,
    so that under FSDP no process keeps all weights."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        values, scale = quantize_rows(weight)
        return int8_matmul(x, values, scale[:, 0])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = grad.to(x.dtype)
        dx = g @ rounded(weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, (g.t() @ rounded(x).to(x.dtype)).to(weight.dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    values, scale = quantize_rows(x)
    return values * scale
