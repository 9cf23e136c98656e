"""AdamW in host memory: moments, a copy of the parameters, and the step itself (Ren et al. 2021,
"ZeRO-Offload"). The device keeps parameters and gradients.

While one bucket is stepped on the host, the next is copied in and the previous one back. Unlike
torchao's CPUOffloadOptimizer it supports clipping, its steps are exactly those of AdamW on a CPU,
and its `state_dict` is AdamW's, so a run can be resumed with or without it.
"""
import torch

BUCKET = 64 * 2 ** 20  # bytes of gradients that are stepped together


class HostAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over copies of the parameters in host memory.

    Call `take` after anything else has changed the parameters. The groups' settings are read at
    each step. With a CUDA device copies are asynchronous, through pinned memory (which torch
    allocates in powers of two).
    """

    def __init__(self, groups: list[dict], lr: float, betas=(0.9, 0.95), bucket: int = BUCKET):
        super().__init__(groups, dict(lr=lr, betas=betas))
        params = [p for group in self.param_groups for p in group['params']]
        device = params[0].device
        pinned = device.type == 'cuda'
        self.inward = torch.cuda.Stream(device) if pinned else None
        self.outward = torch.cuda.Stream(device) if pinned else None
        self.copies = {p: torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in params}
        self.gradients = {p: torch.empty(p.shape, dtype=p.dtype, pin_memory=pinned) for p in params}
        on_host = [{**group, 'params': [self.copies[p] for p in group['params']]}
                   for group in self.param_groups]
        self.inner = torch.optim.AdamW(on_host, lr=lr, betas=betas, fused=True)
        self.buckets = _buckets(params, bucket)
        self._share()
        self.take()

    def take(self) -> None:
        """Copy the parameters to the host."""
        for p, copy in self.copies.items():
            copy.copy_(p.detach())

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters that have gradients. closure: not supported."""
        for own, inner in zip(self.param_groups, self.inner.param_groups):
            inner.update({**own, 'params': inner['params']})
        if self.inward is not None:  # the current stream is still clipping the gradients
            self.inward.wait_stream(torch.cuda.current_stream(self.inward.device))
        arrivals = [self._bring(bucket) for bucket in self.buckets]
        for bucket, arrived in zip(self.buckets, arrivals):
            if arrived is not None:
                arrived.synchronize()
            self._step(bucket)
        if self.outward is not None:  # the next forward pass must wait for the copies
            torch.cuda.current_stream(self.outward.device).wait_stream(self.outward)

    def _bring(self, bucket):
        """Start copying the bucket's gradients to the host; return an event to await, or None."""
        with torch.cuda.stream(self.inward):
            for p in bucket:
                if p.grad is not None:
                    self.gradients[p].copy_(p.grad, non_blocking=True)
        return self.inward and self.inward.record_event()

    def _step(self, bucket):
        """Step the bucket on the host, and start copying it back."""
        stepped = [p for p in bucket if p.grad is not None]
        for p in stepped:
            self.copies[p].grad = self.gradients[p]
        self.inner.step()  # parameters of other buckets have no gradient, so they are skipped
        with torch.cuda.stream(self.outward):
            for p in stepped:
                self.copies[p].grad = None
                p.copy_(self.copies[p], non_blocking=True)

    def _share(self):
        """Let each parameter share its state dict with its copy."""
        self.state.clear()
        for p, copy in self.copies.items():
            self.state[p] = self.inner.state[copy] = self.inner.state.get(copy, {})

    def state_dict(self):
        """Return AdamW's `state_dict`, in host memory."""
        state = self.inner.state_dict()
        return {**state, 'state': {i: x for i, x in state['state'].items() if x}}

    def load_state_dict(self, state_dict) -> None:
        """Resume from an AdamW's `state_dict`. Copies the parameters to the host."""
        groups = [{**group, 'fused': True, 'foreach': None}
                  for group in state_dict['param_groups']]
        self.inner.load_state_dict({**state_dict, 'param_groups': groups})
        for own, inner in zip(self.param_groups, self.inner.param_groups):
            own.update({name: inner[name] for name in own if name != 'params'})
        self._share()
        self.take()

    def host_nbytes(self) -> int:
        """Return bytes of host memory: moments, copies of parameters, gradients."""
        moments = [x for state in self.inner.state.values() for x in state.values()]
        return sum(x.nbytes for x in (*moments, *self.copies.values(), *self.gradients.values()))


def _buckets(params, nbytes: int) -> list[list]:
    """Split the parameters, in order, into lists of at most `nbytes` bytes or one parameter."""
    buckets, room = [], 0
    for p in params:
        if p.nbytes > room:
            buckets.append([])
            room = nbytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets
