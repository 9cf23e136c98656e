"""Decode steps (tokens to logits), captured as CUDA graphs and replayed.

    decode = captured_decode(model, cache)  # None if capture is not faster
    logits = decode(tokens)                 # (n, 1) ids of the first n rows -> (n, V), asynchronous
    drawn = decode.sample_rows(logits, rows, at)  # captured, too, if temperatures are all they ask

A graph has fixed shapes, so there is one for each of 1, 2, 4, 8, ... rows. On other devices
`CapturedDecode` calls the step directly, for tests.
"""
import gc

import torch

from attention.backends import triton_usable
from engine.fused import fuse
from engine.sampler import Drawn, SampleRow, draw_plain, sample_rows
from engine.static import StaticCache
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
    captures = suits_capture(model) and not in_torch
    return CapturedDecode(model, cache, compiled) if captures else None


class CapturedDecode:
    """Decode steps over the first rows of `cache`, contiguous or paged.

    model: in eval mode; its weights may only change in place. compiled: also `torch.compile` the
    step, which fuses the operations between matmuls but takes minutes per size.
    """

    def __init__(self, model, cache, compiled: bool = False):
        self.model, self.cache, self.compiled = model, cache, compiled
        fuse(model)
        self._steps = {}   # number of rows -> _Step
        self._pool = None  # memory that all graphs share: one runs at a time
        self._last = None, None  # logits of the last call, and its step

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor, lens: list[int] | None = None) -> torch.Tensor:
        """Append tokens (n, 1) to rows 0 .. n - 1, or only to those with lens[b] = 1; the logits of
        the remaining rows are undefined. Returns (n, V) logits, overwritten by the next call.
        Raises UserError if a row is full."""
        n = len(tokens)
        rows = [row for row in range(n) if lens is None or lens[row]]
        lengths = self.cache.lengths.tolist()
        step = self._step_for(n)
        step.static.set([lengths[row] if lens is None or lens[row] else None for row in range(n)])
        step.tokens[:n].copy_(tokens, non_blocking=True)
        logits = step.run()
        step.static.advance(rows)
        self._last = logits[:n], step
        return self._last[0]

    @torch.inference_mode()
    def sample_rows(self, logits: torch.Tensor, rows: list[SampleRow], at: list[int]) -> Drawn:
        """Like `engine.sampler.sample_rows`, with the places of the rows in `logits`, in order. The
        tokens are overwritten by the next calls."""
        last, step = self._last
        if logits is not last or not all(row.plain for row in rows):
            return sample_rows(logits, rows, at)
        tokens = step.sample(rows, at)
        tokens = tokens[:len(at)] if at[-1] < len(at) else tokens[on_device(at, tokens.device)]
        return Drawn(tokens, [None] * len(rows))

    def prepare(self, *sizes: int) -> None:
        """Capture the graphs for these numbers of rows now; by default, for all of them."""
        with torch.inference_mode():
            for n in sizes or range(1, self.cache.batch_size + 1):
                self._step_for(n)

    def _step_for(self, n):
        size = min(1 << (n - 1).bit_length(), self.cache.batch_size)
        if size not in self._steps:
            step = _Step(self.model, self.cache, size, self.compiled)
            self._pool = step.prepare(self._pool)
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
        self.call = self._logits
        if compiled:
            self.call = torch.compile(self._logits, fullgraph=True, dynamic=False)
        self._forward = _Graph(lambda: self.call(self.tokens))
        self._greedy = _Graph(lambda: draw_plain(self.logits))
        self._draw = _Graph(lambda: draw_plain(self.logits, *self.numbers))

    def _logits(self, tokens):
        return self.model(tokens, cache=self.static)[0][:, -1]

    def prepare(self, pool):
        """Warm up with all rows inactive, which writes nothing, then capture. Returns the
        graphs' memory pool."""
        self.static.set([])
        if self.tokens.device.type != 'cuda':
            self.logits = self._forward.run()
            return None
        pool = self._forward.capture(pool)
        # keep the RoPE tables whose addresses are in the graph: growing a table reallocates it
        self.pinned = [dict(table._tables) for table in (self.model.rotary or {}).values() if table]
        self.logits = self._forward.output
        return self._draw.capture(self._greedy.capture(pool))

    def run(self):
        self.logits = self._forward.run()
        return self.logits

    def sample(self, rows, at):
        """Sample from the logits of the last run: (size,) tokens, those of `rows` in places `at`.
        """
        if not any(row.params.temperature for row in rows):
            return self._greedy.run()
        numbers = [[0.0] * len(self.tokens) for _ in range(2)]
        for b, row in zip(at, rows):
            if row.params.temperature:
                numbers[0][b], numbers[1][b] = row.params.temperature, row.uniform()
        numbers = on_device(numbers, self.numbers.device, torch.float64)
        self.numbers.copy_(numbers[:, :, None])
        return self._draw.run()


class _Graph:
    """A function without arguments, whose tensors keep their addresses."""

    def __init__(self, function):
        self.function, self.graph, self.output = function, None, None

    def capture(self, pool):
        """Capture it as a CUDA graph, in this memory pool (None: a new one), which is returned."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.function()
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()  # an old graph must not be destroyed while another is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.output = self.function()
        self.graph = graph
        return graph.pool()

    def run(self):
        """Replay it, or call it if it was not captured. Returns its output."""
        if self.graph is None:
            return self.function()
        self.graph.replay()
        return self.output
