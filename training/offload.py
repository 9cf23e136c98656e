"""Activations kept in host memory until the backward pass."""
import torch
from torch.nn import Parameter

SMALLEST = 2 ** 16  # bytes; smaller tensors are not worth a copy


def offloaded(device: torch.device, streams: bool = True):
    """Return a context that keeps tensors saved for the backward pass in host memory.

    On CUDA the memory is pinned, and copies to the host run on their own stream, unless streams is
    False. Parameters and views of them stay on the device. On a CPU tensors are copied as well, for
    tests.
    """
    stream = torch.cuda.Stream(device) if streams and device.type == 'cuda' else None

    def pack(x):
        if isinstance(x, Parameter):
            return x
        if x.device != device or x.nbytes < SMALLEST or isinstance(x._base, Parameter):
            return x.detach()  # returning x would keep it alive through its own graph
        copy = torch.empty_like(x, device='cpu', pin_memory=stream is not None)
        if stream is None:
            return copy.copy_(x.detach()), x.device, None
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            copy.copy_(x.detach(), non_blocking=True)
            done = stream.record_event()
        x.record_stream(stream)  # prevents its reuse before it has been copied
        return copy, x.device, done

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(packed):
    if torch.is_tensor(packed):
        return packed
    copy, device, done = packed
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    return copy.to(device, non_blocking=True)
