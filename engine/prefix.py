"""Prefix cache: a radix tree of token blocks with K and V, reused by requests that share a prefix.

    root ── "To be, o" ── "r not to" ── " be"...   a block is a page of tokens; its key is a hash
                      └── "r else w"               chained over all before; hits compare its tokens

A new request reuses the longest path of blocks that its tokens begin with, and computes only the
rest. That is easy for global slots, of which a block has a page. A local slot is a ring, and a
ring that has wrapped cannot be rewound: to go on at a boundary, the W - 1 positions before it must
have been copied while they were there. So the blocks also have *local parts*, and a hit ends at the
deepest boundary before which they are whole (an *anchor*).

Not all boundaries are anchors: behind the newest they are kept at distances that about double, so
that a text that departs from an old one x tokens before its end is computed anew from at most about
2 x before it; and where the tree branches. Other local parts are dropped (not with `prune=False`).

Pages stay in the pool of the cache while there is room, shared with the rows that read them; when a
row needs them, those least recently used are copied to the host's memory. When that is over its
budget, leaves go, least recently used first.

Sources: prefix trees with LRU leaves (RadixAttention, Zheng et al. 2023), paged caches with hashed
blocks (vLLM), the same between turns (Character.AI, "Optimizing AI Inference", 2024).
"""
import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np

from engine.blocks import Block, BlockCopier, Hit, PrefixStats, chained_hash, taken
from engine.paged import PagedKVCache
from engine.pages import OutOfPages
from engine.prefix_disk import DiskTier


@dataclass
class PrefixStore:
    """The tree for one cache, whose page size is that of the blocks.

    Args:
        cache: it makes room in its pools from the store's pages.
        budget: bytes of host memory for copies, local parts and bookkeeping (pages in the pool are
            the cache's); what requests now use is kept even so.
        prune: drop local parts that no anchor needs.
        hash_block: (key of the block before, bytes of the tokens) -> key.
        disk: where blocks go that leave the host's memory, and are looked for; None = nowhere.
    """
    cache: PagedKVCache
    budget: int
    prune: bool = True
    hash_block: object = chained_hash
    disk: DiskTier | None = None
    stats: PrefixStats = field(default_factory=PrefixStats)

    def __post_init__(self):
        self.table, self.copier = self.cache.table, BlockCopier(self.cache)
        self.size, self.reach = self.table.page_size, max(0, self.copier.window - 1)
        self.root, self.index, self.nbytes = Block(b'', b'', None), {}, 0
        self._clock, self._serial = itertools.count(1), itertools.count()
        self._leaves, self._wanted = [], set()
        self._pooled = {}  # the blocks that have a page, by it
        self.table.reclaim = self.reclaim

    # -- looking up --------------------------------------------------------------------------------

    def match(self, tokens: list[int], disk: bool = True) -> Hit:
        """What there is of the beginning of `tokens`, without the last: its logits are wanted.
        disk: also look there; what is found may bring memory over its budget until `restore`."""
        packed, path, block, n_before = self._packed(tokens), [], self.root, len(self.index)
        for i in range((len(tokens) - 1) // self.size):
            block = self._child(block, packed, i, disk)
            if block is None:
                break
            path.append(block)
        if len(self.index) > n_before:
            self.disk.touch([block.key for block in reversed(path)])  # the first last: all need it
        n = len(path)
        while n and not self._whole(path[:n]):
            n -= 1
        return Hit(path[:n], len(path))

    def stops(self, hit: Hit, length: int) -> list[int]:
        """Where chunks of a request of `length` tokens should end, so that there will be anchors:
        where it leaves what is known, and at its last boundary. (Unpruned, in every window.)"""
        start, last = len(hit.blocks) * self.size, length // self.size * self.size
        window = max(1, self.copier.window // self.size) * self.size
        step = last if self.prune or not self.reach else window
        stops = {hit.known * self.size, last, *range(start + step, last, step or 1)}
        return sorted(stop for stop in stops if start < stop <= length)

    def restore(self, row: int, hit: Hit) -> Block:
        """The row, which must hold nothing, holds the tokens of the hit. Returns its newest block.

        Raises:
            OutOfPages: the pool has no room for pages that are on the host; the row holds nothing.
        """
        tip = hit.blocks[-1] if hit.blocks else self.root
        tip.users, tip.anchor = tip.users + 1, bool(hit.blocks)  # making room must not take it
        try:
            if self.cache.pools:
                self._to_pool(hit.blocks)
        except OutOfPages:
            tip.users -= 1
            raise
        pages = [block.page for block in hit.blocks] if self.cache.pools else []
        self.cache.adopt(row, pages, tip.depth * self.size)
        # what is too much of the first, the last overwrite
        for block, _ in reversed(list(self._window(hit.blocks))):
            self.copier.put_local(row, block.depth * self.size, block.n_local, block.local)
        self._touch(tip)
        self._shrink()
        return tip

    def _to_pool(self, blocks):
        missing = [block for block in blocks if block.page < 0]
        if len(missing) > self.n_available(blocks):
            raise OutOfPages(f'{len(missing)} pages of {self.size} positions are to be restored: '
                             f'{self.n_available(blocks)} of {self.table.n_pages} are free')
        self._wanted = set(blocks)  # room is not to be made of these
        if len(missing) > self.table.n_free:
            self.reclaim(len(missing) - self.table.n_free)
        self._wanted = set()
        for block in missing:
            page = self.table.take_kept()
            self.copier.put_page(page, block.copy)
            self._has(block, page)
            self.stats.copied_in += 1

    def n_available(self, blocks: list[Block]) -> int:
        """Pages that can be taken beside those of `blocks`."""
        idle = sum(block.page >= 0 and self.table.refs[block.page] == 1 for block in blocks)
        return self.table.n_available - idle

    def _packed(self, tokens) -> bytes:
        return np.asarray(tokens, dtype=np.int32).tobytes()

    def _piece(self, packed, i) -> bytes:
        return packed[4 * self.size * i:4 * self.size * (i + 1)]

    def _child(self, block, packed, i, disk=True) -> Block | None:
        """The block that follows with these tokens; another with the same key is not it."""
        piece = self._piece(packed, i)
        key = self.hash_block(block.key, piece)
        found = self.index.get(key)
        if found is None:
            return self._from_disk(block, key, piece) if disk and self.disk else None
        return found if found.parent is block and found.tokens == piece else None

    def _from_disk(self, parent, key, piece) -> Block | None:
        found = self._read(parent, key, piece)
        if found is None:
            return None
        block = self._new(parent, key, piece)
        block.copy, block.local, block.n_local, anchor = found
        block.saved, block.used = block.n_local, next(self._clock)
        self.nbytes += taken(block.copy) + taken(block.local)
        if anchor:
            for each, n in self._window(block.path()):  # local parts that were dropped when it left
                if each.n_local < n <= each.saved:
                    self._fill(each)
            block.anchor = self._whole(block.path())
        self._offer(block)
        return block

    def _fill(self, block):
        found = self._read(block.parent, block.key, block.tokens)
        if found:
            self._drop_local(block)
            _, block.local, block.n_local, _ = found
            self.nbytes += taken(block.local)

    def _read(self, parent, key, piece):
        """(page, local, n_local, anchor) of a block on disk, or None."""
        found = self.disk.read(key, parent.key, piece)
        if found is None:
            return None
        buffers, n_local, anchor = found
        page, local = buffers.get('page'), buffers.get('local')
        sizes = self.copier.page_nbytes, self.copier.local_nbytes(n_local)
        fits = tuple(0 if x is None else x.numel() for x in (page, local)) == sizes
        return (page, local, n_local, anchor) if fits else None

    def _whole(self, path) -> bool:
        """Whether the local parts at the end of a path have all that a row needs to go on."""
        return all(block.n_local >= n for block, n in self._window(path))

    def _window(self, path):
        """Blocks at the end of a path with the positions needed of each, the last first."""
        for behind, block in enumerate(reversed(path)):
            n = min(self.size, self.reach - behind * self.size)
            if n <= 0:
                return
            yield block, n

    # -- growing -----------------------------------------------------------------------------------

    def extend(self, row: int, tip: Block, tokens: list[int]) -> Block:
        """Keep the whole blocks of a row, which holds `tokens`, beyond its newest one; the newest
        then. Call it whenever the row has come to hold a multiple of `size`, which makes that an
        anchor, and at its end."""
        held = self.cache.held(row)
        if held // self.size > tip.depth:
            packed = self._packed(tokens[:held])
            for i in range(tip.depth, held // self.size):
                block = self._child(tip, packed, i, disk=False)  # the row has it at hand
                if block is None:
                    piece = self._piece(packed, i)
                    key = self.hash_block(tip.key, piece)
                    if key in self.index:
                        return tip  # another block has this key: nothing behind it can be found
                    block = self._new(tip, key, piece)
                if block.page < 0 and self.cache.pools:
                    self.table.keep(self.table.rows[row][i])
                    self._has(block, self.table.rows[row][i])
                block.users, tip.users = block.users + 1, tip.users - 1
                tip = block
            self._touch(tip)
        if held == tip.depth * self.size and tip.depth and not tip.anchor:
            self._make_anchor(row, tip)
            self._shrink()
        return tip

    def _has(self, block, page) -> None:
        block.page, self._pooled[page] = page, block

    def _new(self, parent, key, piece) -> Block:
        block = Block(key, piece, parent)
        self.nbytes += block.nbytes
        parent.children[key] = self.index[key] = block
        return block

    def _make_anchor(self, row, tip) -> None:
        window = list(self._window(tip.path()))
        reach = {block: min(self.size, self.copier.n_in_reach(row, block.depth * self.size))
                 for block, _ in window}
        if any(max(reach[block], block.n_local) < n for block, n in window):
            return  # a part has been overwritten
        for block, n in window:
            if block.n_local < n:
                self._drop_local(block)
                block.local = self.copier.local(row, block.depth * self.size, reach[block])
                block.n_local = reach[block]
                self.nbytes += taken(block.local)
        tip.anchor = True
        if self.prune:
            self._thin(tip)

    def _thin(self, tip) -> None:
        """Keep anchors before this one at distances that about double, and where the tree forks."""
        last, before = 0, [block for block in reversed(tip.path()[:-1]) if block.anchor]
        for block, farther in itertools.zip_longest(before, before[1:], fillvalue=self.root):
            distance, next_distance = tip.depth - block.depth, tip.depth - farther.depth
            if len(block.children) < 2 and last and next_distance <= 2 * last:
                block.anchor = False
                self._trim(block)
            else:
                last = distance

    def _trim(self, tip) -> None:
        """Drop local parts at the end of its path that no anchor needs."""
        for block, _ in self._window(tip.path()):
            if not self._needed(block):
                self._drop_local(block)

    def _needed(self, block) -> bool:
        """Whether the window of some anchor, itself or behind, has this block in it."""
        level, n = [block], self.reach
        while level and n > 0:
            if any(each.anchor for each in level):
                return True
            level, n = [child for each in level for child in each.children.values()], n - self.size
        return False

    def _drop_local(self, block) -> None:
        if block.local is not None:
            self.nbytes -= taken(block.local)
            block.local, block.n_local = None, 0

    # -- leaving -----------------------------------------------------------------------------------

    def release(self, tip: Block) -> None:
        """A request with this newest block has ended or waits again, and its row has been reset."""
        tip.users -= 1
        self._touch(tip)
        self._shrink()

    def _touch(self, tip) -> None:
        now = next(self._clock)
        for block in tip.path():
            block.used = now
        self._offer(tip)

    def _offer(self, block) -> None:
        """It may be evicted, should it be a leaf that nobody uses when its turn comes."""
        if block.parent and not block.children and not block.users:
            heapq.heappush(self._leaves, (block.used, next(self._serial), block))
        if len(self._leaves) > 2 * len(self.index) + 1000:  # most of them are of the past
            self._leaves = [entry for entry in self._leaves if self._evictable(*entry)]
            heapq.heapify(self._leaves)

    def _evictable(self, used, _, block) -> bool:
        current = block.used == used and self.index.get(block.key) is block
        return current and not block.children and not block.users

    def reclaim(self, n: int) -> None:
        """Free n pages that only the store holds, the least recently used: they go to the host."""
        idle = [block for page, block in self._pooled.items()
                if self.table.refs[page] == 1 and block not in self._wanted]
        for block in heapq.nsmallest(n, idle, key=lambda block: (block.used, -block.depth)):
            if block.copy is None:
                block.copy = self.copier.page(block.page)
                self.nbytes += taken(block.copy)
                self.stats.copied_out += 1
            self._leave_pool(block)
        self._shrink()

    def _leave_pool(self, block) -> None:
        page, block.page = block.page, -1
        if page >= 0:
            self._pooled.pop(page, None)
            self.cache.give_back(page)

    def _shrink(self) -> None:
        """Within the budget again, as far as nobody uses what is there."""
        if self.nbytes > self.budget:
            copied = [block for block in self._pooled.values() if block.copy is not None]
            for block in sorted(copied, key=lambda block: block.used):
                self.nbytes -= taken(block.copy)  # the pool has it, too
                block.copy = None
                if self.nbytes <= self.budget:
                    return
        while self.nbytes > self.budget and self._leaves:
            entry = heapq.heappop(self._leaves)
            if self._evictable(*entry):
                self._evict(entry[-1])

    def _evict(self, block) -> None:
        """Remove a leaf, and what before it no row can go on behind: all after the last anchor."""
        while True:
            parent = block.parent
            if self.disk:  # with what it needs of those before it, which is about to be dropped
                window = self._window(block.path()) if block.anchor else ()
                for each in [block, *(each for each, _ in window if each is not block)]:
                    self._to_disk(each)
            self._remove(block)
            if block.anchor:
                self._trim(parent)
            block = parent
            if not block.parent or block.children or block.users or block.anchor or not self.reach:
                self._offer(block)
                return

    def _remove(self, block) -> None:
        del block.parent.children[block.key], self.index[block.key]
        self._leave_pool(block)
        self._drop_local(block)
        self.nbytes -= block.nbytes
        self.stats.evicted += 1

    def forget(self, tip: Block) -> None:
        """What a request computed is not to be trusted (NaN): it goes where nobody else has it."""
        while tip.parent and not (tip.children or tip.users) and self.index.get(tip.key) is tip:
            if self.disk:
                self.disk.delete(tip.key)
            self._remove(tip)
            tip = tip.parent
        self._trim(tip)
        self._offer(tip)

    def _to_disk(self, block) -> None:
        in_pool = block.copy is None and block.page >= 0
        self.disk.write(block, self.copier.page(block.page) if in_pool else block.copy)

    def close(self) -> None:
        """Everything that is kept is on disk, too, if there is one."""
        blocks = self.index.values() if self.disk else ()
        for block in sorted(blocks, key=lambda block: (block.used, -block.depth)):
            self._to_disk(block)

    def recover(self) -> None:
        """After a fault, when the cache has been reset: of what is kept the tree is the truth."""
        self.index, self._pooled = {}, {}
        self._leaves, self._wanted = [], set()
        self.nbytes, level = 0, [self.root]
        while level:
            block = level.pop()
            for child in list(block.children.values()):
                if self.cache.pools and child.page < 0 and child.copy is None:  # had none yet
                    del block.children[child.key]
            level += block.children.values()
            block.users = 0
            if block.parent:
                self.index[block.key] = block
                self.nbytes += block.nbytes
                if block.page >= 0:
                    self._pooled[block.page] = block
                self._offer(block)
        self.table.rebuild(set(self._pooled))
        self._shrink()
