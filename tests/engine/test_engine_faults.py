"""A fault of one request or one step affects nothing else: all other requests get what they would
get by themselves."""
import dataclasses
import functools

import pytest
import torch

from common.errors import UserError
from engine.engine import Engine
from engine.requests.params import SamplingParams
from model import GPT, GPTConfig
from tests.helpers.models import VOCAB, random_model
from tests.helpers.serving import (
    KINDS, TOKENIZER, alone, assert_idle, assert_same, budget_for, model_of, needed, prompt)

GOOD = [(prompt(n, seed=n), SamplingParams(new, seed=n, **more)) for n, new, more in (
    (9, 14, {}), (3, 20, dict(repetition_penalty=1.5)),
    (17, 9, dict(temperature=0)), (1, 16, dict(logprobs=1)))]
SIMILAR = [(ids, SamplingParams(6, seed=seed)) for seed, ids in enumerate(
    [prompt(20), prompt(20) + prompt(11, seed=1), prompt(33, seed=2)] * 2)]


@functools.cache
def good_alone(kind, similar=False):
    """The completions of the good requests, each run by itself."""
    return [alone(model_of(kind), ids, params, tokenizer=TOKENIZER)
            for ids, params in (SIMILAR if similar else GOOD)]


# -- requests that are wrong -----------------------------------------------------------------------

WRONG = {
    'no tokens': ([], {}, ['no tokens']),
    'too long': (prompt(38), dict(max_new_tokens=4),
                 ['38 prompt tokens', 'max_new_tokens=4', 'max_seq_len is 40']),
    'an id above': ([1, VOCAB], {}, [f'token {VOCAB}', f'0 to {VOCAB - 1}']),
    'an id below': ([-1], {}, ['token -1']),
    'a huge id': ([2 ** 80], {}, [f'token {2 ** 80}']),
    'a stop token': ([1], dict(stop_tokens=(99,)), ['stop token 99']),
    'a character': ('aXb', {}, ["'X'"]),
    'floats': ([1.0, 2.5], {}, ['[1.0, 2.5]', 'list of token ids']),
    'a float tensor': (torch.tensor([1.5]), {}, ['list of token ids']),
    'rows': (torch.tensor([[1]]), {}, ['list of token']),
    'texts': (['a', 'b'], {}, ["['a', 'b']"]),
    'None': (None, {}, ['prompt=None']),
}


@pytest.mark.parametrize('tokenizer, bad, params, named', [
    *((TOKENIZER, *wrong) for wrong in WRONG.values()), (None, 'a', {}, ['no tokenizer']),
    (None, [1], dict(stop=('x',)), ["stop=('x',)"])], ids=[*WRONG, 'a text', 'a stop text'])
def test_a_wrong_request_ends_with_an_error_and_disturbs_no_other(tokenizer, bad, params, named):
    engine = Engine(model_of('full stack'), 3, 40, page_size=4, tokenizer=tokenizer)
    wanted = [GOOD[0], (bad, SamplingParams(**params)), GOOD[1], GOOD[2]]
    completions = engine.generate([p for p, _ in wanted], [p for _, p in wanted])
    wrong = completions.pop(1)
    assert (wrong.finish_reason, wrong.tokens, wrong.text, wrong.ttft_s) == ('error', [], '', None)
    assert '\n' not in wrong.error and all(text in wrong.error for text in named), wrong.error
    for completion, expected in zip(completions, good_alone('full stack')):
        assert completion.text == (expected.text if tokenizer else '')
        assert_same(dataclasses.replace(completion, text=expected.text), expected)
    assert_idle(engine)


def test_parameters_that_do_not_match_prompts_are_refused_before_anything_runs():
    engine = Engine(model_of('vanilla'), 1)
    with pytest.raises(UserError, match='1 SamplingParams for 2 prompts'):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(AttributeError):
        engine.generate([[1], [2]], [SamplingParams(), 'greedy'])
    assert_idle(engine)


@pytest.mark.parametrize('settings, named', [
    (dict(max_batch_size=0), 'max_batch_size=0'), (dict(max_seq_len=-1), 'max_seq_len=-1'),
    (dict(page_size=0), 'page_size=0'), (dict(prefill_chunk=-1), 'prefill_chunk=-1'),
    (dict(prefix_budget=-1), 'prefix_budget=-1'),
    (dict(max_seq_len=65), 'block_size=64'), (dict(kv_dtype='int2'), "'int2'"),
    (dict(kv_budget=1), 'kv_budget=1 '), (dict(kv_budget=-5), 'kv_budget=-5 ')], ids=str)
def test_wrong_settings_of_an_engine_are_refused(settings, named):
    with pytest.raises(UserError, match=named):
        Engine(model_of('vanilla'), **dict(max_batch_size=2) | settings)


# -- NaN -------------------------------------------------------------------------------------------

BAD = VOCAB - 1  # its embedding is NaN; no good prompt has it, and it is never sampled


def poisoned(kind):
    model = random_model(GPTConfig(**KINDS[kind]))
    with torch.no_grad():
        # untied: logits stay finite
        model.transformer.wte.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.transformer.wte.weight[BAD] = torch.nan
    never_drawn = torch.tensor([BAD])
    model.register_forward_hook(
        lambda model, args, out: (out[0].index_fill(-1, never_drawn, -torch.inf), out[1]))
    return model


def without_bad(ids):
    return [token % BAD for token in ids]


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('kv_dtype, page_size, prefill_chunk, asynchronous', [
    ('float64', 4, 256, True), ('float64', 2, 3, False), ('int8', 2, 3, True),
    ('int8', 16, 8, False)])
def test_nan_ends_its_own_request_and_reaches_no_other(kind, kv_dtype, page_size, prefill_chunk,
                                                       asynchronous):
    """Neither concurrent requests nor those that reuse its row and pages: 0 times NaN is NaN."""
    model, params = poisoned(kind), SamplingParams(5)
    good = [(without_bad(ids), p) for ids, p in GOOD * 2]
    wanted = [([BAD], params), (without_bad(prompt(20)) + [BAD], params), *good[:4],
              ([BAD] + without_bad(prompt(9)), params), *good[4:]]
    engine = Engine(model, 3, needed(wanted), kv_dtype, page_size=page_size,
                    prefill_chunk=prefill_chunk, asynchronous=asynchronous)
    completions = engine.generate([ids for ids, _ in wanted], [p for _, p in wanted])
    for completion, (ids, p) in zip(completions, wanted):
        if BAD in ids:
            assert (completion.finish_reason, completion.tokens) == ('error', [])
            assert 'not finite' in completion.error
        else:
            assert_same(completion, alone(model, ids, p, kv_dtype=kv_dtype))
    assert_idle(engine)


@pytest.mark.parametrize('asynchronous', [False, True])
def test_nan_in_the_midst_of_a_text_keeps_what_was_said(monkeypatch, asynchronous):
    model, plain, calls = model_of('full stack'), GPT.forward, []

    def forward(self, idx, **kw):
        logits, loss = plain(self, idx, **kw)
        calls.append(1)
        if len(calls) == 6:
            logits[0] = torch.inf
        return logits, loss
    whole = alone(model, 'abc', SamplingParams(12, logprobs=0), tokenizer=TOKENIZER)
    monkeypatch.setattr(GPT, 'forward', forward)
    engine = Engine(model, 2, 40, tokenizer=TOKENIZER, asynchronous=asynchronous)
    first, second = engine.generate(['abc', 'abc'], SamplingParams(12, logprobs=0))
    assert (first.tokens, first.text) == (whole.tokens[:5], whole.text[:5])
    assert first.finish_reason == 'error' and len(first.logprobs) == 5
    assert first.error == 'the logits of token 5 are not finite (NaN or inf)'
    assert_same(second, whole)


# -- steps that fail -------------------------------------------------------------------------------

PREFIX = {
    'engine.prefix.store.PrefixStore': ['extend', 'restore', 'end', 'release', '_take_over'],
    'engine.prefix.tree.BlockTree': ['_evict', '_leave_pool', '_insert', '_drop_local'],
    'engine.pages.page_table.PageTable': ['pin', 'unpin', 'adopt', 'take_pinned'],
    'engine.prefix.blocks.BlockCopier': ['put_page', 'page'],
}
POINTS = ['model.GPT.forward', 'model.Block.forward', 'engine.engine.sample_rows',
          'engine.requests.stopping.SampleText.add', 'engine.requests.request.Request.take',
          'engine.requests.flight.Flight.read', 'engine.requests.scheduler.Scheduler.finish',
          'engine.requests.scheduler.Scheduler._free_row',
          'engine.pages.cache.PagedKVCache.move', 'engine.pages.cache.PagedKVCache.reserve',
          'engine.pages.page_table.PageTable.extend', 'engine.engine.Completion',
          *(f'{owner}.{name}' for owner, names in PREFIX.items() for name in names)]
# kind, error, number of pages (0 = as many as all rows can take), asynchronous
ENGINES = [('full stack', KeyboardInterrupt, 0, False), ('unshared', KeyboardInterrupt, 10, False),
           ('vanilla', MemoryError, 10, False), ('full stack', KeyboardInterrupt, 10, True)]
MOMENTS = [(1, 'before'), (5, 'after'), (2, 'before'), (1, 'after'), (8, 'after'), (5, 'before')]


@pytest.mark.parametrize('name, at, moment, kind, error, n_pages, asynchronous', [
    (name, *MOMENTS[(i + j) % len(MOMENTS)], *engine)
    for i, name in enumerate(POINTS) for j, engine in enumerate(ENGINES)])
def test_a_step_may_fail_anywhere_and_loses_and_repeats_nothing(
        interrupt, name, at, moment, kind, error, n_pages, asynchronous):
    """The step fails in up to three calls of the function. Once a completion of the same step was
    lost, and a request that was interrupted on its last token never ended. The prefix cache may
    lose entries, but never restores anything wrong."""
    model, in_prefix, prefix_budget = model_of(kind), any(map(name.startswith, PREFIX)), 0
    if in_prefix:
        n_pages = 17  # so few that some are moved to the host
        prefix_budget = 12_000 if name.endswith(('_evict', '_drop_local')) else 10 ** 9
    alone = good_alone(kind, in_prefix)  # before anything is interrupted
    calls = interrupt(name, dict.fromkeys((at, at + 7, at + 14), moment).get, error)
    engine = Engine(model, 3, 40, page_size=4, prefill_chunk=6, tokenizer=TOKENIZER,
                    kv_budget=n_pages and budget_for(model, 3, 40, n_pages, 4),
                    asynchronous=asynchronous, prefix_budget=prefix_budget)
    for ids, params in SIMILAR if in_prefix else GOOD:
        engine.submit(ids, params)
    events, failed = [], 0
    while engine.n_unfinished:
        try:
            events += engine.step()
        except error:
            failed += 1
            if name in POINTS[:3]:  # all wait again, in their old order
                numbers = [request.number for request in engine.scheduler.waiting]
                assert numbers == sorted(engine.requests) and not engine.scheduler.running
        assert len(events) < 200 and failed <= 3
    for index, expected in enumerate(alone):
        mine = [e for e in events if e.index == index]
        assert [e.token for e in mine] == expected.tokens
        assert ''.join(e.text for e in mine) == expected.text
        assert_same(mine[-1].completion, expected)
    assert_idle(engine)
    assert calls or in_prefix and kind != 'full stack'


def test_a_cancellation_that_is_interrupted_ends_its_request_and_no_other(interrupt):
    """The row of the request is half freed when Ctrl-C comes."""
    engine, done = Engine(model_of('full stack'), 3, 40, page_size=4, tokenizer=TOKENIZER), {}
    indices = [engine.submit(ids, params) for ids, params in GOOD[:3]]
    for _ in range(3):
        assert not any(event.completion for event in engine.step())
    interrupt('engine.pages.cache.PagedKVCache.reset', {1: 'before'}.get)
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(indices[0])
    while engine.n_unfinished:
        for event in engine.step():
            if event.completion:
                assert event.index not in done
                done[event.index] = event.completion
    assert done.pop(indices[0]).finish_reason == 'cancelled'
    for index, expected in zip(indices[1:], good_alone('full stack')[1:3]):
        assert_same(done.pop(index), expected)
    assert not done
    assert_idle(engine)
