"""Blocks of the prefix cache, and copies of their K and V outside the KV cache: a page of every
global slot, a range of positions of every ring, or the states of a row (half of its last key in
every global slot, with key_offset), each as one buffer of the stored bytes.
"""
import bisect
import os.path
from dataclasses import dataclass

import torch

from engine.pages.cache import PagedKVCache
from engine.pages.page_table import page_nbytes
from kv.plan import LOCAL
from kv.slots import RingStore

# bytes of the Python objects of a block, excluding buffers and tokens (from sys.getsizeof)
OVERHEAD = 900
CANDIDATES = 8  # neighbours tried for the part of a text that is no complete block


def allocated_nbytes(buffer: torch.Tensor | None) -> int:
    """Bytes allocated for a buffer, which may exceed its size: see `HostCopies`."""
    return 0 if buffer is None else buffer.untyped_storage().nbytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two sequences, as int32 bytes, share."""
    return len(os.path.commonprefix((a, b))) // 4


class Children(dict):
    """The children of a block by their tokens, and `order`, the sorted tokens: neighbours in it
    share the longest prefixes."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __setitem__(self, tokens, block):
        if tokens not in self:
            bisect.insort(self.order, tokens)
        super().__setitem__(tokens, block)

    def __delitem__(self, tokens):
        super().__delitem__(tokens)
        del self.order[bisect.bisect_left(self.order, tokens)]

    def nearest(self, tokens: bytes) -> list:
        """[(number of common leading tokens, block)], most first: at most CANDIDATES, with some."""
        right = bisect.bisect_left(self.order, tokens)
        near = self.order[max(0, right - CANDIDATES):right][::-1]
        near += self.order[right:right + CANDIDATES]
        pairs = [(common_tokens(other, tokens), self[other]) for other in near]
        pairs.sort(key=lambda pair: -pair[0])
        return [pair for pair in pairs[:CANDIDATES] if pair[0]]


class Block:
    """At most `size` tokens after those of `parent`, with their K and V; fewer only in a leaf.

    n: number of tokens; start: of those before it. children: keyed by their tokens. depth: number
    of blocks from the root, including this one.
    page: page of its global K, V in the pools, -1 = none. copy: a copy of that page on the host, or
    None. local: the last n_local positions of its local K, V, or None. state: the states of a row
    that ended with it, or None.
    anchors: offsets, in tokens of this block, where a request ended or began, and how many began.
    users: running requests whose last complete block is this one (for the root: those without a
    block). used: time of its last use.
    """
    __slots__ = ('tokens', 'parent', 'children', 'depth', 'n', 'start', 'page', 'copy', 'local',
                 'n_local', 'state', 'anchors', 'users', 'used')

    def __init__(self, tokens: bytes, parent: 'Block | None'):
        self.tokens, self.parent, self.children = tokens, parent, Children()
        self.n, self.depth, self.start = len(tokens) // 4, 0, 0
        if parent:
            self.depth, self.start = parent.depth + 1, parent.end
        self.page, self.copy = -1, None
        self.local, self.n_local, self.state = None, 0, None
        self.anchors, self.users, self.used = {}, 0, 0

    @property
    def end(self) -> int:
        """Number of tokens up to and including its own."""
        return self.start + self.n

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return OVERHEAD + len(self.tokens) + sum(map(allocated_nbytes, (
            self.copy, self.local, self.state)))

    def lineage(self):
        """Yield this block and its ancestors, except the root."""
        block = self
        while block.parent:
            yield block
            block = block.parent


@dataclass
class Hit:
    """What a request reuses: the first `length` positions. root: of its tree. blocks: that it
    reuses as a whole; part: the block with those after them, or None. n_matched: number of its
    tokens that are in the tree; those after `length` cannot be reused."""
    root: Block
    blocks: list[Block]
    part: Block | None = None
    length: int = 0
    n_matched: int = 0


@dataclass
class PrefixStats:
    """Counts since the store was created. looked_up: tokens of requests; found: how many of them
    were cached."""
    requests: int = 0
    looked_up: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of tokens that were cached."""
        return self.found / max(1, self.looked_up)


class HostCopies:
    """Copies buffers to pinned host memory and back on a separate stream; on a CPU it returns them
    unchanged. Torch rounds pinned memory up to a power of two, so the rounded size is counted."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == 'cuda' else None

    def out(self, buffer: torch.Tensor) -> torch.Tensor:
        """A host copy of a device buffer, (n,) uint8, ready once the work queued so far is done."""
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
        """A device copy of a buffer returned by `out`; work queued after this call can use it."""
        if self.stream is None:
            return host
        with torch.cuda.stream(self.stream):  # after pending copies to the host
            buffer = host.to(self.device, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        buffer.record_stream(torch.cuda.current_stream(self.device))
        return buffer


class BlockCopier:
    """Copies blocks of `size` positions (a page) out of a `PagedKVCache` and back into it.
    window: W of the local slots; 0 if there are none, or if windows differ: then rings are part of
    the states, and a row resumes only where one was saved. state_nbytes: size of the buffer that
    `state` returns; 0 = rows have no states. page_nbytes: of the one that `page` returns.
    `put_page`, `put_local` and `put_state` write such a buffer back."""

    def __init__(self, cache: PagedKVCache):
        self.cache, self.size, self.copies = cache, cache.table.page_size, HostCopies(cache.device)
        self.rings = [store for store in cache.stores if isinstance(store, RingStore)]
        self._states = list(cache.states)
        self.state_nbytes = sum(slot.state_nbytes(cache.kv_dtype) for slot in cache.plan.slots)
        self.page_nbytes = page_nbytes(cache.plan, self.size, cache.kv_dtype)
        self._local_nbytes = sum(slot.position_nbytes(cache.kv_dtype) for slot in cache.plan.slots
                                 if slot.kind == LOCAL)  # of a position
        if len({store.window for store in self.rings}) > 1:  # where one ends, another goes on
            self._states += self.rings
            self.state_nbytes += sum(store.nbytes // cache.batch_size for store in self.rings)
            self.rings, self._local_nbytes = [], 0
        self.window = self.rings[0].window if self.rings else 0

    def local_nbytes(self, n: int) -> int:
        """Size of the buffer that `local` returns for n positions."""
        return n * self._local_nbytes

    def page(self, page: int) -> torch.Tensor:
        """The contents of a page, (page_nbytes,) uint8."""
        return self._out(self.page_nbytes, self._parts, self.cache.pools, page)

    def put_page(self, page: int, buffer: torch.Tensor) -> None:
        self._back(buffer, self._parts, self.cache.pools, page)

    def n_in_ring(self, row: int, end: int) -> int:
        """How many of the last positions before `end` are in the rings of a row."""
        behind = self.cache.length(row) - end
        if behind < 0:
            return 0
        return max(0, min([end] + [store.capacity - behind for store in self.rings]))

    def local(self, row: int, end: int, n: int) -> torch.Tensor:
        """The n positions before `end` of every ring, (local_nbytes(n),) uint8."""
        return self._out(self.local_nbytes(n), self._ring_parts, row, end, n)

    def put_local(self, row: int, end: int, n: int, buffer: torch.Tensor, drop: int = 0) -> None:
        """drop: how many of its last positions are not written."""
        self._back(buffer, self._ring_parts, row, end, n, drop)

    def state(self, row: int) -> torch.Tensor:
        """The states of a row at its present length, (state_nbytes,) uint8."""
        return self._out(self.state_nbytes, self._parts, self._states, row)

    def put_state(self, row: int, buffer: torch.Tensor) -> None:
        self._back(buffer, self._parts, self._states, row)

    def _out(self, nbytes, parts, *where):
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.cache.device)
        for x, copy in parts(buffer, *where):
            copy.copy_(x)
        return self.copies.out(buffer)

    def _back(self, buffer, parts, *where):
        for x, copy in parts(self.copies.back(buffer), *where):
            x.copy_(copy)

    def _ring_parts(self, buffer, row, end, n, drop=0):
        """Pair parts of the rings, which may wrap around, with views of the buffer."""
        spans = self.rings[0].spans(end - n, n - drop) if self.rings else []
        for x, copy in self._parts(buffer, self.rings, row, n):
            offset = 0
            for a, b in spans:
                yield x[:, a:b], copy[:, offset:offset + b - a]
                offset += b - a

    def _parts(self, buffer, stores, at, n=0):
        """Pair row (or page) `at` of each tensor with its (Hkv, n, D or 1) view of the buffer;
        widest elements first, so that views are aligned. n: 0 = all positions of the store."""
        start = 0
        tensors = [x for store in stores for x in store.distinct(store.tensors)]
        for x in sorted(tensors, key=lambda x: -x.element_size()):
            shape = x.size(1), n or x.size(2), x.size(3)
            end = start + x.element_size() * shape[0] * shape[1] * shape[2]
            yield x[at], buffer[start:end].view(x.dtype).view(shape)
            start = end
