"""The tensors of an exported model, without vLLM."""
import copy

import torch

from ..modeling_nanokv import NanoKVForCausalLM
from .config import NanoKVConfig


def shapes(config: NanoKVConfig) -> dict[str, tuple[int, ...]]:
    """{name in the folder: shape} of all tensors. ValueError: if vLLM cannot run the model."""
    if config.field('key_offset'):
        raise ValueError("config.json: nanokv.key_offset=True: vLLM's caches have no place for "
                         'the half of a key that the next token needs')
    with torch.device('meta'):
        model = NanoKVForCausalLM(copy.deepcopy(config))  # which transformers changes
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}
