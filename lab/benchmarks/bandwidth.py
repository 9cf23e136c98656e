"""Bytes read by a decoding step, and the memory bandwidth of this machine.

A step of B sequences must read the K/V of min(n, window) tokens in every layer (shared slots once
for each of their layers) and every parameter, except that embeddings that are not also the output
layer only read the rows looked up. Activations and rotary tables are small and not counted.
"""
import torch

from common.errors import UserError
from engine.weights.quantize import stored_tensors
from kv.plan import KVPlan
from lab.benchmarks import clock

BUFFER_BYTES = 512 * 2 ** 20  # far larger than any processor cache
PASSES = 5                    # per measurement


def kv_read_per_step(plan: KVPlan, kv_dtype: str, batch: int, held: int, steps: int) -> float:
    """Mean bytes of K/V read by `steps` steps that start with `held` cached tokens. A layer that
    shares a slot reads it again."""
    slots = [(slot, batch * slot.position_nbytes(kv_dtype) * len(slot.layers))
             for slot in plan.slots]
    return sum(slot.capacity(n) * nbytes for n in range(held + 1, held + 1 + steps)
               for slot, nbytes in slots) / steps


def weight_read_bytes(model, batch: int) -> int:
    """Bytes of weights read by one step. All rows have equal lengths and read one row of `wpe`."""
    total = sum(x.nbytes for x in stored_tensors(model))
    for name, rows in (('wte', batch), ('wpe', 1)):
        module = model.transformer[name] if name in model.transformer else None
        x = getattr(module, 'weight', None)
        if x is not None and all(x is not p for p in model.lm_head.parameters()):
            total -= x.nbytes - x.nbytes * min(rows, x.size(0)) // x.size(0)
    return total


def most_sequences(plan: KVPlan, budget: int, max_seq_len: int, kv_dtype: str) -> dict:
    """The largest batch whose cache for `max_seq_len` tokens takes at most `budget` bytes.
    UserError: if not even one sequence fits."""
    one = plan.nbytes(1, max_seq_len, kv_dtype)
    fit = budget // one
    if not fit:
        raise UserError(f'budget={budget:,} bytes: one sequence of {max_seq_len} tokens takes '
                        f'{one:,} bytes of KV; give at least that, or smaller contexts')
    return {'sequences': fit, 'kv_bytes': fit * one, 'kv_bytes_of_one_more': (fit + 1) * one}


class Bandwidth:
    """Callable that measures the bandwidth and returns bytes per second.

    On a CPU, the faster of two kernels that only read a buffer of random float32: sum, and dot
    product of the two halves. On CUDA, a device-to-device copy, as is usual there; its bytes are
    counted once as read and once as written.
    """

    def __init__(self, device: torch.device):
        self.device = device
        buffer = torch.rand(BUFFER_BYTES // 4, device=device)
        if device.type == 'cuda':
            target = torch.empty_like(buffer)
            self.kernels = {'device-to-device copy': lambda: target.copy_(buffer)}
        else:
            halves = buffer.view(2, -1)
            self.kernels = {'sum': buffer.sum, 'dot product': lambda: torch.dot(*halves)}
        self.kernel = max([*self.kernels] * 2, key=self.measure)  # the first calls are slower

    def __call__(self) -> float:
        return self.measure(self.kernel)

    def measure(self, kernel: str) -> float:
        read = self.kernels[kernel]
        seconds = clock.seconds(self.device, lambda: [read() for _ in range(PASSES)])
        moved = BUFFER_BYTES * (2 if self.device.type == 'cuda' else 1)
        return PASSES * moved / seconds
