"""How many prompt tokens a step computes beside decoding rows."""
import itertools
import random

import pytest
import torch

from config.gpt_config import GPTConfig
from engine import native
from engine.requests import pace as paces
from engine.engine import Engine
from engine.steps.native import FEW, NativeDecode
from engine.weights.quantize import quantize_weights
from engine.requests.pace import Pace
from engine.requests.params import SamplingParams
from tests.engine.test_scheduler import Simulation
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import model_of, prompt


DECODED = ('decoded', 0.01)


@pytest.mark.parametrize('slowdown, calls, expected', [
    # all tokens until both times are known
    (2.5, [], 256), (2.5, [DECODED], 256), (3.0, [('mixed', 10, True, 0.03)], 256),
    # 1.5 * 10 of 1 ms each would be 15, and this is the least
    (2.5, [DECODED, ('prefilled', 256, 0.256)], 16),
    # fast and slow devices
    *((4.0, [DECODED, ('prefilled', 100, 100 * per_token)], pytest.approx(n, abs=1))
      for per_token, n in ((1e-3, 30), (1e-2, 16), (1e-5, 256), (2e-4, 150))),
    # one slow step changes nothing
    (3.0, [*[DECODED] * 4, ('decoded', 5.0), *[('prefilled', 100, 0.02)] * 4,
           ('prefilled', 100, 9.0)], 100),
    # the decoding rows of a mixed pass are not counted as prompt
    (3.0, [('mixed', 10, True, 0.03), DECODED, ('mixed', 100, True, 0.03)], 100),
    (3.0, [('mixed', 100, False, 0.02), DECODED], 100)])
def test_tokens_beside_a_decoding_row_are_those_that_the_measured_times_allow(slowdown, calls,
                                                                              expected):
    pace = Pace(256, slowdown)
    for name, *args in calls:
        getattr(pace, name)(*args)
    assert pace.room() == expected


def test_each_prompt_has_as_much_of_a_step():
    pace = Pace(256, 3.0)
    pace.decoded(0.01)
    pace.prefilled(100, 0.1)
    assert [pace.room(n) for n in (0, 1, 4, 8, 99)] == [20, 20, 80, 160, 256]


def test_the_scheduler_counts_rows_that_compute_prompts():
    s, counted = Simulation(batch_size=4, max_seq_len=40, n_pages=40, prefill_chunk=8), []
    s.scheduler.pace = Pace(8, 2.0)
    s.scheduler.pace.room = lambda prompts: counted.append(prompts) or 2
    s.add(2, 9)
    s.step()
    s.add(9, 1)
    s.add(9, 1)
    s.step()
    s.step()
    assert counted == [0, 2]


def test_chunks_are_longer_while_no_row_decodes():
    s, computed = Simulation(batch_size=2, max_seq_len=60, n_pages=60, prefill_chunk=4), []
    s.scheduler.alone = 16
    request = s.add(40, 1)
    for step in range(5):
        if step == 1:
            s.add(1, 9)
        s.step()
        computed.append(request.num_computed_tokens)
    assert computed == [16, 31, 35, 39, 40]
    assert request.due == 1 + 40 // 4  # as if rows decoded


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
    s.scheduler.pace.room = lambda prompts: room
    s.add(1, 80)  # it decodes
    for _ in range(steps):
        s.step()
    return s


def sizes(s, n):
    return [sum(n for chunk in s.step().prefill for _, n in chunk) for _ in range(n)]


LATER = paces.LATER


@pytest.mark.parametrize('steps, room, prompts, found', [
    # what was left is taken once, and is never more than a step may compute
    (9, 6, (50,), [32, 18, 0]), (9, 6, (26, 24), [32, 18, 0]), (9, 4, (20, 30), [20, 4]),
    # a longer prompt takes small steps to its end
    (1 + LATER, 4, (4 * LATER + 6,), [4] * (LATER + 1) + [2, 0])])
def test_what_steps_compute_after_some_that_computed_no_prompt(steps, room, prompts, found):
    s = paced(room, steps=steps)
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
    s.scheduler.alone = 2
    first = s.add(20, 1)
    s.step()
    assert first.due == 1 + 20 // 2


def wide_model():
    return random_model(GPTConfig(**dict(FULL_STACK, n_embd=32, head_dim=16, mlp_hidden=48)),
                        torch.float32)


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
@pytest.mark.parametrize('prefix', [0, 10 ** 6])
def test_one_pass_for_prompts_and_decoding_rows_changes_no_text(prefix, recorded):
    """Against an engine that computes them one after the other, in float32. The asynchronous one
    does, too, because such a pass takes the tokens from the host."""
    model = wide_model()
    calls = recorded(NativeDecode, 'extend', lambda self, texts, *rest: list(map(len, texts)))
    prompts = [prompt(n, seed) for seed, n in enumerate((3, 40, 5, 1, 30, 4, 4))]
    texts = []
    for asynchronous in (True, False):
        engine = Engine(model, 3, 60, page_size=4, prefill_chunk=16, prefix_budget=prefix,
                        asynchronous=asynchronous)
        texts.append([c.tokens for c in engine.generate(prompts, SamplingParams(8, seed=3))])
        assert bool(calls) != asynchronous
    assert texts[0] == texts[1]
    assert any(len(lens) > 1 and max(lens) > 1 for lens in calls)  # both kinds in one pass
    assert max(map(max, calls)) == (4 if prefix else 16)  # or a ring wraps within it
    engine = Engine(model, 3, 60, slowdown=2.0)
    engine.generate([[1, 2, 3]], SamplingParams(1))
    assert len(engine.pace._per_token) == 1


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
@pytest.mark.parametrize('weights, fast, tokens', [
    ('auto', False, 0), ('auto', True, FEW + 1), ('int8', False, FEW + 1),
    ('int4', False, FEW + 1)])
def test_long_prompts_take_the_step_where_it_is_fast(weights, fast, tokens, recorded, monkeypatch):
    monkeypatch.setattr('engine.steps.native.suits_prompts', lambda dtype: fast)
    model = wide_model()
    quantize_weights(model, weights, int4_group=8)
    calls = recorded(NativeDecode, 'extend', lambda self, texts, *rest: sum(map(len, texts)))
    for prefix in (0, 10 ** 6):  # with the second, a step takes several short passes
        calls.clear()
        engine = Engine(model, 2, 60, page_size=4, prefix_budget=prefix)
        engine.generate([prompt(FEW + 1, 1)], SamplingParams(1))
        assert sum(calls) == (FEW + 1 if prefix else tokens)


def test_decoding_is_timed_where_every_step_has_prompts():
    engine = Engine(wide_model(), 3, 60, prefill_chunk=4, slowdown=1.5)
    for n in (2, 50):
        engine.submit(prompt(n, n), SamplingParams(8))
    for _ in range(1 + paces.FIRST):  # the first prompt, then its tokens beside the other prompt
        assert engine.pace.stale
        engine.step()
    assert not engine.pace.stale and engine.jobs[1].request.pending > 1
    for _ in range(paces.FRESH):
        engine.pace.mixed(4, True, 1.0)
    assert engine.pace.stale


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
def test_prompts_of_a_step_and_decoding_rows_share_a_pass(monkeypatch, recorded):
    """Prompts that began earlier, too, which have a pass of their own in torch. Chunks that do not
    end a prompt get no logits."""
    passes = recorded(NativeDecode, 'extend', lambda self, texts, rows, wanted: (
        sorted(map(len, texts)), wanted.count(False)))
    monkeypatch.setattr(Pace, 'room', lambda self, prompts: 6)
    engine = Engine(wide_model(), 4, 60, page_size=4, prefill_chunk=16, prefix_budget=10 ** 6,
                    slowdown=2.0)
    said = prompt(18, 1)
    engine.generate([said], SamplingParams(2))  # the next ones begin after it
    passes.clear()
    engine.generate([prompt(2, 0), said + prompt(3, 2), said + prompt(4, 3)], SamplingParams(8))
    assert any(len(lens) == 3 and lens[-2] > 1 for lens, _ in passes), passes
    assert any(without for _, without in passes)


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
def test_a_prompt_alone_is_torchs_and_one_beside_decoding_rows_is_not(recorded, monkeypatch):
    """From some tokens on torch may be faster, but not if decoding rows need their own pass."""
    monkeypatch.setattr('engine.steps.native.suits_prompts', lambda dtype: False)
    passes = recorded(NativeDecode, 'extend', lambda self, texts, *rest: max(map(len, texts)))
    shape = dict(FULL_STACK, n_embd=32, head_dim=16, mlp_hidden=48, block_size=512, window_size=99)
    engine = Engine(random_model(GPTConfig(**shape), torch.float32), 2, 400)
    engine.submit(prompt(60, 1), SamplingParams(20))
    engine.step()
    assert not passes
    engine.submit(prompt(98, 2), SamplingParams(2))
    engine.step()
    assert passes == [98]
