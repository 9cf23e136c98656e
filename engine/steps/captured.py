"""Decode steps (tokens to logits), captured as CUDA graphs and replayed.

    decode = captured_decode(model, cache)  # None if capture is not faster
    logits = decode(tokens)                 # (n, 1) ids of the first n rows -> (n, V), asynchronous
    drawn = decode.sample_rows(logits, requests, at)  # captured, too, if all are `plain`

A graph has fixed shapes, so there is one for each of 1, 2, 4, 8, ... rows. On other devices
`CapturedDecode` calls the step directly, for tests. What model.py computes is what counts: a step
is compared with it before it is used.
"""
import functools
import gc

import torch

from attention.backends import triton_usable
from attention.kernels.flex import with_own_code
from common.gpt_config import unknown_field
from engine.requests.request import Request
from engine.requests.sampler import Drawn, draw_plain, sample_rows
from engine.steps.agreement import difference, note_once
from engine.steps.fused import fuse, unfuse
from engine.steps.static import StaticCache
from kv.cache import on_device

# Shortest generation worth capturing: a capture takes as long as a few dozen plain steps.
MIN_CAPTURED = 32
# Warm-up calls, since nothing may be compiled or first allocated during the capture.
WARM_UP = 3


def suits_capture(model) -> bool:
    """Whether captured decode is faster: on CUDA, with the Triton kernels."""
    return (model.device.type == 'cuda' and triton_usable(model.device)
            and model.dtype != torch.float64)


def captured_decode(model, cache, compiled: bool = False) -> 'CapturedDecode | None':
    """A captured decode step for this cache, or None if it is not faster."""
    # plain torch would attend to all positions that are allocated
    in_torch = model.config.attn_sink or cache.kv_dtype == 'int4'
    if in_torch or not suits_capture(model):
        return None
    if unknown := unknown_field(model.config, 'fast'):
        note_once(f'the captured decode steps do not support {unknown}: plain steps decode')
        return None
    fused = functools.partial(CapturedDecode, model)
    if not (wrong := difference(model, cache, functools.partial(fused, capture=False))):
        return fused(cache, compiled)
    note_once(f'the kernels of fused decode steps {wrong}: the blocks of model.py are captured')
    unfuse(model)
    plain = functools.partial(fused, fused=False)
    if not (wrong := difference(model, cache, functools.partial(plain, capture=False))):
        return plain(cache, compiled)
    note_once(f'the captured decode steps {wrong}: plain steps decode')
    return None


class CapturedDecode:
    """Decode steps over the first rows of `cache`, contiguous or paged.

    Args:
        model: in eval mode; its weights may only change in place.
        compiled: also `torch.compile` the step, which fuses the operations between matmuls but
            takes minutes per size.
        fused: let the model's blocks use the kernels of `engine.steps.fused`.
        capture: False = call the steps directly, on CUDA too.
    """

    def __init__(self, model, cache, compiled: bool = False, fused: bool = True,
                 capture: bool = True):
        self.model, self.cache, self.compiled = model, cache, compiled
        if fused:
            fuse(model)
        self._steps = {}   # number of rows -> _Step
        self._pool = None  # memory that all graphs share: one runs at a time
        on_cuda = capture and model.device.type == 'cuda'
        self._stream = torch.cuda.Stream(model.device) if on_cuda else None
        self._last = None, None  # logits of the last call, and its step

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, lens: list[int] | None = None) -> torch.Tensor:
        """Append tokens (n, 1) to rows 0 .. n - 1, or only to those with lens[b] = 1; the logits of
        the remaining rows are undefined. Returns (n, V) logits, overwritten by the next call.
        Raises UserError if a row is full."""
        n, lengths = len(tokens), self.cache.lengths.tolist()
        lens = [1] * n if lens is None else lens
        step = self._step_for(n)
        step.static.set([length if appends else None for length, appends in zip(lengths, lens)])
        step.tokens[:n].copy_(tokens, non_blocking=True)
        logits = step.run()
        step.static.advance([row for row in range(n) if lens[row]])
        self._last = logits[:n], step
        return self._last[0]

    @torch.inference_mode()
    def sample_rows(self, logits: torch.Tensor, requests: list[Request],
                    at: list[int]) -> Drawn:
        """Like `engine.requests.sampler.sample_rows`, with the rows of the requests in `logits`, in
        order. The tokens are overwritten by the next calls."""
        last, step = self._last
        if logits is not last or not all(request.plain for request in requests):
            return sample_rows(logits, requests, at)
        tokens = step.sample(requests, at)
        tokens = tokens[:len(at)] if at[-1] < len(at) else tokens[on_device(at, tokens.device)]
        return Drawn(tokens, [None] * len(requests))

    def prepare(self, *sizes: int) -> None:
        """Capture the graphs for these numbers of rows now; by default, for all of them."""
        with torch.inference_mode():
            for n in sizes or range(1, self.cache.batch_size + 1):
                self._step_for(n)

    def _step_for(self, n):
        size = min(1 << (n - 1).bit_length(), self.cache.batch_size)
        if size not in self._steps:
            step = _Step(self.model, self.cache, size, self.compiled)
            self._pool = step.prepare(self._pool, self._stream)
            self._steps[size] = step
        return self._steps[size]


class _Step:
    """The step for a fixed number of rows, with its input and output tensors."""

    def __init__(self, model, cache, size, compiled):
        self.model, self.static = model, StaticCache(cache, size)
        device = model.device
        with torch.inference_mode(False):
            self.tokens = torch.zeros(size, 1, dtype=torch.int64, device=device)
            # the temperature and the random number of each row
            self.numbers = torch.zeros(2, size, 1, dtype=torch.float64, device=device)
        call = _logits
        if compiled:
            call = torch.compile(with_own_code(_logits), fullgraph=True, dynamic=False)
        self._forward = _Graph(lambda: call(self.model, self.static, self.tokens))
        self._greedy = _Graph(lambda: _most_likely(self.logits))
        self._draw = _Graph(lambda: draw_plain(self.logits, *self.numbers))

    def prepare(self, pool, stream):
        """Warm up with all rows inactive, which writes nothing, then capture on this stream (None:
        do not capture). Returns the graphs' memory pool."""
        self.static.set([])
        if stream is None:
            self.logits = self._forward.run()
            self._greedy.run()
            return None
        gc.collect()  # an old graph must not be destroyed while another is captured
        pool = self._forward.capture(pool, stream)
        # keep the RoPE tables whose addresses are in the graph: growing a table reallocates it
        self.pinned = [dict(table._tables) for table in (self.model.rotary or {}).values() if table]
        self.logits = self._forward.output
        return self._draw.capture(self._greedy.capture(pool, stream), stream)

    def run(self):
        self.logits = self._forward.run()
        return self.logits

    def sample(self, requests, at):
        """Sample from the last run's logits: (size,) tokens, those of `requests` in rows `at`."""
        if not any(request.params.temperature for request in requests):
            return self._greedy.run()
        numbers = [[0.0] * len(self.tokens) for _ in range(2)]
        for b, request in zip(at, requests):
            if request.params.temperature:
                numbers[0][b], numbers[1][b] = request.params.temperature, request.uniform()
        numbers = on_device(numbers, self.numbers.device, torch.float64)
        self.numbers.copy_(numbers[:, :, None])
        return self._draw.run()


def _logits(model, cache, tokens):
    """(n, 1) ids -> (n, V)"""
    return model(tokens, cache=cache)[0][:, -1]


def _most_likely(logits):
    """(n, V) -> (n,)"""
    wide = logits.dtype == torch.float64
    if wide or not triton_usable(logits.device) or not logits.is_contiguous():
        return draw_plain(logits)
    from engine.steps.greedy import most_likely
    return most_likely(logits)


class _Graph:
    """A function without arguments, whose tensors keep their addresses."""

    def __init__(self, function):
        self.function, self.graph, self.output = function, None, None

    def capture(self, pool, stream):
        """Capture it as a CUDA graph, in this memory pool (None: a new one), which is returned.
        stream: for warming up and capturing; each new one would get workspaces of its own."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self.output = self.function()
        self.graph = graph
        return graph.pool()

    def run(self):
        """Replay it, or call it if it was not captured. Returns its output."""
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.output
