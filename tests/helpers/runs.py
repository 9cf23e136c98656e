"""A cache and the texts of its rows: whatever is done to the cache, every step must equal a full
forward of each row's text."""
import torch

from engine.pages.cache import PagedKVCache
from tests.helpers.models import VOCAB, full_logits, max_gap, random_model

# a token with a NaN embedding: its row is NaN from then on. No other row may become NaN, nor may a
# later text in the same row
BAD = VOCAB - 1


class Run:
    """`text[r]`: the tokens that row r should contain. Rows with BAD are not compared."""

    def __init__(self, config, batch, room, kv_dtype='auto', dtype=torch.float64, bound=1e-9,
                 **paging):
        self.model = random_model(config, dtype)
        with torch.no_grad():
            self.model.transformer.wte.weight[BAD] = torch.nan
        kind = {'cache_class': PagedKVCache} if 'n_pages' in paging else {}
        self.cache = self.model.new_cache(batch, room, kv_dtype, **kind | paging)
        self.text, self.room, self.bound = [[] for _ in range(batch)], room, bound
        self.generator = torch.Generator().manual_seed(1)

    def step(self, lens, rows=None, bad=(), t=None):
        """Append lens[b] random tokens of t to each of the rows (all if None); in rows of `bad` the
        first one is BAD."""
        rows_ = range(len(self.text)) if rows is None else rows
        idx = torch.randint(BAD, (len(lens), t or max(*lens, 1)), generator=self.generator)
        for b, row in enumerate(rows_):
            if row in bad:
                idx[b, 0] = BAD
        with torch.no_grad():
            logits = self.model(idx, cache=self.cache, lens=lens, rows=rows, all_logits=True)[0]
        for b, row in enumerate(rows_):
            self.text[row] += idx[b, :lens[b]].tolist()
        assert self.cache.lengths.tolist() == [len(text) for text in self.text]
        self.compare(logits, lens, rows_)

    def compare(self, logits, lens, rows):
        compared = [(b, self.text[row], n) for b, (row, n) in enumerate(zip(rows, lens)) if n
                    and BAD not in self.text[row]]
        if not compared:
            return
        longest = max(len(text) for _, text, _ in compared)
        full = full_logits(self.model,
                           torch.tensor([text + [0] * (longest - len(text)) for _, text,
                                         _ in compared]))
        for (b, text, n), alone in zip(compared, full):
            assert max_gap(logits[b, :n, :BAD], alone[len(text) - n:len(text), :BAD]) < self.bound

    def reset(self, *rows):
        self.cache.reset(list(rows))
        for row in rows:
            self.text[row] = []

    def move(self, source, target):
        self.cache.move(source, target)
        if source != target:
            self.text[target], self.text[source] = self.text[source], []

    def anything(self, draw):
        """Steps of any shape over any rows in any order, some of them NaN, with resets and moves in
        between. draw: a random.Random."""
        numbers = range(len(self.text))
        for _ in range(draw.randint(4, 10)):
            rows = draw.choice([None, draw.sample(numbers, draw.randint(1, len(numbers)))])
            t = draw.choice([1, 1, 1, 2, 3, 7, 13])
            lens = [min(t, self.room - len(self.text[r])) for r in rows or numbers]
            if draw.random() < 0.5:
                lens = [draw.choice([0, n, draw.randint(0, n)]) for n in lens]
            self.step(lens, rows, [r for r in numbers if draw.random() < 0.1], t)
            change = draw.choice(['none', 'none', 'reset', 'move'])
            if change == 'reset':
                self.reset(*draw.sample(numbers, draw.randint(1, len(numbers))))
            elif change == 'move' and isinstance(self.cache, PagedKVCache):
                self.move(draw.choice(numbers), draw.choice(numbers))
