"""Memory of a training step: `measure` runs one with the eager model, which may be fake
(`training.memory`), and tracks every storage."""
import contextlib
import math
import weakref
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import attention.kernels.flex
from config.errors import UserError
from config.sizes import available_memory, nice_bytes
from training import native
from training.device import memory_use
from training.fsdp import own_nbytes
from training.optim import state_nbytes
from training.recompute import policy_of

ACTIVATIONS, LOSS, BACKWARD = 'activations', 'logits and loss', 'gradients'
aten = torch.ops.aten
# torch's FLOP formulas, and some for what it does not cover: in 2.11, K with fewer heads than Q
FLOPS = dict(flop_registry)
FLOPS[aten.addmm_] = flop_registry[aten.addmm]
for name in 'flash_attention', 'flash_attention_for_cpu', 'efficient_attention', 'cudnn_attention':
    name = f'_scaled_dot_product_{name}'
    FLOPS[getattr(aten, name)] = lambda q, k, *_, **__: 4 * q.numel() * k.size(2)
    FLOPS[getattr(aten, f'{name}_backward')] = lambda _, q, k, *a, **b: 10 * q.numel() * k.size(2)
FLOPS[torch.ops.nanokv.attention] = lambda q, *_, out_val: 4 * q.numel() * q.size(2)
FLOPS[torch.ops.nanokv.attention_backward] = lambda q, *_, out_val: 10 * q.numel() * q.size(2)


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step.

    activations: kept from the forward pass for the backward pass, without logits and loss.
    loss_peak: the maximum that lm_head and the loss need in addition, until the gradient of
    lm_head's input is known. peak: the overall maximum, with parameters, gradients and optimizer
    state. offloaded: activations on the host. flops: for matmuls and attention, including
    recomputation.
    """
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss_peak: int
    peak: int
    offloaded: int = 0
    flops: int = 0
    policy: str = 'none'


class StorageTracker(TorchDispatchMode):
    """A context that tracks the storages allocated inside it.

    Enter it before any other dispatch mode, so that it sees the operations that are executed, also
    under FakeTensorMode. Hooks on saved tensors would miss what selective checkpointing keeps. Not
    counted: other workspaces of kernels, and the allocator's rounding and fragmentation.

    Attributes:
        label: of what is allocated now: ACTIVATIONS, from the output of the last norm on LOSS, from
            that output's gradient on BACKWARD.
        live: label -> bytes on the model's device now.
        peak, loss_peak: the maxima so far, of all labels and of LOSS (without the gradient of
            lm_head's weight).
        offloaded: bytes on other devices now.
        flops: for matmuls and attention (causal masks count as full), by torch's formulas.
    """

    def __init__(self, model):
        super().__init__()
        self.device = model.device
        self.final_norm, self.head_shape = model.transformer.ln_f, model.lm_head.weight.shape
        self.label, self.live = ACTIVATIONS, Counter()
        self.peak = self.loss_peak = self.offloaded = self.flops = 0
        self._finalizers = {}

    def __enter__(self):
        self._hook = self.final_norm.register_forward_hook(self._begin_loss)
        return super().__enter__()

    def __exit__(self, *exc):
        self._hook.remove()
        return super().__exit__(*exc)

    def _begin_loss(self, module, _, output):
        self.label = LOSS
        output.register_hook(self._end_loss)

    def _end_loss(self, _):
        self.label = BACKWARD

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func is aten.add.Tensor and self.label == BACKWARD and not torch.is_grad_enabled():
            self._accumulate_in_place(*args[:2])
        out = func(*args, **kwargs)
        input_storages = {id(x.untyped_storage()) for x in inputs}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and id(x.untyped_storage()) not in input_storages:
                # the chunked loss computes this gradient
                is_head_grad = self.label == LOSS and x.shape == self.head_shape
                self._allocate(x, BACKWARD if is_head_grad else self.label)
        self._update_peaks(_scratch_bytes(func, inputs), self.label)
        if flops := FLOPS.get(func.overloadpacket):
            self.flops += flops(*args, **kwargs, out_val=out)
        return out

    def _accumulate_in_place(self, grad, other):
        """Free `grad`: autograd adds to it in place, except under a dispatch mode."""
        if torch.is_tensor(other) and grad.shape == other.shape:
            storage = grad.untyped_storage()
            if storage.nbytes() == grad.nbytes and id(storage) in self._finalizers:
                self._finalizers[id(storage)]()

    def _allocate(self, x, label):
        storage = x.untyped_storage()
        n, key = storage.nbytes(), id(storage)
        if key in self._finalizers and self._finalizers[key].alive:
            return
        on_device = x.device == self.device
        self._finalizers[key] = weakref.finalize(storage, self._count, -n, label, on_device)
        self._count(n, label, on_device)

    def _count(self, n, label, on_device):
        if not on_device:
            self.offloaded += n
            return
        self.live[label] += n
        self._update_peaks(0, label)

    def _update_peaks(self, scratch, label):
        self.peak = max(self.peak, self.live.total() + scratch)
        self.loss_peak = max(self.loss_peak, self.live[LOSS] + scratch * (label == LOSS))


def _scratch_bytes(func, inputs) -> int:
    """Return the bytes of a kernel's workspace: for logsumexp a tensor of its input's size, for a
    sum of two dtypes on a CPU the narrower operand, converted to the wider dtype, for the backward
    pass of attention in C++ its sums."""
    if func is torch.ops.nanokv.attention_backward.default:
        return 4 * math.prod(native.sums_shape(inputs[1]))
    if func is aten.logsumexp.default:
        return inputs[0].nbytes
    is_add = func in (aten.add.Tensor, aten.add_.Tensor) and len(inputs) == 2
    if is_add and inputs[0].device.type == 'cpu':
        narrow, wide = sorted(inputs, key=lambda x: x.itemsize)
        return narrow.numel() * wide.itemsize if narrow.dtype != wide.dtype else 0
    return 0


def measure(model, batch, autocast=None, *, optimizer='adamw', accumulate: bool = False) -> Memory:
    """Return the `Memory` of a forward and backward pass, by running it. Random state, gradients
    and training mode are restored.

    batch: (idx, targets), each (B, T) int64 on the model's device. autocast: a context for the
    forward pass; None = float32. optimizer: as in `state_bytes`. accumulate: gradients already
    exist at the start, as with gradient accumulation.
    """
    was_training, gradients = model.training, [p.grad for p in model.parameters()]
    devices = [model.device] if model.device.type == 'cuda' else []
    with torch.random.fork_rng(devices, device_type='cuda'):
        try:
            model.train()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if accumulate else None
            return _track_step(model, batch, autocast or contextlib.nullcontext(), optimizer,
                               accumulate)
        finally:
            model.train(was_training)
            for p, grad in zip(model.parameters(), gradients):
                p.grad = grad


def _track_step(model, batch, autocast, optimizer, accumulate):
    for table in filter(None, (model.rotary or {}).values()):  # cached: not activations
        table(0, batch[0].size(1), model.device, model.lm_head.weight.dtype)
    # Under a dispatch mode FlexAttention runs uncompiled and would keep all scores. SDPA keeps the
    # same tensors as compiled FlexAttention: q, k, v, the output and one float32 per query.
    flex = mock.patch.object(attention.kernels.flex, 'flex_local_attention', _sdpa)
    with flex, StorageTracker(model) as tracker:
        with autocast:
            loss = model(*batch)[1]
        activations, on_host = tracker.live[ACTIVATIONS], tracker.offloaded
        loss.backward()
    parameters, gradients, state = state_bytes(model, optimizer)
    peak = max(gradients, tracker.peak + gradients * accumulate)
    return Memory(parameters, gradients, state, activations, tracker.loss_peak,
                  parameters + state + peak, on_host, tracker.flops, policy_of(model))


def _sdpa(q, k, v, window):
    gqa = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def state_bytes(model, optimizer='adamw') -> tuple[int, int, int]:
    """Return bytes of parameters, gradients and optimizer state on the device. State that does not
    exist yet is predicted. optimizer: an optimizer, or the name of one (see `training.optim`)."""
    parameters = sum(map(own_nbytes, model.parameters()))
    gradients = sum(own_nbytes(p) for p in model.parameters() if p.requires_grad)
    if not isinstance(optimizer, str) and optimizer.state:
        state = tree_leaves(list(optimizer.state.values()))
        return parameters, gradients, sum(own_nbytes(x) for x in state if torch.is_tensor(x))
    name = optimizer if isinstance(optimizer, str) else 'adamw'
    return parameters, gradients, state_nbytes(model, name)


def memory_line(model, optimizer, device: torch.device) -> str:
    """Return two lines to print after the first step: bytes of live tensors, and the peak."""
    parameters, gradients, state = state_bytes(model, optimizer)
    text = (f'memory: parameters {nice_bytes(parameters)}, gradients {nice_bytes(gradients)}, '
            f'optimizer {nice_bytes(state)}')
    peak = memory_use(device).peak
    if device.type == 'cuda':
        rest = max(0, peak - parameters - gradients - state)
        text += (f',\n        activations and all else {nice_bytes(rest)}, '
                 f'peak {nice_bytes(peak)}')
    elif peak is not None:
        text += f',\n        peak {nice_bytes(peak)} (of the whole process, with Python and torch)'
    return text


def free_memory(device: torch.device) -> int:
    """Return the bytes free on the device or the host. Raises UserError if that is unknown."""
    if device.type == 'cuda':
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free = available_memory()
    if not free:
        raise UserError('this system does not say how much memory is free: give --budget=8GB')
    return free
