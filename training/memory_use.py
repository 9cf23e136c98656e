"""What a training step takes of the device's memory: measured on a real step, or predicted without
memory or arithmetic.

    measure(model, (x, y), 'mlp')                  # one forward and backward of this batch
    predict(config, batch_size=8, policy='mlp')    # the same, with tensors without numbers

Both run the model as it is (eager) and follow its storages (`training.live`). Compiled code fuses
operations and keeps less.
"""
import contextlib
import functools
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import attention.kernels.flex
import training.recompute
from config.errors import UserError
from config.sizes import available_memory, nice_bytes
from kv.parts import tensor_nbytes
from model import GPT
from training.device import autocast as autocast_for
from training.device import memory_use
from training.host_optimizer import HostAdamW
from training.live import BACKWARD, LOSS, LiveBytes
from training.loss import linear_cross_entropy
from training.offload import offloaded
from training.optim import state_nbytes
from training.recompute import policy_of, set_recompute


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step.

    activations: kept from the forward pass for the backward, without logits and loss. by_block: of
    these, each block's; by_kind: by what made them ('norms', 'attention', 'mlp', 'residual stream',
    'cast weights': autocast's copies). loss_peak: what lm_head and loss need beside them, forward
    and until the backward pass has left them. peak: the most at any time, parameters, optimizer
    state and gradients included. offloaded: activations on the host. flops: of the step (a
    micro-batch); what is computed again counts again. device: whose kernels these are.
    """
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    loss_peak: int
    peak: int
    by_block: list = field(default_factory=list)
    by_kind: dict = field(default_factory=dict)
    offloaded: int = 0
    flops: int = 0
    policy: str = 'none'
    device: str = 'cpu'

    def as_dict(self) -> dict:
        return asdict(self)


def measure(model, batch, policy: str | None = None, autocast=None, *,
            chunked_loss: bool | None = None, optimizer='adamw',
            accumulate: bool = False) -> Memory:
    """Memory of a forward and backward pass over `batch`, which is really done; nothing of it
    remains.

    Random numbers, gradients, training mode and policy are restored.

    Args:
        batch: (idx, targets), each (B, T) int64 on the model's device.
        policy: of `training.recompute`; None = the model's. chunked_loss: None = the model's.
        autocast: a context for the forward pass; None = float32.
        optimizer: whose state counts, or its name (of `training.optim`) where there is none yet.
        accumulate: gradients are there already when the step begins, as with gradient accumulation.
    """
    was = model.training, policy_of(model), model.loss_fn, [p.grad for p in model.parameters()]
    devices = [model.device] if model.device.type == 'cuda' else []
    with torch.random.fork_rng(devices, device_type='cuda'):
        try:
            model.train()
            set_recompute(model, was[1] if policy is None else policy)
            if chunked_loss is not None:
                model.loss_fn = linear_cross_entropy if chunked_loss else None
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if accumulate else None
            autocast = autocast or contextlib.nullcontext()
            return _follow(model, batch, autocast, optimizer, accumulate)
        finally:
            model.train(was[0])
            set_recompute(model, was[1])
            model.loss_fn = was[2]
            for p, grad in zip(model.parameters(), was[3]):
                p.grad = grad


def _follow(model, batch, autocast, optimizer, accumulate):
    for table in (model.rotary or {}).values():  # they stay, and are no activations
        table(0, batch[0].size(1), model.device, model.lm_head.weight.dtype)
    with _plain_flex(), LiveBytes(model) as live:
        with autocast:
            loss = model(*batch)[1]
        kept, offloaded = live.by_label(), live.elsewhere
        live.begin_backward()
        loss.backward()
        del loss
    by_block, by_kind = Counter(), Counter()
    for (block, kind), n in kept.items():
        if kind not in (LOSS, BACKWARD):  # the chunked loss makes lm_head's gradient with the loss
            by_block[block] += n
            by_kind[kind] += n
    parameters, gradients, state = state_bytes(model, optimizer)
    return Memory(parameters, gradients, state, by_kind.total(), live.loss_peak,
                  parameters + state + max(gradients, live.peak + gradients * accumulate),
                  [by_block[i] for i in range(len(model.transformer.h))], dict(by_kind), offloaded,
                  live.flops, policy_of(model), str(model.device))


def state_bytes(model, optimizer='adamw') -> tuple[int, int, int]:
    """Bytes of parameters, of their gradients, and of the optimizer's state; of one that is only
    named, what it will have. What an optimizer keeps on the host does not count."""
    params = list(model.parameters())
    parameters = sum(tensor_nbytes(p) for p in params)
    gradients = sum(tensor_nbytes(p) for p in params if p.requires_grad)
    if isinstance(optimizer, HostAdamW):
        return parameters, gradients, 0
    if not isinstance(optimizer, str) and optimizer.state:
        states = optimizer.state.values()
        held = (x for state in states for x in state.values() if torch.is_tensor(x))
        return parameters, gradients, sum(map(tensor_nbytes, held))
    name = optimizer if isinstance(optimizer, str) else 'adamw'
    return parameters, gradients, state_nbytes(model, name)


class Predictor:
    """A model without numbers, to ask for the memory of steps with different policies and batches.

    device: 'cuda' needs a CUDA device here, for autograd asks for it even then; else the CPU's
    kernels stand for its, and `device` says so.
    """

    def __init__(self, config, device='cpu'):
        self.device = torch.device(device)
        if self.device.type == 'cuda' and not torch.cuda.is_available():
            self.device = torch.device('cpu')
        self.fake = FakeTensorMode()
        with torch.random.fork_rng([], device_type='cuda'), self.fake, torch.device(self.device):
            self.model = GPT(config)

    def predict(self, policy: str = 'none', batch_size: int = 1, block_size: int = 0,
                chunked_loss: bool = True, dtype: torch.dtype = torch.float32,
                accumulate: bool = False, optimizer='adamw') -> Memory:
        """Memory of a step over (batch_size, block_size) tokens, all of them targets; 0 = the
        config's block_size."""
        T = block_size or self.model.config.block_size
        with torch.random.fork_rng([], device_type='cuda'), self.fake, _simple_offload(self.device):
            x = torch.zeros(batch_size, T, dtype=torch.int64, device=self.device)
            batch, autocast = (x, torch.zeros_like(x)), autocast_for(self.device, dtype)
            return measure(self.model, batch, policy, autocast, chunked_loss=chunked_loss,
                           accumulate=accumulate, optimizer=optimizer)


def predict(config, batch_size: int, block_size: int = 0, policy: str = 'none',
            chunked_loss: bool = True, dtype: torch.dtype = torch.float32, device='cpu',
            accumulate: bool = False) -> Memory:
    """What `measure` would say of a new model of this GPTConfig, without its memory or arithmetic;
    see `Predictor`.

    Raises:
        UserError (a ValueError): from the config, its plan or the policy.
    """
    predictor = Predictor(config, device)
    return predictor.predict(policy, batch_size, block_size, chunked_loss, dtype, accumulate)


@contextlib.contextmanager
def _replaced(module, name, value):
    was = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, was)


def _plain_flex():
    """FlexAttention is not compiled where a dispatch mode is active, and would hold all scores.
    SDPA keeps what it keeps: q, k, v, the output and a float32 number for each query."""
    def stand_in(q, k, v, window):
        gqa = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return _replaced(attention.kernels.flex, 'flex_local_attention', stand_in)


def _simple_offload(device):
    """Offloading without streams and pinned memory, of which FakeTensorMode knows nothing."""
    if device.type != 'cuda':
        return contextlib.nullcontext()
    return _replaced(training.recompute, 'offloaded', functools.partial(offloaded, streams=False))


def memory_line(model, optimizer, device: torch.device) -> str:
    """Two lines after a first step: what the live tensors take, and the device's own measure of the
    most so far."""
    parameters, gradients, state = state_bytes(model, optimizer)
    on_host = ''
    if isinstance(optimizer, HostAdamW):
        on_host = f' (and {nice_bytes(optimizer.host_nbytes())} on the host)'
    live = (f'memory: parameters {nice_bytes(parameters)}, gradients {nice_bytes(gradients)}, '
            f'optimizer {nice_bytes(state)}{on_host}')
    peak = memory_use(device).peak
    if device.type == 'cuda':
        rest = max(0, peak - parameters - gradients - state)
        live += (f',\n        activations and all else {nice_bytes(rest)}, '
                 f'peak {nice_bytes(peak)}')
    elif peak is not None:
        live += f',\n        peak {nice_bytes(peak)} (of the whole process, with Python and torch)'
    return live


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now (of the host, where it has no memory of its own)."""
    if device.type == 'cuda':
        # torch's own, unused
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    free = available_memory()
    if not free:
        raise UserError('this system does not say how much memory is free: give memory_budget, as '
                        "'8GB'")
    return free
