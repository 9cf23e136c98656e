"""How many prompt tokens a step computes beside decoding rows."""
import itertools
import random
import statistics

import pytest
import torch

from config.gpt_config import GPTConfig
from engine import native
from engine.requests import pace as paces
from engine.engine import Engine
from engine.steps.native import NativeDecode
from engine.requests.pace import Pace
from engine.requests.params import SamplingParams
from tests.engine.test_scheduler import Simulation, shape
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import alone, assert_same, model_of, prompt


def test_all_tokens_until_both_times_are_known_and_while_no_row_decodes():
    pace = Pace(256, 2.5)
    assert pace.room(1) == 256
    pace.decoded(0.01)
    assert pace.room(1) == 256
    pace.prefilled(256, 0.256)
    assert pace.room(0) == 256
    assert pace.room(1) == paces.LEAST == 16  # 1.5 * 10 of 1 ms each would be 15


def measured(slowdown, n, seconds):
    """A pace that knows the time of n prompt tokens, and that a decode pass takes 10 ms."""
    pace = Pace(256, slowdown)
    pace.decoded(0.01)
    pace.prefilled(n, seconds)
    return pace


def test_more_tokens_on_a_fast_device_and_few_on_a_slow_one():
    for per_token, expected in ((1e-3, 30), (1e-2, paces.LEAST), (1e-5, 256), (2e-4, 150)):
        assert measured(4.0, 100, 100 * per_token).room(1) == pytest.approx(expected, abs=1)
    # time is divided as rows are when more compute prompts than decode
    pace = measured(3.0, 100, 0.1)
    assert [pace.room(4, n) for n in (0, 1, 4, 8, 12)] == [20, 20, 20, 40, 60]


def test_the_scheduler_counts_rows_that_decode_and_that_compute_prompts():
    s, counted = Simulation(batch_size=4, max_seq_len=40, n_pages=40, prefill_chunk=8), []
    s.scheduler.pace = Pace(8, 2.0)
    s.scheduler.pace.room = lambda decoding, prompts: counted.append((decoding, prompts)) or 2
    s.add(2, 9)
    s.step()
    s.add(9, 1)
    s.add(9, 1)
    s.step()
    s.step()
    assert counted == [(0, 0), (1, 0), (1, 2)]


def test_one_slow_step_changes_nothing():
    pace = Pace(256, 3.0)
    for seconds in (0.01, 0.01, 0.01, 0.01, 5.0):
        pace.decoded(seconds)
    for seconds in (0.02, 0.02, 0.02, 0.02, 9.0):
        pace.prefilled(100, seconds)
    assert pace.room(1) == 100


def test_steps_take_at_most_what_they_may_on_a_device_with_a_cost_per_pass():
    """Simulated: a pass of n tokens takes 2 ms and 0.1 ms per token, a decode pass 8 ms."""
    pace, steps = Pace(256, 2.5), []
    for _ in range(60):
        n = pace.room(1)
        seconds = 2e-3 + 1e-4 * n
        pace.prefilled(n, seconds)
        pace.decoded(8e-3)
        steps.append((seconds + 8e-3) / 8e-3)
    assert statistics.mean(steps[20:]) == pytest.approx(2.5, rel=0.02)
    assert max(steps[20:]) < 2.55


@pytest.mark.parametrize('kind', ['full stack', 'vanilla'])
@pytest.mark.parametrize('prefix', [0, 10 ** 6])
def test_texts_do_not_depend_on_the_size_of_chunks(kind, prefix, monkeypatch):
    draw = random.Random(1)
    monkeypatch.setattr(Pace, 'room', lambda self, decoding, prompts: draw.randint(1, self.most))
    model, params = model_of(kind), SamplingParams(8, seed=3)
    engine = Engine(model, 3, 60, page_size=4, prefill_chunk=16, prefix_budget=prefix, slowdown=2.0)
    prompts = [prompt(n, seed) for seed, n in enumerate((40, 3, 17, 1, 30, 40))]
    for ids, found in zip(prompts, engine.generate(prompts, params), strict=True):
        assert_same(found, alone(model, ids, params))
    assert engine.pace._decode and engine.pace._per_token


def test_a_paced_step_has_one_pass_that_ends_where_rows_can_resume(monkeypatch):
    """Without a pace, a step goes on after such a position in a second pass."""
    passes, prompts = {}, [prompt(50, 1)]
    for slowdown in (0.0, 2.0):
        engine = Engine(model_of('full stack'), 1, 60, page_size=4, prefill_chunk=16,
                        prefix_budget=10 ** 6, slowdown=slowdown)
        schedule, found = engine.scheduler.schedule, passes.setdefault(slowdown, [])

        def noted(schedule=schedule, found=found):
            work = schedule()
            found += [[n for [(_, n)] in work.prefill]] * bool(work.prefill)
            return work
        monkeypatch.setattr(engine.scheduler, 'schedule', noted)
        engine.generate(prompts, SamplingParams(1))
    assert max(map(len, passes[0.0])) > 1 == max(map(len, passes[2.0]))
    ends = [list(itertools.accumulate(itertools.chain(*each))) for each in passes.values()]
    assert ends[0] == ends[1] and ends[0][-1] == 50


def test_a_short_prompt_passes_a_long_one():
    s = Simulation(batch_size=3, max_seq_len=40, n_pages=40, prefill_chunk=4)
    s.add(24, 2)
    assert shape(s.step()) == ([[(0, 4)]], [])
    s.add(3, 2)
    assert shape(s.step()) == ([[(0, 1)], [(1, 3)]], [])  # what is left goes to the long one
    assert shape(s.step()) == ([[(0, 4)]], [1])


def test_a_long_prompt_does_not_wait_forever():
    """Short ones that come in every step, and could fill all steps."""
    s = Simulation(batch_size=3, max_seq_len=40, n_pages=60, prefill_chunk=4)
    long, steps = s.add(24, 1), 0
    while long.number not in s.ended:
        s.add(4, 1)
        s.step()
        steps += 1
        assert steps < 30
    assert 6 < steps  # it was passed
    s.run()


def paced(room=4, chunk=32, steps=9):
    s = Simulation(batch_size=4, max_seq_len=200, n_pages=150, prefill_chunk=chunk)
    s.scheduler.pace = Pace(chunk, 2.0)
    s.scheduler.pace.room = lambda decoding, prompts: room if decoding else chunk
    s.add(1, 80)  # it decodes
    for _ in range(steps):
        s.step()
    return s


def sizes(s, n):
    return [sum(n for chunk in s.step().prefill for _, n in chunk) for _ in range(n)]


def test_a_prompt_ends_at_once_by_what_steps_before_left():
    s = paced()
    assert s.scheduler.pace.saved == 4 * 8
    s.add(30, 9)
    assert sizes(s, 1) == [30]
    s.add(12, 1)
    assert sizes(s, 3) == [4, 8, 0]  # 6 are left of what was saved
    assert sizes(s, paces.LATER) == [0] * paces.LATER
    assert s.scheduler.pace.saved == 4 * paces.LATER  # no more
    s.add(10, 1)
    s.add(9, 1)
    assert sizes(s, 1) == [19]  # both


def test_a_longer_prompt_takes_small_steps_to_its_end():
    s = paced(steps=1 + paces.LATER)
    s.add(4 * paces.LATER + 6, 1)
    assert sizes(s, paces.LATER + 3) == [4] * (paces.LATER + 1) + [2, 0]


def test_what_was_left_is_taken_once_and_is_never_more_than_a_step_may_compute():
    for room, prompts, found in ((6, (50,), [32, 18, 0]), (6, (26, 24), [32, 18, 0]),
                                 (4, (20, 30), [20, 4])):
        s = paced(room)
        for n in prompts:
            s.add(n, 1)
        assert sizes(s, len(found)) == found
    # nothing is saved while no row decodes
    assert [paced(steps=n).scheduler.pace.saved for n in (1, 2)] == [0, 4]


@pytest.mark.parametrize('seed', range(5))
def test_steps_compute_no_more_than_their_rooms_and_those_of_a_few_before(seed):
    s, draw, found = paced(), random.Random(seed), []
    for _ in range(70):
        if draw.random() < 0.2 and len(s.scheduler.running) < 3:
            s.add(draw.randint(2, 50), 1)
        found += sizes(s, 1)
    assert max(found) > 4
    for start, end in itertools.combinations(range(len(found)), 2):
        assert sum(found[start:end]) <= 4 * (end - start + paces.LATER)


def test_a_prompt_is_due_later_if_steps_compute_less():
    s = Simulation(batch_size=3, max_seq_len=40, n_pages=40, prefill_chunk=8)
    s.scheduler.pace = Pace(8, 2.0)
    s.scheduler.pace.room = lambda decoding, prompts: 2
    first = s.add(20, 1)
    s.step()
    assert first.due == 1 + 20 // 2
    late = s.add(8, 1)
    for _ in range(4):
        s.step()
    assert late.number in s.ended and first.number not in s.ended


def wide_model():
    return random_model(GPTConfig(**dict(FULL_STACK, n_embd=32, head_dim=16, mlp_hidden=48)),
                        torch.float32)


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
@pytest.mark.parametrize('prefix', [0, 10 ** 6])
def test_one_pass_for_prompts_and_decoding_rows_changes_no_text(prefix, recorded):
    """Against an engine that computes them one after the other, in float32."""
    model = wide_model()
    calls = recorded(NativeDecode, 'extend', lambda self, texts, *rest: list(map(len, texts)))
    prompts = [prompt(n, seed) for seed, n in enumerate((3, 40, 5, 1, 30, 4, 4))]
    texts = {}
    for most in (0, 64):
        engine = Engine(model, 3, 60, page_size=4, prefill_chunk=16, prefix_budget=prefix)
        engine.fast_decode.most_tokens = most
        texts[most] = [c.tokens for c in engine.generate(prompts, SamplingParams(8, seed=3))]
        assert bool(calls) == bool(most)
    assert texts[0] == texts[64]
    assert any(len(lens) > 1 and max(lens) > 1 for lens in calls)  # both kinds in one pass
    assert max(map(max, calls)) <= 5 == model.plan.slots[0].window
    engine = Engine(model, 3, 60, slowdown=2.0)
    engine.generate([[1, 2, 3]], SamplingParams(1))
    assert len(engine.pace._per_token) == 1


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
def test_prompts_of_a_step_and_decoding_rows_share_a_pass(monkeypatch, recorded):
    """Prompts that began earlier, too, which have a pass of their own in torch. Chunks that do not
    end a prompt get no logits."""
    passes = recorded(NativeDecode, 'extend', lambda self, texts, rows, wanted: (
        sorted(map(len, texts)), wanted.count(False)))
    monkeypatch.setattr(Pace, 'room', lambda self, decoding, prompts: 6)
    engine = Engine(wide_model(), 4, 60, page_size=4, prefill_chunk=16, prefix_budget=10 ** 6,
                    slowdown=2.0)
    said = prompt(18, 1)
    engine.generate([said], SamplingParams(2))  # the next ones begin after it
    passes.clear()
    engine.generate([prompt(2, 0), said + prompt(3, 2), said + prompt(4, 3)], SamplingParams(8))
    assert any(len(lens) == 3 and lens[-2] > 1 for lens, _ in passes), passes
    assert any(without for _, without in passes)


def test_the_decoding_rows_of_a_mixed_pass_are_not_counted_as_prompt():
    pace = Pace(256, 3.0)
    pace.mixed(10, True, 0.03)  # the time of decoding is not known yet
    assert pace.room(1) == 256
    pace.decoded(0.01)
    pace.mixed(100, True, 0.03)
    assert pace.room(1) == 100
    pace = Pace(256, 3.0)
    pace.mixed(100, False, 0.02)
    pace.decoded(0.01)
    assert pace.room(1) == 100
