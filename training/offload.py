"""Activations that wait for the backward pass in host memory."""
import torch
from torch.nn import Parameter

SMALLEST = 2 ** 16  # bytes; less than this is not worth a copy


def offloaded(device: torch.device, streams: bool = True):
    """A context: what the operations inside save for the backward pass lies in host memory until it is needed.

    On CUDA the memory is pinned, and the copies out run on a stream of their own, beside the computation. Parameters and
    views of them stay where they are. On a CPU everything is copied all the same, which saves nothing: there, that is for
    tests. streams: False copies in order, from memory that is not pinned.
    """
    return torch.autograd.graph.saved_tensors_hooks(_Pack(device, streams), _unpack)


class _Pack:
    """Takes a tensor that autograd is about to save, gives what `_unpack` makes it from again."""

    def __init__(self, device, streams):
        self.device = device
        self.stream = torch.cuda.Stream(device) if streams and device.type == 'cuda' else None

    def __call__(self, x):
        if x.device != self.device or x.nbytes < SMALLEST or isinstance(x, Parameter) or isinstance(x._base, Parameter):
            return x if isinstance(x, Parameter) else x.detach()  # x itself would be kept by its own graph
        held = torch.empty_like(x, device='cpu', pin_memory=self.stream is not None, requires_grad=False)
        if self.stream is None:
            return held.copy_(x.detach()), x.device, None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            held.copy_(x.detach(), non_blocking=True)
            done = self.stream.record_event()
        x.record_stream(self.stream)  # its memory must not be used again before it has been copied
        return held, x.device, done


def _unpack(packed):
    if torch.is_tensor(packed):
        return packed
    held, device, done = packed
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    return held.to(device, non_blocking=True)
