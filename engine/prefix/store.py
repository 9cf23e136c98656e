"""Prefix cache: a radix tree of token blocks with K and V, reused by requests that share a prefix.

    root ── "To be, o" ── "r not to" ── " be"    a block is a page of tokens, or less in a leaf;
                      └── "r else w"             a key of its parent's `children`

A request reuses its tokens up to the first one that differs, wherever in a block that is. The
global K/V of a block is a page. Local slots are rings, which cannot be rewound: to resume at some
position takes the W positions before it, which are copied while they are in the ring, as *local
parts* of blocks. (With key_offset it also takes the state of a row that stopped there, which is
kept at the ends of blocks.) *Anchors* are the positions where a request ended or began.
`engine/prefix/tree.py` decides what is kept.

Sources: prefix trees with LRU leaves (RadixAttention, Zheng et al. 2023), paged caches with hashed
blocks (vLLM), caching between turns (Character.AI, "Optimizing AI Inference", 2024).
"""
from array import array

from engine.pages.page_table import OutOfPages
from engine.prefix.blocks import Block, Hit, allocated_nbytes
from engine.prefix.tree import BlockTree


class PrefixStore(BlockTree):
    """How requests use the tree: `match` and `restore` at their beginning, `extend` while they run,
    `end` and `release` at their end."""

    def match(self, tokens: list[int], salt: bytes = b'') -> Hit:
        """Find the longest reusable prefix of `tokens[:-1]`: the last one's logits are needed.

        salt: only what requests with the same salt computed is found (as vLLM's cache_salt)."""
        root = self.root(salt)
        path = self._walk(root, tokens[:-1])
        n_matched = sum(n for _, n in path)
        while path and not self._resumable(*path[-1]):
            path.pop()
        length = sum(n for _, n in path)
        part = path.pop()[0] if length % self.size else None
        return Hit(root, [block for block, _ in path], part, length, n_matched)

    def _walk(self, block, tokens) -> list[tuple[Block, int]]:
        """[(block, leading tokens in common)] below `block`; only the last may have fewer than a
        page."""
        path = []
        for piece in self._pieces(tokens):
            child = block.children.get(piece) if len(piece) == 4 * self.size else None
            if child is None:
                path += self._nearest(block, piece)
                break
            path.append((child, self.size))
            block = child
        return path

    def _nearest(self, parent, piece) -> list[tuple[Block, int]]:
        """[(child with the most leading tokens of `piece`, how many)], if possible one that a row
        can resume in; [] = there is none."""
        neighbours = parent.children.nearest(piece)
        usable = [(n, block) for n, block in neighbours if self._resumable(block, n)]
        return [(block, n) for n, block in (usable or neighbours)[:1]]

    def _pieces(self, tokens) -> list[bytes]:
        """The tokens block by block, as int32 bytes; the last piece may be shorter."""
        data, width = array('i', tokens).tobytes(), 4 * self.size
        return [data[i:i + width] for i in range(0, len(data), width)]

    def chunk_ends(self, hit: Hit, length: int) -> list[int]:
        """Positions where prefill chunks of a request of `length` tokens should end, so that rows
        can resume there, or between them: a window apart, or if rows resume only at ends of
        blocks, where it leaves the tree, and its last boundary."""
        last = length // self.size * self.size
        if not self.anywhere:
            ends = [hit.n_matched // self.size * self.size, last]
        elif not self.lookback:
            ends = []
        else:
            step = self.copier.window // self.size * self.size
            ends = range(hit.length // self.size * self.size + step, last + 1, step)
        return sorted({end for end in ends if hit.length < end <= length})

    def shareable(self, chunk_ends: list[int], n: int) -> int:
        """Of the first n tokens of a prompt with these chunk ends, how many a request with the same
        beginning can reuse once they are computed."""
        if self.anywhere:
            return n // self.size * self.size
        return max((end for end in chunk_ends if end <= n), default=0)

    def restore(self, row: int, hit: Hit) -> Block:
        """Fill an empty row with the tokens of the hit. Returns its last complete block, or the
        root. Raises OutOfPages, before the row has tokens, if there is no room for host pages."""
        base = hit.blocks[-1] if hit.blocks else hit.root
        last, offset = hit.part or base, hit.length - (hit.part or base).start
        # Parts may overlap in the ring: the newest is written last. Making room may drop them.
        for block, _, end in reversed(list(self._window(last, offset))):
            self.copier.put_local(row, block.end, block.n_local, block.local, block.n - end)
        if offset:
            last.anchors[offset] = last.anchors.get(offset, 0) + 1
        self._touch(last)
        last.users += 1  # so that making room does not evict it
        try:
            pages = self._to_pool(hit) if self.cache.pools else []
        finally:
            last.users -= 1
        base.users += 1
        self.cache.adopt(row, pages, hit.length)
        if last.state is not None:
            self.copier.put_state(row, last.state)
        if hit.part and pages:
            self.cache.cut_page(pages[-1], offset)  # what follows is another text's
            self.table.unpin(pages[-1])
        self._shrink()
        return base

    def _to_pool(self, hit) -> list[int]:
        """Copy pages on the host to the pool. Returns the pages of the blocks, and for a part of a
        block a page with a copy, still pinned."""
        missing = [block for block in hit.blocks if block.page < 0]
        n = len(missing) + (1 if hit.part else 0)
        if n > self.n_available(hit.blocks):
            raise OutOfPages(f'{n} pages of {self.size} positions are to be restored: '
                             f'{self.n_available(hit.blocks)} of {self.table.n_pages} are free')
        self._protected = set(hit.blocks)
        if n > self.table.n_free:
            self.reclaim(n - self.table.n_free)
        self._protected = set()
        for block in missing:
            self._set_page(block, self._page_from(block))
        pages = [block.page for block in hit.blocks]
        return pages + [self._page_from(hit.part)] if hit.part else pages

    def _page_from(self, block) -> int:
        """A new page, pinned, with the contents of a block."""
        page = self.table.take_pinned()
        if block.page < 0:
            self.copier.put_page(page, block.copy)
        else:
            self.cache.copy_page(block.page, page)
        return page

    def n_available(self, blocks: list[Block]) -> int:
        """Number of pages that can be taken, excluding those of `blocks`."""
        evictable = sum(block.page >= 0 and self.table.refs[block.page] == 1 for block in blocks)
        return self.table.n_available - evictable

    def extend(self, row: int, last_block: Block, tokens: list[int]) -> Block:
        """Add the complete blocks of a row with these `tokens` after `last_block`. Returns the new
        last block. Call it when the row has completed a block, while the block is in its rings."""
        length, first = self.cache.length(row), last_block.depth
        for piece in self._pieces(tokens[first * self.size:length // self.size * self.size]):
            block = last_block.children.get(piece) or Block(piece, last_block)
            self._fill(row, block)
            block.users += 1
            last_block.users -= 1
            last_block = block
        if length == last_block.end:
            self._add_state(row, last_block)
        self._touch(last_block)
        self._shrink()
        return last_block

    def end(self, row: int, last_block: Block, tokens: list[int]) -> None:
        """The request in `row` ends or is preempted: also keep its tokens after the last complete
        block, so that the next request can resume exactly there. `row` is reset after this."""
        n = self.cache.length(row) - last_block.end
        if n:
            [piece] = self._pieces(tokens[last_block.end:last_block.end + n])
            neighbours = last_block.children.nearest(piece)
            longer = [block for common, block in neighbours
                      if common == n and self._resumable(block, n)]
            if longer:
                last_block = longer[0]
            else:  # a block of the same tokens may lack the local part or state that it once had
                last_block = last_block.children.get(piece) or Block(piece, last_block)
                self._fill(row, last_block)
                self._add_state(row, last_block)
        offset = n or last_block.n
        for block, *_ in self._window(last_block, offset):
            self._copy_local(row, block)  # what was dropped in the meantime
        if offset and self._resumable(last_block, offset):
            last_block.anchors.setdefault(offset, 0)
            self._ends[last_block] = None
            self._ends.move_to_end(last_block)
        self._touch(last_block)

    def _fill(self, row, block) -> None:
        """Give a block what it lacks and the row has, and insert it if it is new."""
        if block.parent.children.get(block.tokens) is not block:
            self._insert(block)
        if block.page < 0 and self.cache.pools:
            page = self.table.rows[row][block.depth - 1]
            self.table.pin(page)
            self._set_page(block, page)
        self._copy_local(row, block)
        self._take_over(block)

    def _take_over(self, block) -> None:
        """Move anchors of its siblings to it where both have the same tokens, as the siblings will
        be evicted first, and remove those that it makes superfluous."""
        for n, other in block.parent.children.nearest(block.tokens):
            if other is block:
                continue
            for offset in list(other.anchors):
                if offset <= n and self._resumable(block, offset):
                    self._move_anchor(other, block, offset)
            if other.n == n and not (other.anchors or other.users) and self._resumable(block, n):
                self._remove(other)

    def _copy_local(self, row, block) -> None:
        """Copy its local part from the rings of a row, if they have more of it."""
        n = min(block.n, self.copier.n_in_ring(row, block.end)) if self.lookback else 0
        if n > block.n_local:
            self._set_local(block, self.copier.local(row, block.end, n), n)

    def _add_state(self, row, block) -> None:
        if self.copier.state_nbytes and block.state is None and block.depth:
            block.state = self.copier.state(row)
            self.nbytes += allocated_nbytes(block.state)

    def release(self, last_block: Block) -> None:
        """A request with this last block has ended or was preempted, and its row has been reset."""
        last_block.users -= 1
        self._shrink()
