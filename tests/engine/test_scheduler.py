"""The scheduler without a model, and requests that come and go at random."""
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.pages.cache import PagedKVCache
from engine.requests.params import SamplingParams
from engine.requests.request import Request
from engine.requests.scheduler import Scheduler
from kv.plan import plan_kv

PLAN = plan_kv(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=32, vocab_size=8))


class Simulation:
    """Scheduler and cache, and what the engine does with them: feed tokens, sample new ones,
    finish."""

    def __init__(self, batch_size=3, max_seq_len=20, n_pages=10, page_size=4, prefill_chunk=8):
        self.cache = PagedKVCache(PLAN, batch_size, max_seq_len, n_pages, page_size)
        self.scheduler = Scheduler(self.cache, prefill_chunk)
        self.requests, self.ended = [], set()

    def add(self, n_prompt, max_new_tokens, client=''):
        number = len(self.requests)
        self.scheduler.check(n_prompt, max_new_tokens)
        request = Request(number, [1000 * number + i for i in range(n_prompt)],
                          SamplingParams(max_new_tokens=max_new_tokens), client)
        self.requests.append(request)
        self.scheduler.waiting.append(request)
        return request

    def finish(self, request):
        self.scheduler.finish(request)
        self.ended.add(request.number)

    @property
    def unfinished(self):
        return [r for r in self.requests if r.number not in self.ended]

    def step(self):
        work = self.scheduler.schedule()
        self.feed(work.prefill)
        self.feed([(r, 1) for r in work.decode])
        return work

    def feed(self, parts):
        for request, n in parts:
            version = self.cache.table.version
            assert len(request.next_tokens(n)) == n >= 1 and request.row >= 0
            self.cache.begin(n, rows=[request.row])
            self.cache.commit()
            assert self.cache.table.version == version  # its pages were reserved
            request.num_computed_tokens += n
        for request, _ in parts:
            if request.pending == 0:
                request.tokens.append(-len(request.tokens) - 1)
                if len(request.tokens) == request.params.max_new_tokens:
                    self.finish(request)

    def run(self):
        """Run until all have finished. The oldest request gets a token in every step, so there
        cannot be more steps than tokens."""
        most = sum(r.length + r.params.max_new_tokens for r in self.requests)
        for n in range(most + 1):
            if not self.unfinished:
                return n
            self.step()
            self.check_rows()
        raise AssertionError('some request never finishes')

    def check_rows(self):
        scheduler, table = self.scheduler, self.cache.table
        assert [r.row for r in scheduler.running] == list(range(len(scheduler.running)))
        assert all(r.row == -1 and r.num_computed_tokens == 0 for r in scheduler.waiting)
        n_running = len(scheduler.running)
        assert not any(self.cache.lengths[n_running:]) and not any(table.rows[n_running:])
        for r in scheduler.running:
            assert self.cache.length(r.row) == r.num_computed_tokens
            # the latest token is not cached yet; no page is taken long before it is needed
            needed = [table.pages_for(r.length), table.pages_for(r.length - 1)]
            assert len(table.rows[r.row]) in needed
        # first come, first served: waiting requests arrived after all running ones
        waiting = [r.number for r in scheduler.waiting]
        running = [r.number for r in scheduler.running]
        assert waiting == sorted(waiting)
        assert max(running, default=-1) < min(waiting, default=10 ** 9)
        assert sorted(waiting + running) == [r.number for r in self.unfinished]


class Requests(RuleBasedStateMachine):
    @initialize(rows=st.integers(1, 4), max_seq_len=st.integers(1, 30), n_pages=st.integers(1, 12),
                page_size=st.sampled_from([1, 2, 5]), prefill_chunk=st.integers(1, 12))
    def start(self, rows, max_seq_len, n_pages, page_size, prefill_chunk):
        self.s = Simulation(rows, max_seq_len, n_pages, page_size, prefill_chunk)

    @rule(n_prompt=st.integers(1, 20), max_new_tokens=st.integers(1, 12))
    def add(self, n_prompt, max_new_tokens):
        """`check` refuses exactly what does not fit by itself: the last token is sampled but never
        cached."""
        cache, positions = self.s.cache, n_prompt + max_new_tokens - 1
        if positions <= min(cache.max_seq_len, cache.table.n_pages * cache.table.page_size):
            self.s.add(n_prompt, max_new_tokens)
        else:
            message = f'{n_prompt} prompt .* max_new_tokens={max_new_tokens} take {positions}'
            with pytest.raises(UserError, match=message):
                self.s.add(n_prompt, max_new_tokens)

    @rule()
    def step(self):
        s, before = self.s, {r: len(r.tokens) for r in self.s.scheduler.running}
        decoding = [r for r in before if r.decoding]
        needed = sum(s.cache.table.pages_needed(r.row, r.length) for r in decoding)
        n_free, preempted_before = s.cache.table.n_free, {r: r.preempted for r in s.requests}
        work = s.step()
        # preemption: only if pages run out, the latest first, and the oldest always continues
        preempted = [r for r in s.requests if r.preempted > preempted_before[r]]
        assert bool(preempted) == (needed > n_free)
        assert all(r in before and r.number > max(kept.number for kept in before
                                                  if kept not in preempted) for r in preempted)
        # one token for each decoding request, whatever is prefilled in the same step
        assert {r.number for r in work.decode} == {r.number for r in decoding if r not in preempted}
        assert all(len(r.tokens) >= before[r] + 1 for r in work.decode)
        # prefill: at most a chunk, in the order of arrival
        assert all(n >= 1 for _, n in work.prefill)
        assert sum(n for _, n in work.prefill) <= s.scheduler.prefill_chunk
        taken = [r for r, _ in work.prefill]
        assert len(set(taken + work.decode)) == len(taken + work.decode)
        left_out = [r.number for r in s.scheduler.running if r not in taken and not r.decoding]
        assert max((r.number for r in taken), default=-1) < min(left_out, default=10 ** 9)
        if before or s.unfinished or work.prefill:  # there is always progress
            assert taken or work.decode

    @precondition(lambda self: self.s.unfinished)
    @rule(data=st.data())
    def finish(self, data):
        """End a running or waiting request, as after a stop text or a cancellation."""
        self.s.finish(data.draw(st.sampled_from(self.s.unfinished)))

    @rule()
    def start_over(self):
        """Do what the engine does after an interrupted step: all running requests wait again, and
        keep their sampled tokens."""
        tokens = {r: list(r.tokens) for r in self.s.unfinished}
        for request in sorted(self.s.scheduler.running, key=lambda r: -r.number):
            self.s.scheduler.preempt(request)
        assert all(r.tokens == kept for r, kept in tokens.items())

    @invariant()
    def rows_and_pages(self):
        if hasattr(self, 's'):
            self.s.check_rows()

    def teardown(self):
        if hasattr(self, 's'):
            self.s.run()
            assert self.s.cache.table.n_free == self.s.cache.table.n_pages
            assert not self.s.scheduler.running and not self.s.scheduler.waiting


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize('sizes, requests, n_running', [
    # one page is left free: otherwise the first request's next token would preempt the second
    (dict(batch_size=2, max_seq_len=16, n_pages=4), [(8, 5), (8, 2)], 1),
    (dict(batch_size=2, max_seq_len=16, n_pages=5), [(8, 5), (8, 2)], 2),
    # but not if no row can need one
    (dict(batch_size=3, max_seq_len=8, n_pages=6), [(5, 4), (8, 1), (5, 4)], 3)])
def test_admission_keeps_a_page_spare_if_a_running_row_may_need_it(sizes, requests, n_running):
    s = Simulation(page_size=4, prefill_chunk=100, **sizes)
    for n_prompt, max_new_tokens in requests:
        s.add(n_prompt, max_new_tokens)
    s.scheduler.schedule()
    assert len(s.scheduler.running) == n_running


def test_clients_start_in_turn():
    """Requests of one client that came first do not keep another's waiting; what was preempted goes
    before all."""
    s = Simulation(batch_size=3, n_pages=20)
    first = [s.add(2, 9, 'a') for _ in range(5)]
    second = [s.add(2, 9, 'b') for _ in range(2)]
    s.step()
    assert s.scheduler.running == [first[0], second[0], first[1]]
    s.finish(first[1])
    s.step()
    assert second[1].row < 0 and first[2] in s.scheduler.running
    s.scheduler.preempt(second[0])
    s.step()
    assert second[0] in s.scheduler.running
