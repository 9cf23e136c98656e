"""The memory bandwidth of this machine, which decoding speed is compared with."""
import statistics
from functools import partial

import torch

from lab.benchmarks import clock

BUFFER_BYTES = 512 * 2 ** 20  # far larger than any processor cache
PASSES = 3                    # per measurement; their median is used


class Bandwidth:
    """Callable that measures the bandwidth and returns bytes per second.

    On a CPU, the fastest of several kernels that only read a buffer of random float32: matrix times
    vector (short rows and long), sum, dot product of the two halves. On CUDA, a device-to-device
    copy, as is usual there; its bytes are counted once as read and once as written.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffer = torch.rand(BUFFER_BYTES // 4, device=device)
        if device.type == 'cuda':
            target = torch.empty_like(self.buffer)
            self.kernels = {'device-to-device copy': lambda: target.copy_(self.buffer)}
        else:
            halves = self.buffer.view(2, -1)
            self.kernels = {'sum': self.buffer.sum, 'dot product': lambda: torch.dot(*halves)}
            for width in (1024, 4096):
                product = partial(torch.mv, self.buffer.view(-1, width), torch.rand(width))
                self.kernels[f'matrix-vector product, rows of {width}'] = product
        self.found = {name: statistics.median(self._pass(kernel) for _ in range(1 + 2 * PASSES))
                      for name, kernel in self.kernels.items()}
        self.kernel = max(self.found, key=self.found.get)

    def __call__(self) -> float:
        return statistics.median(self._pass(self.kernels[self.kernel]) for _ in range(PASSES))

    def describe(self, rates) -> dict:
        """Return facts for the JSON document. rates: the run's measurements in bytes per second."""
        return {'kernel': self.kernel, 'buffer_bytes': self.buffer.nbytes,
                'bytes_per_second': clock.summary(rates),
                'kernels_bytes_per_second': self.found}

    def _pass(self, kernel) -> float:
        moved = self.buffer.nbytes * (2 if self.device.type == 'cuda' else 1)
        with clock.Stopwatch(self.device) as watch:
            kernel()
        return moved / watch.seconds
