"""Prompts in chunks, beside rows that decode."""
import itertools

import pytest
import torch

from common.gpt_config import GPTConfig
from engine import native
from engine.engine import Engine
from engine.steps.native import FEW, NativeDecode
from engine.weights.quantize import quantize_weights
from engine.requests.params import SamplingParams
from tests.engine.test_scheduler import Simulation
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import model_of, prompt


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


def test_a_chunk_ends_where_later_requests_can_resume(monkeypatch):
    engine = Engine(model_of('full stack'), 1, 60, page_size=4, prefill_chunk=16,
                    prefix_budget=10 ** 6)
    schedule, chunks = engine.scheduler.schedule, []

    def noted():
        work = schedule()
        chunks.extend(work.prefill)
        return work
    monkeypatch.setattr(engine.scheduler, 'schedule', noted)
    index = engine.submit(prompt(50, 1), SamplingParams(1))
    engine.step()
    stops = engine.requests[index].chunk_ends
    while engine.n_unfinished:
        engine.step()
    ends = list(itertools.accumulate(n for _, n in chunks))
    assert stops and ends[-1] == 50 and {end for end in stops if end < 50} <= set(ends)
    assert max(n for _, n in chunks) <= 16


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


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
@pytest.mark.parametrize('weights, fast, tokens', [
    ('auto', False, 0), ('auto', True, FEW + 1), ('int8', False, FEW + 1),
    ('int4', False, FEW + 1)])
def test_long_prompts_take_the_step_where_it_is_fast(weights, fast, tokens, recorded, monkeypatch):
    monkeypatch.setattr('engine.steps.native.suits_prompts', lambda dtype: fast)
    model = wide_model()
    quantize_weights(model, weights, int4_group=8)
    calls = recorded(NativeDecode, 'extend', lambda self, texts, *rest: sum(map(len, texts)))
    for prefix in (0, 10 ** 6):  # with the second, in short chunks, and a decode step at the end
        calls.clear()
        engine = Engine(model, 2, 60, page_size=4, prefix_budget=prefix)
        engine.generate([prompt(FEW + 1, 1)], SamplingParams(1))
        assert sum(calls) == (FEW if prefix else tokens)


@pytest.mark.skipif(native.library() is None, reason='no compiler here')
def test_prompts_of_a_step_and_decoding_rows_share_a_pass(recorded):
    """Prompts that began earlier, too, which have a pass of their own in torch. Chunks that do not
    end a prompt get no logits."""
    passes = recorded(NativeDecode, 'extend', lambda self, texts, rows, wanted: (
        sorted(map(len, texts)), wanted.count(False)))
    engine = Engine(wide_model(), 4, 60, page_size=4, prefill_chunk=6, prefix_budget=10 ** 6)
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
