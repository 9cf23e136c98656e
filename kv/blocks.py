"""Blocks of tokens that a prefix store keeps, and their K and V outside of a cache: a page of every global slot, or a stretch
of every ring, each as one buffer.

A buffer has the bytes as they are stored (int8 stays int8, with its scales), one tensor after another. On CUDA it is pinned
memory of the host, and copies do not wait for the device.
"""
import hashlib

import torch

from config.errors import UserError
from kv.paged import PagedKVCache
from kv.slots import RingSlot

OVERHEAD = 600  # bytes that Python takes for a block beside its buffers and tokens (measured: tests/kv/test_prefix.py)


def chained_hash(before: bytes, tokens: bytes) -> bytes:
    """The key of a block after the block with the key `before`."""
    return hashlib.blake2b(before + tokens, digest_size=16).digest()


class Block:
    """`size` tokens after those of `parent`, and what remembers them.

    page: where its global K, V are in the pools, -1 = not there. copy: the same on the host, or None. local: the last n_local
    positions of its local K, V, or None. anchor: a row can go on behind it. users: requests whose newest block it is. used:
    when it was last of use. depth: blocks from the root on, itself included. saved: the n_local that it has on disk, -1 = it
    is not there.
    """
    __slots__ = ('key', 'tokens', 'parent', 'children', 'depth', 'page', 'copy', 'local', 'n_local', 'anchor', 'users', 'used',
                 'saved')

    def __init__(self, key: bytes, tokens: bytes, parent: 'Block | None'):
        self.key, self.tokens, self.parent, self.children = key, tokens, parent, {}
        self.depth = parent.depth + 1 if parent else 0
        self.page, self.copy, self.local, self.n_local, self.anchor, self.users, self.used = -1, None, None, 0, False, 0, 0
        self.saved = -1

    def path(self) -> 'list[Block]':
        """From the first block on, itself included; the root is none."""
        found, block = [], self
        while block.parent:
            found.append(block)
            block = block.parent
        return found[::-1]


class BlockCopier:
    """Copies blocks out of a `PagedKVCache` and back into it.

    size: positions of a block, which is a page. window: W of the local slots, 0 where there are none; what later tokens see
    of a stretch are the W - 1 positions before them.
    """

    def __init__(self, cache: PagedKVCache):
        self.cache, self.size, self.pinned = cache, cache.table.page_size, cache.device.type == 'cuda'
        self.rings = [store for store in cache.stores if isinstance(store, RingSlot)]
        windows = {store.window for store in self.rings} or {0}
        if len(windows) > 1:
            raise UserError(f'local slots have windows of {sorted(windows)}: blocks are kept for one window only')
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
        buffer = self._buffer(self.page_nbytes)
        for x, copy in self._parts(buffer, self.cache.pools, self.size):
            copy.copy_(x[page], non_blocking=True)
        return buffer

    def put_page(self, page: int, buffer: torch.Tensor) -> None:
        """The page holds what `page` gave."""
        for x, copy in self._parts(buffer, self.cache.pools, self.size):
            x[page].copy_(copy, non_blocking=True)

    def n_in_reach(self, row: int, end: int) -> int:
        """How many of the last positions before `end` the rings of a row still hold."""
        held = self.cache.held(row)
        return max(0, min([end] + [end - held + store.capacity for store in self.rings]))

    def local(self, row: int, end: int, n: int) -> torch.Tensor:
        """The n positions before `end`, of every ring, (local_nbytes(n),) uint8; they must be in reach."""
        buffer = self._buffer(self.local_nbytes(n))
        for x, copy in self._stretch(buffer, row, end, n):
            copy.copy_(x, non_blocking=True)
        return buffer

    def put_local(self, row: int, end: int, n: int, buffer: torch.Tensor) -> None:
        """The row's rings hold what `local` gave."""
        for x, copy in self._stretch(buffer, row, end, n):
            x.copy_(copy, non_blocking=True)

    def _stretch(self, buffer, row, end, n):
        """Pieces of the rings, which may wrap, with their places in the buffer."""
        spans = self.rings[0].spans(end - n, n) if self.rings else []
        for x, copy in self._parts(buffer, self.rings, n):
            offset = 0
            for a, b in spans:
                yield x[row, :, a:b], copy[:, offset:offset + b - a]
                offset += b - a

    def _parts(self, buffer, stores, n):
        """Each tensor of the stores with its (Hkv, n, D or 1) place in the buffer; wide elements first, so that they are
        aligned."""
        at = 0
        for x in sorted((x for store in stores for x in store.tensors), key=lambda x: -x.element_size()):
            shape = x.size(1), n, x.size(3)
            end = at + x.element_size() * shape[0] * shape[1] * shape[2]
            yield x, buffer[at:end].view(x.dtype).view(shape)
            at = end

    def _buffer(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
