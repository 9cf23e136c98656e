"""Weights for inference: quantized, or compiled."""
from config.errors import UserError
from engine.quantized import Int8Linear, quantize_int8
from kv.parts import tensor_nbytes


def quantize_weights(model, weight_dtype: str) -> None:
    """The matrices of the model's Linear layers in less than its dtype, in place.

    'auto' leaves them as they are. 'int8': weights and activations (`engine.quantized`); the token
    embedding is the same matrix as the output layer and stays so.
    """
    if weight_dtype == 'int8':
        quantize_int8(model)


def weights_dtype(model) -> str:
    """'float32', 'bfloat16', ... or 'int8'."""
    if isinstance(model.lm_head, Int8Linear):
        return 'int8'
    return str(model.dtype).removeprefix('torch.')


def weight_bytes(model) -> int:
    """Bytes of all parameters and buffers."""
    return sum(map(tensor_nbytes, stored_tensors(model)))


def stored_tensors(model) -> list:
    """Parameters and buffers (quantized weights may be either), each once."""
    return list({id(x): x for x in (*model.parameters(), *model.buffers())}.values())


def compile_for_decode(model) -> None:
    """torch.compile what of a decode step keeps its shapes: the MLPs, in place. Not the attention:
    it would be compiled anew as the cache grows.

    Raises:
        UserError: quantized weights, whose matmuls are not torch's to compile.
    """
    if weights_dtype(model) == 'int8':
        raise UserError("compile=True and weight_dtype='int8' do not go together: leave out one")
    for block in model.transformer.h:
        block.mlp.compile()
