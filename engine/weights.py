"""Weights for inference: stored in less than the compute dtype, compiled, or in the order that a
GEMM likes."""
import logging
import warnings

import torch
from torch import nn

from config.errors import UserError
from engine.linear import FewRowsLinear, speed_up_few_rows

COMPILED_INT8_WIDTH = 64
PACKED_ROWS = range(4, 65)  # fewer are as fast without; for more the product is bound by arithmetic


def quantize_weights(model, weight_dtype: str):
    """The model with the matrices of its Linear layers stored as `weight_dtype`, in place;
    returned.

    'auto' leaves them as they are. 'int8': symmetric, one scale per output row, by torchao;
    computed in the model's dtype. The embedding stays as it is (only the rows of a step are read);
    lm_head, tied to it until now, gets int8 values of its own. Half the memory of bfloat16; it
    saves no time on the CPU we measured, where each product first converts its weight, and
    compiling the MLPs mends only part of that (results/cpu/).

    Raises:
        UserError: torchao is not installed.
    """
    if weight_dtype == 'auto':
        return model
    # it tells of kernels that it has not been built with
    logging.getLogger('torchao').setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as e:
        raise UserError("weight_dtype='int8' needs the torchao package: "
                        "pip install -e '.[int8]'") from e
    quantize_(model, Int8WeightOnlyConfig())
    return model


def weights_dtype(model) -> str:
    """'float32', 'bfloat16', ... or 'int8 (computed in bfloat16)'."""
    weight = model.transformer.h[0].mlp.c_fc.weight
    dtype = str(weight.dtype).removeprefix('torch.')
    return f'int8 (computed in {dtype})' if type(weight) is not nn.Parameter else dtype


def compile_for_decode(model) -> None:
    """torch.compile what of a decode step keeps its shapes: the MLPs, in place. Not the attention:
    it would be compiled anew as the cache grows.

    Raises:
        UserError: int8 weights of a width for which torch's compiled product crashes or gives NaN
            (seen in 2.13 on a CPU).
    """
    c = model.config
    widths = c.n_embd, c.resolved_mlp_hidden
    if 'int8' in weights_dtype(model) and any(width % COMPILED_INT8_WIDTH for width in widths):
        raise UserError(f"compile=True with weight_dtype='int8' needs n_embd={c.n_embd} and the "
                        f"MLP's width {c.resolved_mlp_hidden} to be multiples of "
                        f"{COMPILED_INT8_WIDTH}: torch's compiled int8 products are wrong for "
                        'others; leave out one of the two')
    for block in model.transformer.h:
        block.mlp.compile()


@torch.no_grad()
def pack_weights(model, n_rows: int) -> bool:
    """Keep a copy of each Linear's weight in the order in which MKL's GEMM reads it for a batch of
    `n_rows`, for decoding on a CPU in float32; whether it was done. It takes as much memory again
    as the weights; what it gains is in results/cpu/parts/. Once a weight changes, its copy is not
    used any more.

    torch's compiler uses the same operations where it may freeze weights; they are not part of its
    public interface, so where they are missing, or give something else than the plain product,
    nothing is packed.
    """
    speed_up_few_rows(model)
    layers = [m for m in model.modules() if isinstance(m, FewRowsLinear)]
    for layer in layers:
        layer.packed = None
    if n_rows not in PACKED_ROWS or not all(
            m.plain_on_cpu() and not m.weight.is_inference() for m in layers):
        return False
    try:
        for layer in layers:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(layer.weight.detach(), n_rows)
            layer.packed = n_rows, packed, layer.weight, layer.weight._version
        first = layers[0]
        # draws no random numbers
        x = torch.linspace(-1, 1, n_rows * first.in_features).sin().view(n_rows, -1)
        plain = nn.functional.linear(x, first.weight, first.bias)
        good = torch.allclose(first(x), plain, atol=1e-3, rtol=1e-3)
    except (AttributeError, RuntimeError):
        good = False
    if not good:
        for layer in layers:
            layer.packed = None
    return good
