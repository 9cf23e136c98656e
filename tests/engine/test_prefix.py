"""Requests that reuse what earlier ones computed: every text is the same as without reuse."""
import copy
import random

import pytest
import torch

from engine.engine import Engine
from engine.requests.params import SamplingParams
from tests.helpers.serving import (
    KINDS, TOKENIZER, alone, assert_idle, assert_same, budget_for, model_of, prompt)

SIZE = 4


def engine_of(kind, budget=10 ** 9, n_pages=0, **more):
    model, kv_budget = model_of(kind), 0
    if n_pages:
        kv_dtype = more.get('kv_dtype', 'float64')
        kv_budget = budget_for(model, 3, 60, n_pages, SIZE, kv_dtype)
    return Engine(model, 3, 60, page_size=SIZE, prefill_chunk=12, prefix_budget=budget,
                  kv_budget=kv_budget, tokenizer=TOKENIZER, **more)


def conversation(random, said, turn):
    """The next prompt: an earlier text continued, edited or repeated, or a new one."""
    old, new = random.choice(said), prompt(random.randint(1, 9), seed=turn)
    edited, other = old[:random.randint(1, len(old))] + new, prompt(random.randint(1, 20), turn)
    text = random.choice([old + new, old + new, edited, old, other])
    return text[-48:] if random.random() < 0.1 else text[:48]


@pytest.mark.parametrize('kind, kv_dtype, budget, n_pages, how', [
    *((kind, *memory, '') for kind in KINDS for memory in (
        ('float64', 10 ** 9, 0), ('int8', 9_000, 24))),
    *((kind, 'int4', 20_000, 24, '') for kind in ('key offset', 'K = V', 'latents')),
    *((kind, 'float64', 10 ** 9, 24, 'asynchronous') for kind in (*KINDS, 'key offset'))])
def test_conversations_get_what_they_get_without_it(kind, kv_dtype, budget, n_pages, how):
    """Three at a time, also with little memory; computed in float64, to exclude rounding. If a stop
    token ends an asynchronous reply, the row has computed one token more than the reply has."""
    engine = engine_of(kind, budget, n_pages, kv_dtype=kv_dtype, asynchronous=how == 'asynchronous')
    stops = (3, 8, 11, 13) if how == 'asynchronous' else ()
    draw, said = random.Random(kind), [prompt(5, seed=1)]
    for turn in range(6):
        prompts = [conversation(draw, said, 3 * turn + i) for i in range(3)]
        params = [SamplingParams(draw.randint(1, 11), seed=turn, logprobs=0, stop_tokens=stops)
                  for _ in prompts]
        for ids, p, completion in zip(prompts, params, engine.generate(prompts, params)):
            assert_same(completion, alone(model_of(kind), ids, p, kv_dtype=kv_dtype,
                                          tokenizer=TOKENIZER))
            said.append(ids + completion.tokens)
    assert_idle(engine)
    stats = engine.prefix.stats
    assert stats.requests == 18 and 0 < stats.found < stats.looked_up < sum(map(len, said[1:]))


@pytest.mark.parametrize('kind', [*KINDS, 'key offset'])
def test_a_conversation_computes_only_what_is_new(kind):
    """Turn by turn; repeating a prompt computes its last token, or no more than its last block."""
    engine, text = engine_of(kind), prompt(13)
    for n in (5, 1, 4, 8, 2):
        [completion] = engine.generate([text], SamplingParams(n, seed=n))
        held = len(text) + len(completion.tokens) - 1  # the last sampled token is never fed
        [again] = engine.generate([text], SamplingParams(n, seed=n))
        assert again.tokens == completion.tokens
        expected = len(text) - 1 if engine.prefix.anywhere else (len(text) - 1) // SIZE * SIZE
        assert again.n_cached == expected
        text = text + completion.tokens + prompt(3, seed=n)
        assert engine.prefix.match(text).length == held


def test_samples_that_come_together_wait_for_the_first():
    engine, ids = engine_of('full stack'), prompt(25)
    prompts = [ids, ids, ids[:24] + prompt(9, seed=1), ids[:20], prompt(25, seed=2)]
    params = [SamplingParams(5, seed=seed) for seed in range(5)]
    done = engine.generate(prompts, params)
    assert [completion.n_cached for completion in done] == [0, 24, 24, 19, 0]
    for completion, ids, p in zip(done, prompts, params):
        assert_same(completion, alone(model_of('full stack'), ids, p, tokenizer=TOKENIZER))
    assert_idle(engine)


def test_requests_with_different_salts_share_nothing():
    """Neither in memory, nor by waiting for each other."""
    ids, params = prompt(20, seed=1), SamplingParams(max_new_tokens=4, temperature=0)

    def cached_tokens(engine, *salts):
        numbers = [engine.submit(ids, params, salt=salt) for salt in salts]
        engine.step()
        assert not engine.scheduler.waiting
        found = {}
        while engine.n_unfinished:
            found |= {event.index: event.completion for event in engine.step() if event.completion}
        assert len({tuple(found[number].tokens) for number in numbers}) == 1
        return [found[number].n_cached for number in numbers]

    engine = engine_of('full stack')
    assert cached_tokens(engine, b'one', b'other') == [0, 0]
    assert cached_tokens(engine, b'one') == [19]
    assert cached_tokens(engine, b'third') == [0]
    assert_idle(engine)


def test_buffers_in_more_memory_than_they_need_count_whole(monkeypatch):
    """Like on CUDA, where pinned memory comes in powers of two."""
    def rounded(copies, buffer):
        size = 1 << (buffer.numel() - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8)[:buffer.numel()].copy_(buffer)

    def stored():
        engine = engine_of('full stack', kv_dtype='int8')
        engine.generate([prompt(40)], SamplingParams(6, seed=3))
        return engine.prefix.nbytes, sum(block.nbytes for block in engine.prefix.blocks)
    plain = stored()
    monkeypatch.setattr('engine.prefix.blocks.HostCopies.out', rounded)
    assert plain[0] == plain[1] < stored()[0] == stored()[1]


def test_pages_that_only_the_store_has_are_free_for_all():
    """No request is preempted to spare them."""
    engine = engine_of('full stack', n_pages=15)
    engine.generate([prompt(40, seed=seed) for seed in range(3)], SamplingParams(2, seed=0))
    assert engine.cache.table.n_free < 8 <= engine.cache.table.n_evictable
    engine.submit(prompt(9, seed=5), SamplingParams(49, seed=1))
    while engine.requests:
        assert not any(request.preempted for request in engine.requests.values())
        engine.step()
    assert_idle(engine)


def test_a_prompt_beside_others_can_be_edited_anywhere():
    """Although other requests leave odd numbers of tokens to its chunks."""
    engine = engine_of('unshared')
    odd, ids = prompt(7, seed=1), prompt(50)
    engine.generate([odd, ids], SamplingParams(1, seed=0))
    for n in range(1, 50):
        edited = ids[:n] + [(ids[n] + 1) % engine.model.config.vocab_size] * 2
        assert engine.prefix.match(edited).length == n


def test_cancelled_after_an_interrupted_recovery(monkeypatch):
    engine = engine_of('full stack')
    index = engine.submit(prompt(20), SamplingParams(9, seed=0))
    for _ in range(3):
        engine.step()

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(engine.scheduler, 'schedule', interrupted)
    monkeypatch.setattr(engine.prefix, 'recover', interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert engine.cancel(index).completion.finish_reason == 'cancelled'
    while engine.n_unfinished:
        engine.step()
    assert_idle(engine)


@pytest.mark.gpu
@pytest.mark.parametrize('kv_dtype', ['float32', 'int8'])
def test_on_a_gpu(kv_dtype):
    """Pinned buffers, page tables, captured steps: conversations are the same as without a store,
    even if pages were moved to the host."""
    model, sides, text = copy.deepcopy(model_of('full stack')).float().cuda(), [], prompt(9)
    for budget in (0, 10 ** 9):
        sides.append(Engine(model, 2, 60, kv_dtype, page_size=SIZE, prefill_chunk=12,
                            prefix_budget=budget,
                            kv_budget=budget_for(model, 2, 60, 18, SIZE, kv_dtype)))
    for turn in range(6):
        prompts, params = [text, prompt(30, seed=turn)], SamplingParams(6, temperature=0)
        plain, found = (engine.generate(prompts, params) for engine in sides)
        assert [c.tokens for c in plain] == [c.tokens for c in found]
        assert found[0].n_cached == (0 if turn == 0 else len(text) - 3)
        text = text + plain[0].tokens + prompt(2, seed=turn)
    assert any(block.copy is not None for block in sides[1].prefix.blocks)
    assert_idle(sides[1])
