"""The prefix store with rows whose K and V are computed from the preceding tokens, so that restored
values can be checked."""
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.gpt_config import GPTConfig
from engine.prefix.blocks import OVERHEAD, BlockCopier
from engine.pages.cache import PagedKVCache
from engine.pages.page_table import OutOfPages
from engine.prefix.store import PrefixStore
from kv.plan import plan_kv
from kv.slots import RingStore

SIZE, LONGEST = 4, 60
SHAPES = {
    'global and local': dict(layer_pattern='LLG', window_size=6),
    'window of a block': dict(layer_pattern='LG', window_size=SIZE + 1),
    'window below a block': dict(layer_pattern='LG', window_size=2),
    'a long window': dict(layer_pattern='LG', window_size=19),
    'a window of one': dict(layer_pattern='LG', window_size=1),
    'all global': dict(layer_pattern='G'),
    'all local': dict(layer_pattern='L', window_size=6),
    'windows that differ': dict(layer_pattern='LLG', window_pattern='2,7,0'),
    'offset keys': dict(layer_pattern='LLG', window_size=6, key_offset=True),
    'offset keys, all global': dict(layer_pattern='G', key_offset=True),
    'tied': dict(layer_pattern='LG', window_size=6, kv_tied='all'),
    'latents': dict(layer_pattern='LG', window_size=6, kv_latent=4, rope_fraction_global=0.0),
}


def shrink(store, budget):
    store.budget = budget
    store._shrink()


class World:
    """A cache of 3 rows with a store, and the tokens fed to each row."""

    def __init__(self, shape='global and local', budget=10 ** 9, n_pages=45, kv_dtype='float32'):
        config = GPTConfig(n_layer=3, n_head=2, n_embd=8, n_kv_head=1, block_size=LONGEST,
                           vocab_size=64, pos_embedding='rope', **SHAPES[shape])
        self.cache = PagedKVCache(plan_kv(config), 3, LONGEST, n_pages, SIZE, kv_dtype=kv_dtype)
        self.store = PrefixStore(self.cache, budget)
        self.texts, self.last_blocks = [[], [], []], [None] * 3

    def kv(self, slot, tokens, first):
        """K (1, 1, n, 4) of the tokens from `first` on; it depends on all previous tokens."""
        hashes = [hashlib.blake2b(bytes(tokens[:p + 1]), digest_size=2).digest()
                  for p in range(first, len(tokens))]
        numbers = [int.from_bytes(x, 'big') + slot for x in hashes]
        numbers = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)
        return numbers * torch.tensor([1.0, -0.5, 0.25, 1e-3])

    def begin(self, row, tokens):
        """Restore as many of `tokens` to the row as possible and feed it the rest; return the
        number of restored tokens."""
        hit = self.store.match(tokens)
        stops = self.store.chunk_ends(hit, len(tokens))
        self.last_blocks[row] = self.store.restore(row, hit)
        found = self.cache.length(row)
        assert found == hit.length < len(tokens) and found <= hit.n_matched
        assert found // SIZE == len(hit.blocks) and (found % SIZE > 0) == (hit.part is not None)
        self.texts[row] = list(tokens[:found])
        self.check(row)
        for stop in [*stops, len(tokens)]:
            self.feed(row, tokens[self.cache.length(row):stop])
        return found

    def feed(self, row, tokens):
        if not tokens:
            return
        held, text = self.cache.length(row), self.texts[row] + list(tokens)
        self.cache.begin(len(tokens), rows=[row])
        for slot in self.cache.plan.slots:
            k, layer = self.kv(slot.index, text, held), self.cache.plan.layers[slot.owner]
            self.cache.append(layer, k, k if slot.tied else -k)
            if slot.offset:
                before = self.cache.previous_key(layer, k[..., :2])
                assert torch.equal(before, self.state(slot.index, text[:held]))
        self.cache.commit()
        self.texts[row] = text
        self.last_blocks[row] = self.store.extend(row, self.last_blocks[row], text)

    def state(self, slot, tokens):
        """The state (1, 1, 1, 2) of a row after these tokens."""
        last = self.kv(slot, tokens, len(tokens) - 1) if tokens else torch.zeros(1, 1, 1, 4)
        return last[..., :2]

    def end(self, row):
        self.store.end(row, self.last_blocks[row], self.texts[row])
        self.cache.reset([row])
        self.store.release(self.last_blocks[row])
        self.texts[row], self.last_blocks[row] = [], None

    def visit(self, text, slowly=False):
        """Begin a row with `text` and end it, token by token if `slowly`; return the number of
        restored tokens."""
        found = self.begin(0, text[:2] if slowly else text)
        for token in text[2:] if slowly else []:
            self.feed(0, [token])
        self.check(0)
        self.end(0)
        return found

    def check(self, row):
        """Check every key and value that a later token can see, and the one that just left the
        window."""
        text, held = self.texts[row], len(self.texts[row])
        for i, store in enumerate(self.cache.stores):
            k = self.kv(i, text, 0)
            expected = store.encode(k, k if store.tied else -k)
            ring = isinstance(store, RingStore)
            for p in range(max(0, held - store.window) if ring else 0, held):
                if ring:
                    at, offset = row, p % store.capacity
                else:
                    at, offset = self.cache.table.rows[row][p // SIZE], p % SIZE
                for x, wanted in zip(store.tensors, expected):
                    assert torch.equal(x[at, :, offset], wanted[0, :, p]), (i, p, held)

        for i, store in self.cache.last_keys.items():
            assert torch.equal(store.tensors[0][row], self.state(i, text)[0])

    def consistent(self):
        store, table = self.store, self.cache.table
        blocks = list(store.blocks)
        buffers = [x for b in blocks for x in (b.copy, b.local, b.state) if x is not None]
        assert store.nbytes == (sum(OVERHEAD + len(b.tokens) for b in blocks)
                                + sum(x.numel() for x in buffers))
        assert all(block in store.blocks for block in [*store._spare, *store._ends])
        pages = [b.page for b in blocks if b.page >= 0]
        assert table.pinned == set(pages) and len(table.pinned) == len(pages)
        assert store._by_page == {b.page: b for b in blocks if b.page >= 0}
        assert table.n_evictable == sum(table.refs[page] == 1 for page in table.pinned)
        assert table.refs == [sum(page in row for row in table.rows) + (page in table.pinned)
                              for page in range(table.n_pages)]
        for block in blocks:
            assert block.parent.children[block.tokens] is block and block.parent.n in (0, SIZE)
            assert block.children.order == sorted(block.children)
            assert block.users == sum(last is block for last in self.last_blocks)
            assert not self.cache.pools or block.page >= 0 or block.copy is not None
            assert all(0 < offset <= block.n for offset in block.anchors)
            assert all(store._resumable(block, offset) for offset in block.anchors)
            assert (block.local is None) == (block.n_local == 0)
            assert block.local is None or block in store._spare or store._has_anchor(block)
        if not any(self.texts):
            assert store.nbytes <= store.budget


TURN = st.tuples(st.sampled_from(['append', 'edit', 'fork', 'repeat', 'new']),
                 st.integers(0, 10 ** 6), st.integers(1, 25), st.integers(0, 9), st.booleans())


@pytest.mark.parametrize('shape', SHAPES)
@settings(max_examples=15)
@given(turns=st.lists(TURN, min_size=1, max_size=14),
       budget=st.sampled_from([0, 2000, 8000, 10 ** 9]),
       n_pages=st.sampled_from([15, 20, 45]),
       kv_dtype=st.sampled_from(['float32', 'int8', 'int4']))
def test_what_is_restored_is_what_was_there(shape, turns, budget, n_pages, kv_dtype):
    """Texts are continued, edited, forked and repeated; rows overlap; pages run out, leaves are
    evicted."""
    world, said = World(shape, budget, n_pages, kv_dtype), [[1, 2, 0, 1]]
    for kind, pick, n, more, stay in turns:
        old = said[pick % len(said)]
        new = [(pick >> i) % 3 for i in range(n)]
        text = {'append': old + new, 'edit': old[:pick % len(old)] + new,
                'fork': old[:len(old) // 2] + new[:5],
                'repeat': old, 'new': new}[kind][:LONGEST - 10]
        row = next((row for row in range(3) if not world.texts[row]), None)
        if row is None:
            row = pick % 3
            world.end(row)
        try:
            world.begin(row, text)
            for token in new[:more]:
                world.feed(row, [token])
        except OutOfPages:
            # otherwise its beginning could not be restored, and it is empty
            if world.last_blocks[row] is not None:
                world.end(row)
        else:
            world.check(row)
            said.append(list(world.texts[row]))
            if not stay:
                world.end(row)
        world.consistent()
    for row in range(3):
        if world.texts[row]:
            world.end(row)
    world.consistent()


COARSE = ('window below a block', 'a window of one', 'windows that differ', 'offset keys',
          'offset keys, all global')


@pytest.mark.parametrize('shape', [shape for shape in SHAPES if shape not in COARSE])
def test_a_text_edited_anywhere_is_recomputed_only_from_there(shape):
    world, text = World(shape), [i * i % 61 for i in range(60)]
    world.visit(text, slowly=True)
    for x in range(1, 56):
        assert world.visit(text[:60 - x] + [62]) == 60 - x


def test_where_requests_begin_often_an_anchor_stays():
    """The end of a system prompt, even under pressure and amid a block."""
    world, system = World(), [i * i % 61 for i in range(21)]
    found = [world.visit(system + [user] * 30) for user in (1, 2, 3, 4)]
    assert found == [0, 21, 21, 21]
    while world.store.blocks:
        kept = world.store.match(system + [5] * 30).length
        if len(world.store.blocks) > 6:
            assert kept == 21
        shrink(world.store, world.store.nbytes - 1)
        world.consistent()


@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
@pytest.mark.parametrize('on_host', [False, True])
def test_of_a_block_that_is_used_in_part_the_rest_is_not_taken_along(kv_dtype, on_host):
    """Attention reads whole pages, and weight 0 does not hide values that are not finite."""
    world, text = World('all global', kv_dtype=kv_dtype, n_pages=6), [i * i % 61 for i in range(12)]
    world.visit(text)
    if on_host:
        world.cache.table.ensure_free(6, 'a test')
    world.store.restore(0, world.store.match(text[:10] + [62]))
    page = world.cache.table.rows[0][-1]
    for pool in world.cache.pools:
        for x in pool.tensors[1::2]:
            assert x[page, :, :2].any() and not x[page, :, 2:].any()
    assert world.cache.table.refs[page] == 1 and page not in world.cache.table.pinned


def test_what_was_dropped_while_a_request_ran_is_copied_at_its_end():
    world, text = World(), [i * i % 61 for i in range(22)]
    world.begin(0, text)
    shrink(world.store, 0)
    assert all(block.local is None for block in world.store.blocks)
    world.store.budget = 10 ** 9
    world.end(0)
    assert world.store.match(text + [62]).length == 22
    world.visit(text + [62])


def test_of_unneeded_parts_those_of_the_least_recently_used_text_go_first():
    world, texts = World(), [[i] * 40 for i in (1, 2, 3)]
    for text in texts:
        world.visit(text)
    shrink(world.store, world.store.nbytes - 8 * world.store.copier.local_nbytes(SIZE))
    amid = [world.store.match(text[:18] + [9]).length for text in texts]
    assert amid[0] < 18 and amid[1:] == [18, 18]
    assert [world.store.match(text + [9]).length for text in texts] == [40, 40, 40]


def test_pages_leave_for_the_host_when_rows_need_them_and_come_back():
    world, texts = World(n_pages=12), [[i] * 30 for i in (1, 2, 3)]
    for text in texts:
        world.visit(text)
    assert sum(block.copy is not None for block in world.store.blocks) == 3 * 8 - 12
    assert world.begin(0, texts[0]) == 29
    world.check(0)
    world.consistent()


def test_the_least_recently_used_leaves_go_first():
    world = World('all global', budget=10 ** 9)
    for token in (1, 2, 3, 1):
        world.visit([token] * 21)
    world.store.budget = world.store.nbytes - 1
    world.visit([4])
    assert [len(world.store.match([token] * 21).blocks) for token in (1, 2, 3)] == [5, 4, 5]
    world.store.budget = 8 * (OVERHEAD + 4 * SIZE)
    world.visit([4])
    assert [len(world.store.match([token] * 21).blocks) for token in (1, 2, 3)] == [5, 0, 1]


def test_after_a_fault_the_tree_is_the_truth():
    world = World()
    world.begin(0, list(range(30)))
    world.begin(1, list(range(20)))
    world.cache.table.refs[5] += 3  # as may happen after an interruption
    world.store.nbytes, world.store._ends[world.store.root(b'')] = -7, None
    world.cache.reset()
    world.store.recover()
    world.texts, world.last_blocks = [[], [], []], [None] * 3
    world.consistent()
    assert world.begin(2, list(range(30))) == 28
    world.check(2)


@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
@pytest.mark.parametrize('kv_dtype', ['int8', 'int4', 'float32'])
def test_blocks_of_an_odd_number_of_bytes(kv_dtype, device):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=12, n_kv_head=1, block_size=30, vocab_size=8,
                       layer_pattern='LG', window_size=6, head_dim=10 if kv_dtype == 'int4' else 5)
    cache = PagedKVCache(plan_kv(config), 2, 30, 8, 3, kv_dtype=kv_dtype, device=device)
    for store in cache.stores:
        for x in store.tensors:
            x.copy_(torch.randint(1, 100, x.shape))
    copier = BlockCopier(cache)
    rings = [store for store in cache.stores if isinstance(store, RingStore)]
    copier.put_page(5, copier.page(2))
    # positions 4, 5 and 6, at 4, 5 and 0 of the ring
    copier.put_local(1, 7, 3, copier.local(0, 7, 3))
    assert copier.page(2).numel() == copier.page_nbytes
    assert copier.local(0, 7, 3).numel() == copier.local_nbytes(3)
    assert copier.page(2).device.type == 'cpu' and copier.page(2).is_pinned() == (device == 'cuda')
    assert all(torch.equal(x[5], x[2]) for store in cache.pools for x in store.tensors)
    assert all(torch.equal(x[1, :, [4, 5, 0]], x[0, :, [4, 5, 0]]) for store in rings
               for x in store.tensors)
    assert not any(torch.equal(x[1, :, 1:4], x[0, :, 1:4]) for store in rings
                   for x in store.tensors)
