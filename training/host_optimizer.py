"""AdamW in host memory: its averages, a copy of the parameters, and the step itself (Ren et al. 2021, "ZeRO-Offload").

The device keeps parameters and gradients. These are copied to the host once they are whole, clipped and known to be finite;
while one bucket of them is stepped there, the next is on its way in and the one before on its way back. torchao's
CPUOffloadOptimizer copies gradients while the backward pass makes them, before their norm is known, and so clips nothing; it
needs CUDA, and its state has a form of its own. This one makes the steps that AdamW makes on a CPU, to the bit, and its
`state_dict` is AdamW's: a run goes on with it or without.
"""
import contextlib

import torch

BUCKET = 64 * 2 ** 20  # bytes of gradients that are stepped together


class HostAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over copies of the parameters in host memory.

    The parameters must not be changed by anything else; where they were, call `take`. With a CUDA device copies are
    asynchronous, through pinned memory (which torch allocates in powers of two); elsewhere they are plain ones.

    Args:
        groups: parameter groups, as any optimizer takes; their settings are read from `param_groups` at each step.
        lr, betas: AdamW's.
        bucket: bytes of gradients that are stepped together.
    """

    def __init__(self, groups: list[dict], lr: float, betas=(0.9, 0.95), bucket: int = BUCKET):
        super().__init__(groups, dict(lr=lr, betas=betas))
        params = [p for group in self.param_groups for p in group['params']]
        device = params[0].device
        pinned = device.type == 'cuda'
        self.inward, self.outward = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if pinned else (None, None)
        self.copies = {p: torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in params}
        self.gradients = {p: torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in params}
        self.inner = torch.optim.AdamW([{**group, 'params': [self.copies[p] for p in group['params']]}
                                        for group in self.param_groups], lr=lr, betas=betas, fused=True)
        self.buckets = _buckets(params, bucket)
        self._share()
        self.take()

    def take(self) -> None:
        """Copy the parameters to the host anew."""
        for p, copy in self.copies.items():
            copy.copy_(p.detach())

    @torch.no_grad()
    def step(self, closure=None):
        """One step by the gradients that are there. closure: not supported."""
        for own, inner in zip(self.param_groups, self.inner.param_groups):
            inner.update(_settings(own))
        if self.inward is not None:
            self.inward.wait_stream(torch.cuda.current_stream(self.inward.device))  # the gradients are being clipped there
        arrivals = [self._bring(bucket) for bucket in self.buckets]
        for bucket, arrived in zip(self.buckets, arrivals):
            if arrived is not None:
                arrived.synchronize()
            self._step(bucket)
        if self.outward is not None:  # the next forward pass reads what is still on its way
            torch.cuda.current_stream(self.outward.device).wait_stream(self.outward)

    def _bring(self, bucket):
        """Begin to copy the bucket's gradients to the host. Returns an event of their arrival; None: they are there."""
        with _on(self.inward):
            for p in bucket:
                if p.grad is not None:
                    self.gradients[p].copy_(p.grad, non_blocking=self.inward is not None)
        return self.inward.record_event() if self.inward is not None else None

    def _step(self, bucket):
        """Step the bucket on the host, and begin to copy it back."""
        stepped = [p for p in bucket if p.grad is not None]
        for p in stepped:
            self.copies[p].grad = self.gradients[p]
        self.inner.step()  # what has no gradient is left alone: all other buckets
        with _on(self.outward):
            for p in stepped:
                self.copies[p].grad = None
                p.copy_(self.copies[p], non_blocking=self.outward is not None)

    def _share(self):
        """A parameter's state is that of its copy: one dict, whichever is asked."""
        self.state.clear()
        for p, copy in self.copies.items():
            self.state[p] = self.inner.state[copy] = self.inner.state.get(copy, {})

    def state_dict(self):
        """AdamW's, in host memory."""
        state = self.inner.state_dict()
        return {**state, 'state': {i: its for i, its in state['state'].items() if its}}  # none before a first step

    def load_state_dict(self, state_dict) -> None:
        """Go on from an AdamW's `state_dict`; the parameters are copied to the host anew."""
        self.inner.load_state_dict({**state_dict, 'param_groups': [{**group, 'fused': True, 'foreach': None}
                                                                   for group in state_dict['param_groups']]})
        for own, inner in zip(self.param_groups, self.inner.param_groups):
            own.update({name: inner[name] for name in _settings(own)})
        self._share()
        self.take()

    def host_nbytes(self) -> int:
        """Bytes of host memory: averages, copies of parameters, gradients."""
        held = [x for its in self.inner.state.values() for x in its.values() if torch.is_tensor(x)]
        return sum(x.nbytes for x in (*held, *self.copies.values(), *self.gradients.values()))


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != 'params'}


def _on(stream):
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def _buckets(params, nbytes: int) -> list[list]:
    """The parameters in their order, in lists of so many bytes or of one parameter."""
    buckets, room = [], 0
    for p in params:
        if p.nbytes > room:
            buckets.append([])
            room = nbytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets
