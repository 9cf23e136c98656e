"""The blocks of the prefix cache (store.py), and what is dropped under memory pressure.

Three kinds of things go, the least recently used first, but the less a thing is worth, the older it
counts (SPARE, EARLIER): local parts that no anchor needs, which only an edit amid a message could
use; all anchors of a text but the newest two, where the last request ended and began, and those
where several requests began; and leaves, with all before them that nothing can resume after.
"""
import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from engine.pages.cache import PagedKVCache
from engine.prefix.blocks import Block, BlockCopier, PrefixStats, allocated_nbytes

SPARE, EARLIER = 4, 3  # ages are multiplied by this


@dataclass
class BlockTree:
    """The block tree of one cache; a block has at most as many tokens as a page.

    cache: takes pages back from the tree when it runs out (`PageTable.reclaim`).
    budget: bytes of host memory for page copies, local parts and bookkeeping (pages in the pool
    belong to the cache). Blocks used by requests are kept even if this exceeds it.
    """
    cache: PagedKVCache
    budget: int
    stats: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self):
        self.table, self.copier = self.cache.table, BlockCopier(self.cache)
        self.size, self.lookback = self.table.page_size, self.copier.window
        # whether a row can resume amid blocks, not only at ends of blocks and requests
        self.anywhere = not (self.copier.state_nbytes or 0 < self.lookback < self.size)
        self.roots, self.nbytes = {}, 0  # roots: by salt
        self.blocks: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._clock = itertools.count(1)
        self._by_page = {}          # page -> block
        self._protected = set()     # blocks whose pages `reclaim` must not take
        self._spare: OrderedDict[Block, None] = OrderedDict()  # with a local part, maybe unneeded
        self._ends: OrderedDict[Block, None] = OrderedDict()   # with anchors, maybe unneeded
        self.table.reclaim = self.reclaim

    def root(self, salt: bytes) -> Block:
        """The root of the tree of the requests with this salt."""
        return self.roots.setdefault(salt, Block(b'', None))

    def _resumable(self, block, n) -> bool:
        """Whether a row can resume after the first n tokens of `block`: the local parts include all
        W positions before, and the state is there if rows have any."""
        if self.copier.state_nbytes and (n < block.n or block.state is None):
            return False
        return all(part.n_local >= part.n - start for part, start, _ in self._window(block, n))

    def _window(self, block, n):
        """Yield (block, start, end): of the W positions before the token n of `block`, those in
        each block, as offsets in it, from that block backwards."""
        left, end = self.lookback, n
        while block.parent and left > 0:
            start = max(0, end - left)
            yield block, start, end
            left -= end - start
            block, end = block.parent, self.size

    def _insert(self, block) -> None:
        block.parent.children[block.tokens] = block
        self.blocks[block] = None
        self.nbytes += block.nbytes
        if block.local is not None:
            self._spare[block] = None

    def _remove(self, block) -> None:
        del block.parent.children[block.tokens], self.blocks[block]
        self._spare.pop(block, None)
        self._ends.pop(block, None)
        self._leave_pool(block)
        self.nbytes -= block.nbytes

    def _set_page(self, block, page) -> None:
        block.page, self._by_page[page] = page, block

    def _set_local(self, block, local, n_local) -> None:
        self.nbytes += allocated_nbytes(local) - allocated_nbytes(block.local)
        block.local, block.n_local = local, n_local
        if local is not None:
            self._spare[block] = None

    def _touch(self, last_block) -> None:
        """Mark a path as used: children before their parents, which they depend on."""
        for block in last_block.lineage():
            block.used = next(self._clock)
            self.blocks.move_to_end(block)
            for queue in (self._spare, self._ends):
                if block in queue:
                    queue.move_to_end(block)

    def _has_anchor(self, block) -> bool:
        """Whether an anchor, in this block or below it, needs the local part of this block."""
        if block.anchors:
            return True
        level, n = list(block.children.values()), 0  # n: tokens between the block and the level
        while level and n < self.lookback:
            if any(n + min(below.anchors) < self.lookback for below in level if below.anchors):
                return True
            level = [child for below in level for child in below.children.values()]
            n += self.size
        return False

    def _move_anchor(self, block, other, offset) -> None:
        other.anchors[offset] = other.anchors.get(offset, 0) + block.anchors.pop(offset)
        self._ends[other] = None
        for part, *_ in self._window(block, offset):
            if part.local is not None:
                self._spare[part] = None

    def _drop_local(self, blocks) -> None:
        """Drop the local parts of these blocks that no anchor needs."""
        for block in blocks:
            if block.local is not None and not self._has_anchor(block):
                self._set_local(block, None, 0)

    def _thin(self, end) -> None:
        """Keep the newest two anchors up to `end`, and those where several requests began."""
        anchors = [(block, offset) for block in end.lineage()
                   for offset in sorted(block.anchors, reverse=True)]
        for block, offset in anchors[2:]:
            if block.anchors[offset] < 2:
                del block.anchors[offset]
                self._drop_local(part for part, *_ in self._window(block, offset))

    def _shrink(self) -> None:
        """Get within the budget, as far as possible without evicting blocks in use."""
        if self.nbytes > self.budget:
            copied = [block for block in self._by_page.values() if block.copy is not None]
            for block in sorted(copied, key=lambda block: block.used):
                self.nbytes -= allocated_nbytes(block.copy)  # the pool has the same data
                block.copy = None
                if self.nbytes <= self.budget:
                    return
        while self.nbytes > self.budget and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Drop what counts as the oldest. False if only blocks in use are left."""
        now = next(self._clock)
        unused = (block for block in self.blocks if not block.children and not block.users)
        leaf = next(unused, None)
        spare, end = next(iter(self._spare), None), next(iter(self._ends), None)
        age = now - leaf.used if leaf else 0
        if spare and (now - spare.used) * SPARE >= age:
            del self._spare[spare]
            self._drop_local([spare])
        elif end and (now - end.used) * EARLIER >= age:
            del self._ends[end]
            self._thin(end)
        elif leaf:
            self._evict(leaf)
        else:
            return False
        return True

    def _evict(self, block) -> None:
        """Remove a leaf, and the blocks before it back to one that a row can resume after."""
        while True:
            parent = block.parent
            self._remove(block)
            if block.anchors:
                self._drop_local(part for part, *_ in self._window(parent, self.size))
            block = parent
            in_use = block.children or block.users or self._resumable(block, block.n)
            if not block.parent or in_use:
                return

    def forget(self, last_block: Block) -> None:
        """Remove the blocks of a request whose logits were not finite, except those shared with
        other requests."""
        while last_block in self.blocks and not (last_block.children or last_block.users):
            self._remove(last_block)
            last_block = last_block.parent

    def reclaim(self, n: int) -> None:
        """Copy the n least recently used pages that are in no row to the host, and free them."""
        evictable = [block for page, block in self._by_page.items()
                     if self.table.refs[page] == 1 and block not in self._protected]
        for block in heapq.nsmallest(n, evictable, key=lambda block: block.used):
            if block.copy is None:
                block.copy = self.copier.page(block.page)
                self.nbytes += allocated_nbytes(block.copy)
            self._leave_pool(block)
        self._shrink()

    def _leave_pool(self, block) -> None:
        page, block.page = block.page, -1
        if page >= 0:
            self._by_page.pop(page, None)
            self.cache.unpin(page)

    def recover(self) -> None:
        """Rebuild all bookkeeping from the tree after an error and a reset of the cache."""
        self.nbytes, self._by_page, self._protected = 0, {}, set()
        blocks, level = [], list(self.roots.values())
        while level:
            block = level.pop()
            block.users = 0
            for child in list(block.children.values()):
                if self.cache.pools and child.page < 0 and child.copy is None:
                    dict.__delitem__(block.children, child.tokens)  # interrupted before its page
            block.children.order = sorted(block.children)
            level += block.children.values()
            if block.parent:
                blocks.append(block)
                self.nbytes += block.nbytes
                if block.page >= 0:
                    self._by_page[block.page] = block
        blocks.sort(key=lambda block: block.used)
        self.blocks = OrderedDict.fromkeys(blocks)
        local = [block for block in blocks if block.local is not None]
        self._spare = OrderedDict.fromkeys(local)
        self._ends = OrderedDict.fromkeys(block for block in blocks if block.anchors)
        self.table.rebuild(set(self._by_page))
        self._shrink()
