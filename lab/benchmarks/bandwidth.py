"""The memory bandwidth of this machine, which decoding is compared with."""
import statistics
from functools import partial

import torch

from lab.benchmarks import clock

BUFFER_BYTES = 512 * 2 ** 20  # far more than any cache between memory and processor holds
PASSES = 3                    # per measurement; their median counts


class Bandwidth:
    """Call it for bytes per second, measured now.

    On a CPU, the fastest of several kernels that only read a buffer of random float32: matrix times
    vector (short rows and long), sum, dot product of the two halves. On CUDA, a device-to-device
    copy, as is usual there; its bytes count as read and as written.
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
        """For the JSON document; rates: of the run, bytes per second."""
        return {'kernel': self.kernel, 'buffer_bytes': self.buffer.nbytes,
                'bytes_per_second': clock.summary(rates),
                'kernels_bytes_per_second': self.found}

    def _pass(self, kernel) -> float:
        moved = self.buffer.nbytes * (2 if self.device.type == 'cuda' else 1)
        with clock.Stopwatch(self.device) as watch:
            kernel()
        return moved / watch.seconds
