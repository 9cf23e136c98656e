"""Measures the memory of a training step by tracking every storage, predicts it (the same with fake
tensors), and reports both."""
import contextlib
import weakref
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attention.kernels.flex
from common.gpt_config import GPTConfig
from common.sizes import nice_bytes
from kv.console import output, print_table, table_of
from model import GPT
from training.device import autocast, memory_use
from training.memory.recompute import NAMES, set_recompute
from training.native.loading import wanted
from training.native.modules import speed_up
from training.step.loss import linear_cross_entropy
from training.step.optim import state_bytes

ACTIVATIONS, LOSS, BACKWARD = 'activations', 'logits and loss', 'gradients'


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward pass, without logits and loss
    loss_peak: int    # what lm_head and loss need beside, until the gradient of lm_head's input
    peak: int         # of everything together


class StorageTracker(TorchDispatchMode):
    """A context that tracks the storages allocated inside it on the model's device.

    Enter it before any other dispatch mode, so that it sees the operations that are executed, also
    under FakeTensorMode. Hooks on saved tensors would miss what selective checkpointing keeps. Not
    counted: workspaces of kernels, and the allocator's rounding and fragmentation.

    label: of what is allocated now: ACTIVATIONS, from the output of the last norm on LOSS, from
    that output's gradient on BACKWARD. live: label -> bytes now. peak, loss_peak: the maxima so
    far, of all labels and of LOSS (without the gradient of lm_head's weight).
    """

    def __init__(self, model):
        super().__init__()
        self.device = model.device
        self.final_norm, self.head_shape = model.transformer.ln_f, model.lm_head.weight.shape
        self.label, self.live = ACTIVATIONS, Counter()
        self.peak = self.loss_peak = 0
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
        inputs = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs))
                  if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if (isinstance(x, torch.Tensor) and x.device == self.device
                    and id(x.untyped_storage()) not in inputs):
                self._allocate(x)
        return out

    def _allocate(self, x):
        storage = x.untyped_storage()
        n, key = storage.nbytes(), id(storage)
        if key in self._finalizers and self._finalizers[key].alive:
            return
        # the chunked loss computes the gradient of lm_head's weight
        is_head_grad = self.label == LOSS and x.shape == self.head_shape
        label = BACKWARD if is_head_grad else self.label
        self._finalizers[key] = weakref.finalize(storage, self._count, -n, label)
        self._count(n, label)

    def _count(self, n, label):
        self.live[label] += n
        self.peak = max(self.peak, self.live.total())
        self.loss_peak = max(self.loss_peak, self.live[LOSS])


def measure(model, batch, autocast=None, *, optimizer='adamw', accumulate: bool = False) -> Memory:
    """Return the `Memory` of a forward and backward pass, by running it. The model and the random
    state are left unchanged.

    batch: (idx, targets), each (B, T) int64. autocast: a context for the forward pass; None =
    float32. optimizer: its name in settings. accumulate: gradients already exist at the start.
    """
    was_training, old_gradients = model.training, [p.grad for p in model.parameters()]
    devices = [model.device] if model.device.type == 'cuda' else []
    for table in filter(None, (model.rotary or {}).values()):  # cached: not activations
        table(0, batch[0].size(1), model.device, model.lm_head.weight.dtype)
    # Under a dispatch mode FlexAttention runs uncompiled and would keep all scores. SDPA keeps the
    # same tensors as compiled FlexAttention: q, k, v, the output and one float32 per query.
    flex = mock.patch.object(attention.kernels.flex, 'flex_local_attention', _sdpa)
    with torch.random.fork_rng(devices, device_type='cuda'):
        try:
            model.train()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if accumulate else None
            with flex, StorageTracker(model) as tracker:
                with autocast or contextlib.nullcontext():
                    loss = model(*batch)[1]
                activations = tracker.live[ACTIVATIONS]
                loss.backward()
        finally:
            model.train(was_training)
            for p, grad in zip(model.parameters(), old_gradients):
                p.grad = grad
    parameters, gradients, state = state_bytes(model, optimizer)
    before = gradients if accumulate else 0
    peak = max(gradients, tracker.peak + before)
    return Memory(parameters, gradients, state, activations, tracker.loss_peak,
                  parameters + state + peak)


def _sdpa(q, k, v, window):
    gqa = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def predict(s, config: GPTConfig, device: torch.device, dtype: torch.dtype, *,
            accumulate: bool) -> dict[str, Memory]:
    """Return the `Memory` of a step with settings `s` for every policy, the fastest first, and for
    that of the settings. accumulate: as in `measure`."""
    with FakeTensorMode(), torch.device(device):
        model = GPT(config)
        model.loss_fn = linear_cross_entropy if s.chunked_loss else None
        if wanted(s.dtype, s.compile, device):
            speed_up(model)
        if s.attention_backend in ('math', 'sdpa'):  # the others need as much as 'auto'
            model.attention_backend = s.attention_backend
        x = torch.zeros(s.batch_size, config.block_size, dtype=torch.int64)
        policies = dict.fromkeys((*NAMES, s.recompute))
        if device.type != 'cuda' or s.compile:
            policies.pop('offload')
        for policy in policies:
            set_recompute(model, policy)
            policies[policy] = measure(model, (x, torch.zeros_like(x)), autocast(device, dtype),
                                       optimizer=s.optimizer, accumulate=accumulate)
    return policies


def print_memory_report(run) -> None:
    """Print the report of train.py's --memory_report for a `Run` that has its first batch."""
    s, policy = run.s, run.model.recompute.name if run.model.recompute else 'none'
    accumulate = s.gradient_accumulation_steps > run.ranks.world_size
    predictions = predict(s, run.model.config, run.device, run.dtype, accumulate=accumulate)
    print_table(output(), policy_table(predictions), 'Memory of a step, predicted')
    measured = vars(measure(run.model, run.batch, run.autocast, optimizer=s.optimizer,
                            accumulate=accumulate))
    rows = ((name.replace('_', ' '), nice_bytes(n), nice_bytes(measured[name]))
            for name, n in vars(predictions[policy]).items())
    title = f'\n{s.batch_size} x {run.model.config.block_size:,} tokens, recompute={policy!r}'
    print_table(output(), table_of(('', 'predicted', 'measured'), rows), title)


def policy_table(predictions):
    rows = ([policy, *(nice_bytes(n) for n in (m.activations, m.loss_peak, m.peak))]
            for policy, m in predictions.items())
    return table_of(('recompute', 'activations', 'logits and loss', 'peak'), rows,
                    left=('recompute',))


def memory_line(model, optimizer: str, device: torch.device) -> str:
    """Return two lines to print after the first step: bytes that stay, and the peak."""
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
