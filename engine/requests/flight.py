"""Sampled tokens on their way to the host.

    synchronous    host    schedule 1            read 1, schedule 2            read 2, ...
                   device             compute 1                     compute 2
    asynchronous   host    schedule 1, schedule 2, read 1, schedule 3, read 2, ...
                   device             compute 1  compute 2            compute 3

An asynchronous engine schedules the next step before it reads the tokens of the last one, which the
device passes on by itself (as SGLang's overlapped scheduler and vLLM's asynchronous scheduling do).
"""
import torch

from engine.requests.request import Request
from engine.requests.sampler import Drawn
from kv.cache import on_device


class Flight:
    """The tokens that one step sampled. On CUDA, a copy to the host begins at once.

    passes: for each forward pass, the requests that were sampled, and their tokens.
    penalised: whether sampling the next tokens needs the values of these on the host.
    """

    def __init__(self, passes: list[tuple[list[Request], Drawn]]):
        self.requests = [request for requests, _ in passes for request in requests]
        self.penalised = any(request.penalised for request in self.requests)
        self._logprobs = [logprob for _, drawn in passes for logprob in drawn.logprobs]
        tokens = [drawn.tokens for _, drawn in passes]
        self.tokens = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        self._host, self._arrived = self.tokens, None
        if self.tokens.device.type == 'cuda':
            self._host = torch.empty_like(self.tokens, device='cpu', pin_memory=True)
            self._host.copy_(self.tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> zip:
        """(request, token, its TokenLogprob or None); token -1: its logits were not finite."""
        if self._arrived:
            self._arrived.synchronize()
        return zip(self.requests, self._host.tolist(), self._logprobs)

    def next_ids(self) -> torch.Tensor:
        """(n, 1) ids of the next step, on the device, if it is one of the same requests."""
        # a row whose logits were not finite runs once more, for nothing
        return self.tokens.clamp(min=0)[:, None]

    def fill(self, ids: torch.Tensor, requests: list) -> None:
        """Set ids[b, 0] to the token of requests[b], if that is in flight; ids: on the device."""
        place = {request: k for k, request in enumerate(self.requests)}
        places = [(b, place[request]) for b, request in enumerate(requests)
                  if request and request.in_flight]
        if places:
            rows, places = on_device(places, ids.device).T
            ids[rows, 0] = self.next_ids()[places, 0]
