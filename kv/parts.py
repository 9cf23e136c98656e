"""What a tensor is made of, where it is a subclass that holds others (torchao's: values and
scales)."""
import torch


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """Its plain tensors, in their order; a plain one is its own. (Of a DTensor: this process's
    part.)"""
    if not hasattr(x, '__tensor_flatten__'):
        return [x]
    names, _ = x.__tensor_flatten__()
    inner = [getattr(x, name) for name in names]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in parts_of(each)]


def tensor_nbytes(x: torch.Tensor) -> int:
    """Bytes of all of them."""
    return sum(part.numel() * part.element_size() for part in parts_of(x))
