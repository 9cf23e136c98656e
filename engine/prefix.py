"""Prefix cache: a radix tree of token blocks with K and V, reused by requests that share a prefix.

    root ── "To be, o" ── "r not to" ── " be"...   a block is a page of tokens, a key of its
                      └── "r else w"               parent's `children`

The global K/V of a block is a page. Local slots are rings, which cannot be rewound: the positions
before a block's end are copied while they are in the ring, as *local parts* of blocks. A block end
with all of its last W - 1 positions can be resumed from, and is called an *anchor*. (With
key_offset it also needs the state of a row that stopped there, which is kept.) The distances
of anchors from the newest one roughly double, so that a text that differs x tokens before the end
of a cached one is recomputed from at most about 2x before the end. Other local parts are dropped,
unless `prune` is off.

Sources: prefix trees with LRU leaves (RadixAttention, Zheng et al. 2023), paged caches with hashed
blocks (vLLM), caching between turns (Character.AI, "Optimizing AI Inference", 2024).
"""
import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from engine.blocks import Block, BlockCopier, Hit, PrefixStats, allocated_nbytes
from engine.paged import PagedKVCache
from engine.pages import OutOfPages
from engine.prefix_disk import DiskTier


@dataclass
class PrefixStore:
    """The block tree of one cache; a block has as many tokens as a page.

    cache: takes pages back from the store when it runs out (`PageTable.reclaim`).
    budget: bytes of host memory for page copies, local parts and bookkeeping (pages in the pool
    belong to the cache). Blocks used by requests are kept even if this exceeds it.
    prune: drop local parts that no anchor needs.
    disk: stores evicted blocks, and is searched for blocks not in memory; None = no disk.
    """
    cache: PagedKVCache
    budget: int
    prune: bool = True
    disk: DiskTier | None = None
    stats: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self):
        self.table, self.copier = self.cache.table, BlockCopier(self.cache)
        self.size, self.lookback = self.table.page_size, max(0, self.copier.window - 1)
        self.anywhere = not (self.lookback or self.copier.state_nbytes)  # all ends can be resumed
        self.root, self.nbytes = Block(b'', None), 0
        self.blocks: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._clock = itertools.count(1)
        self._by_page = {}          # page -> block
        self._protected = set()     # blocks whose pages `reclaim` must not take
        self.table.reclaim = self.reclaim

    def match(self, tokens: list[int], disk: bool = True) -> Hit:
        """Find the longest reusable prefix of `tokens[:-1]`: the last one's logits are needed.

        disk: also read blocks from disk; memory may exceed the budget until `restore`."""
        path, block, n_before = [], self.root, len(self.blocks)
        for piece in self._pieces(tokens[:-1]):
            parent, block = block, block.children.get(piece)
            if block is None and disk and self.disk:
                block = self._from_disk(parent, piece)
            if block is None:
                break
            path.append(block)
        if len(self.blocks) > n_before:
            # the first block last, i.e. as most recently used: all others need it
            self.disk.touch([block.key for block in reversed(path)])
        n = len(path)
        while n and not self._is_complete(path[n - 1]):
            n -= 1
        return Hit(path[:n], len(path))

    def chunk_ends(self, hit: Hit, length: int) -> list[int]:
        """Positions where prefill chunks of a request of `length` tokens should end, so that
        they become anchors: where it leaves the tree, and its last boundary (unpruned: all)."""
        start, last = len(hit.blocks) * self.size, length // self.size * self.size
        window = max(1, self.copier.window // self.size) * self.size
        step = last if self.prune or self.anywhere else window
        ends = {hit.n_matched * self.size, last, *range(start + step, last, step or 1)}
        return sorted(end for end in ends if start < end <= length)

    def restore(self, row: int, hit: Hit) -> Block:
        """Fill an empty row with the tokens of the hit. Returns its last block, or the root.
        Raises OutOfPages if the pool has no room for pages from the host; the row stays empty."""
        last_block = hit.blocks[-1] if hit.blocks else self.root
        last_block.users += 1  # so that making room does not evict it
        last_block.anchor = bool(hit.blocks)
        try:
            pages = self._to_pool(hit.blocks) if self.cache.pools else []
        except OutOfPages:
            last_block.users -= 1
            raise
        self.cache.adopt(row, pages, last_block.depth * self.size)
        # Parts may overlap in the ring: the newest is written last.
        for block, _ in reversed(list(self._window(last_block))):
            self.copier.put_local(row, block.depth * self.size, block.n_local, block.local)
        if last_block.state is not None:
            self.copier.put_state(row, last_block.state)
        self._touch(last_block)
        self._shrink()
        return last_block

    def _to_pool(self, blocks) -> list[int]:
        """Copy pages on the host to the pool. Returns the pages of the blocks."""
        missing = [block for block in blocks if block.page < 0]
        if len(missing) > self.n_available(blocks):
            raise OutOfPages(f'{len(missing)} pages of {self.size} positions are to be restored: '
                             f'{self.n_available(blocks)} of {self.table.n_pages} are free')
        self._protected = set(blocks)
        if len(missing) > self.table.n_free:
            self.reclaim(len(missing) - self.table.n_free)
        self._protected = set()
        for block in missing:
            page = self.table.take_pinned()
            self.copier.put_page(page, block.copy)
            self._set_page(block, page)
            self.stats.copied_in += 1
        return [block.page for block in blocks]

    def n_available(self, blocks: list[Block]) -> int:
        """Number of pages that can be taken, excluding those of `blocks`."""
        evictable = sum(block.page >= 0 and self.table.refs[block.page] == 1 for block in blocks)
        return self.table.n_available - evictable

    def _pieces(self, tokens) -> list[bytes]:
        """The tokens of each complete block, as int32 bytes."""
        packed, width = np.asarray(tokens, dtype=np.int32).tobytes(), 4 * self.size
        return [packed[i:i + width] for i in range(0, len(packed) - width + 1, width)]

    def _from_disk(self, parent, piece) -> Block | None:
        block = Block(piece, parent)
        found = self._read(block)
        if found is None:
            return None
        block.copy, block.local, block.state, block.n_local, anchor = found
        block.saved, block.saved_state = block.n_local, block.state is not None
        self._insert(block)
        if anchor:
            for each, n in self._window(block):  # local parts dropped when the anchor was evicted
                found = self._read(each) if each.n_local < n <= each.saved else None
                if found:
                    self._set_local(each, found[1], found[3])
            block.anchor = self._is_complete(block)
        self._touch(block)
        return block

    def _read(self, block):
        """(page, local, state, n_local, anchor) of a block on disk, or None."""
        found = self.disk.read(block.key, block.parent.key, block.tokens)
        if found is None:
            return None
        buffers, n_local, anchor = found
        parts = [buffers.get(name) for name in ('page', 'local', 'state')]
        expected = [self.copier.page_nbytes, self.copier.local_nbytes(n_local),
                    self.copier.state_nbytes if 'state' in buffers else 0]
        sizes = [0 if x is None else x.numel() for x in parts]
        return (*parts, n_local, anchor) if sizes == expected else None

    def _is_complete(self, block) -> bool:
        """Whether the local parts include all W - 1 positions before the end of `block`, and its
        state is there if rows have any."""
        return (block.state is not None or not self.copier.state_nbytes) and all(
            each.n_local >= n for each, n in self._window(block))

    def _window(self, block):
        """Yield (block, n) for the W - 1 positions before the end of `block`, from it backwards:
        n of them are in that block."""
        left = self.lookback
        while block.parent and left > 0:
            yield block, min(self.size, left)
            block, left = block.parent, left - self.size

    def extend(self, row: int, last_block: Block, tokens: list[int]) -> Block:
        """Add the complete blocks of a row with these `tokens` after `last_block`. Returns the new
        last block. Call it when the length of the row becomes a multiple of `size`, which makes the
        boundary an anchor, and when the request ends."""
        length, pages = self.cache.length(row), self.table.rows[row]
        first = last_block.depth
        for i, piece in enumerate(self._pieces(tokens[first * self.size:length]), first):
            block = last_block.children.get(piece)
            if block is None:
                block = Block(piece, last_block)
                self._insert(block)
            if block.page < 0 and self.cache.pools:
                self.table.pin(pages[i])
                self._set_page(block, pages[i])
            block.users += 1
            last_block.users -= 1
            last_block = block
        self._touch(last_block)
        at_boundary = length == last_block.depth * self.size
        if at_boundary and last_block.depth and not last_block.anchor:
            self._make_anchor(row, last_block)
            self._shrink()
        return last_block

    def _insert(self, block) -> None:
        block.parent.children[block.tokens] = block
        self.blocks[block] = None
        self.nbytes += block.nbytes

    def _set_page(self, block, page) -> None:
        block.page, self._by_page[page] = page, block

    def _make_anchor(self, row, last_block) -> None:
        if self.copier.state_nbytes and last_block.state is None:
            last_block.state = self.copier.state(row)
            self.nbytes += allocated_nbytes(last_block.state)
        window = list(self._window(last_block))
        in_ring = {block: min(self.size, self.copier.n_in_ring(row, block.depth * self.size))
                   for block, _ in window}
        if any(max(in_ring[block], block.n_local) < n for block, n in window):
            return  # the ring has overwritten a part
        for block, n in window:
            if block.n_local < n:
                end = block.depth * self.size
                local = self.copier.local(row, end, in_ring[block])
                self._set_local(block, local, in_ring[block])
        last_block.anchor = True
        if not self.prune:
            return
        # keep anchors at distances that roughly double, and where the tree branches
        kept, anchors = 0, [block for block in last_block.parent.lineage() if block.anchor]
        for block, farther in itertools.zip_longest(anchors, anchors[1:], fillvalue=self.root):
            next_distance = last_block.depth - farther.depth
            if len(block.children) < 2 and kept and next_distance <= 2 * kept:
                block.anchor = False
                self._prune_local(block)
            else:
                kept = last_block.depth - block.depth

    def _prune_local(self, last_block) -> None:
        """Drop the local parts in the window of `last_block` that no anchor needs."""
        for block, _ in self._window(last_block):
            if not self._has_anchor(block):
                self._set_local(block, None, 0)

    def _has_anchor(self, block) -> bool:
        """Whether the window of an anchor, at this block or below it, includes this block."""
        level, n = [block], self.lookback
        while level and n > 0:
            if any(each.anchor for each in level):
                return True
            level, n = [child for each in level for child in each.children.values()], n - self.size
        return False

    def _set_local(self, block, local, n_local) -> None:
        self.nbytes += allocated_nbytes(local) - allocated_nbytes(block.local)
        block.local, block.n_local = local, n_local

    def release(self, last_block: Block) -> None:
        """A request with this last block has ended or was preempted, and its row has been reset."""
        last_block.users -= 1
        self._touch(last_block)
        self._shrink()

    def _touch(self, last_block) -> None:
        """Mark a path as used: children before their parents, which they depend on."""
        for block in last_block.lineage():
            block.used = next(self._clock)
            self.blocks.move_to_end(block)

    def reclaim(self, n: int) -> None:
        """Copy the n least recently used pages that are in no row to the host, and free them."""
        evictable = [block for page, block in self._by_page.items()
                     if self.table.refs[page] == 1 and block not in self._protected]
        for block in heapq.nsmallest(n, evictable, key=lambda block: block.used):
            if block.copy is None:
                block.copy = self.copier.page(block.page)
                self.nbytes += allocated_nbytes(block.copy)
                self.stats.copied_out += 1
            self._leave_pool(block)
        self._shrink()

    def _leave_pool(self, block) -> None:
        page, block.page = block.page, -1
        if page >= 0:
            self._by_page.pop(page, None)
            self.cache.unpin(page)

    def _shrink(self) -> None:
        """Get within the budget, as far as possible without evicting blocks in use."""
        if self.nbytes > self.budget:
            copied = [block for block in self._by_page.values() if block.copy is not None]
            for block in sorted(copied, key=lambda block: block.used):
                self.nbytes -= allocated_nbytes(block.copy)  # the pool has the same data
                block.copy = None
                if self.nbytes <= self.budget:
                    return
        while self.nbytes > self.budget:
            unused = (block for block in self.blocks if not block.children and not block.users)
            leaf = next(unused, None)
            if leaf is None:
                return
            self._evict(leaf)

    def _evict(self, block) -> None:
        """Remove a leaf, and the blocks before it back to the last anchor: nothing can resume
        after them."""
        while True:
            parent = block.parent
            if self.disk:
                self._to_disk(block)
                if block.anchor:  # the local parts that it needs are about to be dropped
                    for each, _ in itertools.islice(self._window(block), 1, None):
                        self._to_disk(each)
            self._remove(block)
            if block.anchor:
                self._prune_local(parent)
            block = parent
            in_use = block.children or block.users or block.anchor
            if not block.parent or in_use or not self.lookback and self._is_complete(block):
                return

    def _remove(self, block) -> None:
        del block.parent.children[block.tokens], self.blocks[block]
        self._leave_pool(block)
        self.nbytes -= block.nbytes
        self.stats.evicted += 1

    def forget(self, last_block: Block) -> None:
        """Remove the blocks of a request whose logits were not finite, except those shared with
        other requests."""
        while last_block in self.blocks and not (last_block.children or last_block.users):
            if self.disk:
                self.disk.delete(last_block.key)
            self._remove(last_block)
            last_block = last_block.parent
        self._prune_local(last_block)

    def _to_disk(self, block) -> None:
        in_pool = block.copy is None and block.page >= 0
        self.disk.write(block, self.copier.page(block.page) if in_pool else block.copy)

    def close(self) -> None:
        """Write all blocks to disk, if there is one."""
        for block in self.blocks if self.disk else ():
            self._to_disk(block)

    def recover(self) -> None:
        """Rebuild all bookkeeping from the tree after an error and a reset of the cache."""
        self.nbytes, self._by_page, self._protected = 0, {}, set()
        found, level = [], [self.root]
        while level:
            block = level.pop()
            block.users = 0
            for child in list(block.children.values()):
                if self.cache.pools and child.page < 0 and child.copy is None:
                    del block.children[child.tokens]  # interrupted before it had a page
            level += block.children.values()
            if block.parent:
                found.append(block)
                self.nbytes += block.nbytes
                if block.page >= 0:
                    self._by_page[block.page] = block
        self.blocks = OrderedDict.fromkeys(sorted(found, key=lambda block: block.used))
        self.table.rebuild(set(self._by_page))
        self._shrink()
