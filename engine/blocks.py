"""Blocks of tokens that a prefix store keeps, and their K and V outside of a cache: a page of every
global slot, or a stretch of every ring, each as one buffer.

A buffer has the bytes as they are stored (int8 stays int8, with its scales), one tensor after
another. On CUDA it is gathered on the device first, and goes to pinned memory of the host on a
stream of its own, while the next step computes.
"""
import hashlib
from dataclasses import dataclass

import torch

from config.errors import UserError
from engine.paged import PagedKVCache
from kv.slots import RingStore

# bytes that Python takes for a block beside its buffers and tokens (measured:
# tests/engine/test_prefix_store.py)
OVERHEAD = 600


def taken(buffer: torch.Tensor | None) -> int:
    """Bytes of memory behind a buffer, which may be more than it has: see `HostCopies`."""
    return 0 if buffer is None else buffer.untyped_storage().nbytes()


def chained_hash(before: bytes, tokens: bytes) -> bytes:
    """The key of a block after the block with the key `before`."""
    return hashlib.blake2b(before + tokens, digest_size=16).digest()


class Block:
    """`size` tokens after those of `parent`, and what remembers them.

    page: where its global K, V are in the pools, -1 = not there. copy: the same on the host, or
    None. local: the last n_local positions of its local K, V, or None. anchor: a row can go on
    behind it. users: requests that run whose newest block it is (of the root: that have none).
    used: when it was last of use. depth: blocks from the root on, itself included. saved: the
    n_local with which it was written to disk or read from there, -1 = neither.
    """
    __slots__ = ('key', 'tokens', 'parent', 'children', 'depth', 'page', 'copy', 'local', 'n_local',
                 'anchor', 'users', 'used', 'saved')

    def __init__(self, key: bytes, tokens: bytes, parent: 'Block | None'):
        self.key, self.tokens, self.parent, self.children = key, tokens, parent, {}
        self.depth = parent.depth + 1 if parent else 0
        self.page, self.copy = -1, None
        self.local, self.n_local = None, 0
        self.anchor, self.saved = False, -1
        self.users, self.used = 0, 0

    @property
    def nbytes(self) -> int:
        """What it takes of the host's memory."""
        return OVERHEAD + len(self.tokens) + taken(self.copy) + taken(self.local)

    def path(self) -> 'list[Block]':
        """From the first block on, itself included; the root is none."""
        found, block = [], self
        while block.parent:
            found.append(block)
            block = block.parent
        return found[::-1]


@dataclass
class Hit:
    """What a request need not compute. known: how many blocks of it are there, whether or not a row
    can go on behind them."""
    blocks: list[Block]
    known: int

    @property
    def n_resident(self) -> int:
        """Pages that are in the pool already."""
        return sum(block.page >= 0 for block in self.blocks)


@dataclass
class PrefixStats:
    """Counts since the store was made. looked_up, found: tokens of requests, and those of them that
    were taken over."""
    requests: int = 0
    looked_up: int = 0
    found: int = 0
    copied_out: int = 0
    copied_in: int = 0
    evicted: int = 0

    def count(self, looked_up: int, found: int) -> None:
        """One more request."""
        self.requests += 1
        self.looked_up += looked_up
        self.found += found

    @property
    def hit_rate(self) -> float:
        """Share of tokens that need not be computed."""
        return self.found / max(1, self.looked_up)


class HostCopies:
    """Takes buffers from a device to the host and back, without waiting; where the device is the
    host, they are what they are.

    Pinned memory comes in powers of two (torch's allocator rounds up), so that is what is asked
    for, and counts (`taken`).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    def out(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer of the host that will hold what this one of the device, (n,) uint8, holds when
        the work before is done."""
        if self.stream is None:
            return buffer
        n = buffer.numel()
        host = torch.empty(1 << (n - 1).bit_length(), dtype=torch.uint8, pin_memory=True)[:n]
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(buffer, non_blocking=True)
        buffer.record_stream(self.stream)
        return host

    def back(self, host: torch.Tensor) -> torch.Tensor:
        """A buffer of the device that holds what `out` gave, for work that is queued from now
        on."""
        if self.stream is None:
            return host
        with torch.cuda.stream(self.stream):  # behind the copies to the host that may be under way
            buffer = host.to(self.device, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        buffer.record_stream(torch.cuda.current_stream(self.device))
        return buffer


class BlockCopier:
    """Copies blocks out of a `PagedKVCache` and back into it.

    size: positions of a block, which is a page. window: W of the local slots, 0 where there are
    none; what later tokens see of a stretch are the W - 1 positions before them.
    """

    def __init__(self, cache: PagedKVCache):
        self.cache, self.size, self.copies = cache, cache.table.page_size, HostCopies(cache.device)
        self.rings = [store for store in cache.stores if isinstance(store, RingStore)]
        windows = {store.window for store in self.rings} or {0}
        if len(windows) > 1:
            raise UserError(f'local slots have windows of {sorted(windows)}: '
                            'blocks are kept for one window only')
        [self.window] = windows
        self.position_nbytes = cache.plan.position_nbytes(cache.kv_dtype)

    @property
    def page_nbytes(self) -> int:
        """Bytes of what `page` gives."""
        return len(self.cache.pools) * self.size * self.position_nbytes

    def local_nbytes(self, n: int) -> int:
        """Bytes of what `local` gives for n positions."""
        return len(self.rings) * n * self.position_nbytes

    def page(self, page: int) -> torch.Tensor:
        """What a page holds, (page_nbytes,) uint8."""
        buffer = torch.empty(self.page_nbytes, dtype=torch.uint8, device=self.cache.device)
        for x, copy in self._parts(buffer, self.cache.pools, self.size):
            copy.copy_(x[page])
        return self.copies.out(buffer)

    def put_page(self, page: int, buffer: torch.Tensor) -> None:
        """The page holds what `page` gave."""
        for x, copy in self._parts(self.copies.back(buffer), self.cache.pools, self.size):
            x[page].copy_(copy)

    def n_in_reach(self, row: int, end: int) -> int:
        """How many of the last positions before `end` the rings of a row still hold."""
        held = self.cache.held(row)
        return max(0, min([end] + [end - held + store.capacity for store in self.rings]))

    def local(self, row: int, end: int, n: int) -> torch.Tensor:
        """The n positions before `end`, of every ring, (local_nbytes(n),) uint8; they must be in
        reach."""
        buffer = torch.empty(self.local_nbytes(n), dtype=torch.uint8, device=self.cache.device)
        for x, copy in self._stretch(buffer, row, end, n):
            copy.copy_(x)
        return self.copies.out(buffer)

    def put_local(self, row: int, end: int, n: int, buffer: torch.Tensor) -> None:
        """The row's rings hold what `local` gave."""
        for x, copy in self._stretch(self.copies.back(buffer), row, end, n):
            x.copy_(copy)

    def _stretch(self, buffer, row, end, n):
        """Pieces of the rings, which may wrap, with their places in the buffer."""
        spans = self.rings[0].spans(end - n, n) if self.rings else []
        for x, copy in self._parts(buffer, self.rings, n):
            offset = 0
            for a, b in spans:
                yield x[row, :, a:b], copy[:, offset:offset + b - a]
                offset += b - a

    def _parts(self, buffer, stores, n):
        """Each tensor of the stores with its (Hkv, n, D or 1) place in the buffer; wide elements
        first, so that they are aligned."""
        at = 0
        tensors = [x for store in stores for x in store.tensors]
        for x in sorted(tensors, key=lambda x: -x.element_size()):
            shape = x.size(1), n, x.size(3)
            end = at + x.element_size() * shape[0] * shape[1] * shape[2]
            yield x, buffer[at:end].view(x.dtype).view(shape)
            at = end
