"""Prepare a model's weights for inference: quantize or compile them."""
import torch
from torch import nn

from common.errors import UserError
from engine.weights.quantized import (
    CUDA_MULTIPLE, Int4Linear, Int8Linear, QuantizedLinear, quantize)
from model import GPT

INT4_GROUP = 32


def quantize_weights(model, weight_dtype: str, int4_group: int = INT4_GROUP) -> None:
    """Quantize the model's Linear layers in place; see `engine.weights.quantized`.

    weight_dtype: 'auto' (unchanged), 'int8' or 'int4'. int4_group: columns that share a scale.
    Raises UserError, before changing anything, if `int4_group` does not divide the widths, or if
    CUDA's int8 matmul does not take them.
    """
    widths = sorted({m.in_features for m in model.transformer.h.modules()
                     if isinstance(m, nn.Linear)})
    if weight_dtype == 'int8':
        odd = [width for width in widths if width % CUDA_MULTIPLE]
        if model.device.type == 'cuda' and odd:
            raise UserError(f"weight_dtype='int8': on CUDA the width of every matrix must be a "
                            f'multiple of {CUDA_MULTIPLE}, and one is {odd[0]} wide')
        quantize(model, Int8Linear)
    elif weight_dtype == 'int4':
        for width in widths:
            if int4_group < 8 or int4_group % 8 or width % int4_group:
                raise UserError(f'int4_group={int4_group}: must be a multiple of 8 that divides '
                                f'the width of every matrix, and one is {width} wide')
        quantize(model, lambda linear: Int4Linear(linear, int4_group))


def weights_dtype(model) -> str:
    """'float32', 'bfloat16', ... 'int8' or 'int4'."""
    linear = model.transformer.h[0].mlp.c_fc
    if isinstance(linear, QuantizedLinear):
        return 'int8' if isinstance(linear, Int8Linear) else f'int4, groups of {linear.group}'
    return str(model.dtype).removeprefix('torch.')


def n_parameters(config, positions: bool = True) -> int:
    """Number of parameters of a model of this config, before they are quantized. No memory is
    allocated. positions: count position embeddings, too."""
    with torch.device('meta'):
        return GPT(config).get_num_params(non_embedding=not positions)


def weight_bytes(model) -> int:
    """Bytes of all parameters and buffers."""
    return sum(x.nbytes for x in stored_tensors(model))


def stored_tensors(model) -> list:
    """Parameters and buffers (quantized weights may be either), without duplicates."""
    return list({id(x): x for x in (*model.parameters(), *model.buffers())}.values())


def compile_for_decode(model) -> None:
    """torch.compile the MLPs, in place. (Attention would be recompiled as the cache grows.)
    Raises UserError for quantized weights, whose matmuls torch cannot compile."""
    if isinstance(model.lm_head, Int8Linear):
        raise UserError(f'compile=True does not go with weights in {weights_dtype(model)}: '
                        'leave out one of the two')
    for block in model.transformer.h:
        block.mlp.compile()
