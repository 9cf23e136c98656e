"""Plain tensors that a tensor consists of, e.g. the values and scales of a torchao tensor
subclass."""
import torch


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors of x, in order; [x] if x is one. (Of a DTensor: the local shard.)"""
    if not hasattr(x, '__tensor_flatten__'):
        return [x]
    names, _ = x.__tensor_flatten__()
    inner = [getattr(x, name) for name in names]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in parts_of(each)]


def tensor_nbytes(x: torch.Tensor) -> int:
    """Total bytes of the plain tensors of x."""
    return sum(part.numel() * part.element_size() for part in parts_of(x))
