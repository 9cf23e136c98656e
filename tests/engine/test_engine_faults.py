"""What goes wrong for one request, or in one step, touches nothing else: all others get what they
get alone."""
import functools
import pydoc

import numpy as np
import pytest
import torch

from config.errors import UserError
from engine.engine import Engine
from engine.params import SamplingParams
from model import GPT, GPTConfig
from tests.helpers.models import VOCAB, random_model
from tests.helpers.serving import (
    KINDS,
    TOKENIZER,
    alone,
    assert_idle,
    assert_same,
    budget_for,
    model_of,
    needed,
    prompt,
    said,
)

EVERY_KIND = pytest.mark.parametrize('kind', KINDS)
GOOD = [(prompt(n, seed=n), SamplingParams(new, seed=n, **more)) for n, new, more in (
    (9, 14, {}), (3, 20, dict(repetition_penalty=1.5)),
    (17, 9, dict(temperature=0)), (1, 16, dict(logprobs=1)))]


@functools.cache
def good_alone():
    """What the good ones get from the full stack, each alone."""
    return [alone(model_of('full stack'), ids, params, tokenizer=TOKENIZER) for ids, params in GOOD]


# -- requests that are wrong -----------------------------------------------------------------------

WRONG = {
    'no tokens': ([], {}, ['no tokens']), 'no text': ('', {}, ['no tokens']),
    'too long': (prompt(38), dict(max_new_tokens=4),
                 ['38 prompt tokens', 'max_new_tokens=4', 'max_seq_len is 40']),
    'far too long': ([1], dict(max_new_tokens=10 ** 9), ['max_seq_len is 40']),
    'an id above': ([1, VOCAB], {}, [f'token {VOCAB}', f'0 to {VOCAB - 1}']),
         'an id below': ([-1], {}, ['token -1']),
    'a huge id': ([2 ** 80], {}, [f'token {2 ** 80}']),
         'a stop token': ([1], dict(stop_tokens=(99,)), ['stop token 99']),
    'a character': ('aXb', {}, ["'X'"]),
         'floats': ([1.0, 2.5], {}, ['[1.0, 2.5]', 'list of token ids']),
    'a float tensor': (torch.tensor([1.5]), {}, ['list of token ids']),
         'rows': (torch.tensor([[1]]), {}, ['list of token']),
    'texts': (['a', 'b'], {}, ["['a', 'b']"]), 'None': (None, {}, ['prompt=None']),
         'a number': (5, {}, ['prompt=5']),
    'a scalar': (torch.tensor(5), {}, ['prompt=tensor(5)']),
}


@pytest.mark.parametrize('bad, params, named', WRONG.values(), ids=WRONG)
def test_a_wrong_request_ends_with_an_error_and_disturbs_no_other(bad, params, named):
    model = model_of('full stack')
    engine = Engine(model, 3, 40, page_size=4, tokenizer=TOKENIZER)
    wanted = [GOOD[0], (bad, SamplingParams(**params)), GOOD[1], GOOD[2]]
    completions = engine.generate([p for p, _ in wanted], [p for _, p in wanted])
    wrong = completions.pop(1)
    assert (wrong.finish_reason, wrong.tokens, wrong.text, wrong.ttft_s) == ('error', [], '', None)
    assert '\n' not in wrong.error and all(text in wrong.error for text in named), wrong.error
    for completion, (ids, p) in zip(completions, GOOD):
        assert_same(completion, alone(model, ids, p, tokenizer=TOKENIZER))
    assert_idle(engine)


def test_texts_and_stop_texts_need_a_tokenizer():
    engine = Engine(model_of('vanilla'), 2)
    completions = engine.generate(['a', [1], [1]],
                                  [SamplingParams(2), SamplingParams(2, stop=('x',)),
                                   SamplingParams(2)])
    assert [c.finish_reason for c in completions] == ['error', 'error', 'length']
    assert 'no tokenizer' in completions[0].error and "stop=('x',)" in completions[1].error


def test_more_than_the_kv_memory_holds_is_refused_and_said():
    model = model_of('unshared')
    engine = Engine(model, 2, 60, page_size=4, kv_budget=budget_for(model, 2, 60, 5, 4))
    bad, good = engine.generate([prompt(10), prompt(10)], [SamplingParams(12), SamplingParams(11)])
    assert 'take 21 positions, and the KV memory holds 20' in bad.error and len(good.tokens) == 11


def test_parameters_that_do_not_match_prompts_are_refused_before_anything_runs():
    engine = Engine(model_of('vanilla'), 1)
    with pytest.raises(UserError, match='1 SamplingParams for 2 prompts'):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(AttributeError):
        engine.generate([[1], [2]], [SamplingParams(), 'greedy'])
    assert_idle(engine)


@pytest.mark.parametrize('settings, named', [
    (dict(max_batch_size=0), 'max_batch_size=0'), (dict(max_seq_len=-1), 'max_seq_len=-1'),
                                             (dict(page_size=0), 'page_size=0'),
    (dict(prefill_chunk=0), 'prefill_chunk=0'), (dict(max_seq_len=65), 'block_size=64'),
                                             (dict(kv_dtype='int4'), "'int4'"),
    (dict(kv_budget=1), 'kv_budget=1 '), (dict(kv_budget=-5), 'kv_budget=-5 ')], ids=str)
def test_engines_that_cannot_be(settings, named):
    with pytest.raises(UserError) as caught:
        Engine(model_of('vanilla'), **dict(max_batch_size=2) | settings)
    assert named in str(caught.value)


def test_a_budget_too_small_says_what_would_do():
    model = model_of('full stack')
    least = budget_for(model, 3, 40, 1, 8)
    with pytest.raises(UserError, match=f'give at least {least:,}'):
        Engine(model, 3, 40, page_size=8, kv_budget=least - 1)
    assert Engine(model, 3, 40, page_size=8, kv_budget=least).cache.nbytes == least


# -- NaN -------------------------------------------------------------------------------------------

BAD = VOCAB - 1  # its embedding is NaN; good prompts lack it, and it is never drawn


def poisoned(kind):
    model = random_model(GPTConfig(**KINDS[kind]))
    with torch.no_grad():
        # untied: logits stay finite
        model.transformer.wte.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.transformer.wte.weight[BAD] = torch.nan
    model.register_forward_hook(lambda model, args,
                                out: (out[0].index_fill(-1, torch.tensor([BAD]), -torch.inf),
                                      out[1]))
    return model


def without_bad(ids):
    return [token % BAD for token in ids]


@EVERY_KIND
@pytest.mark.parametrize('kv_dtype', ['float64', 'int8'])
@pytest.mark.parametrize('page_size, prefill_chunk', [(4, 256), (2, 3), (16, 8)])
def test_nan_ends_its_own_request_and_reaches_no_other(kind, kv_dtype, page_size, prefill_chunk):
    """Neither those who run beside it, nor those who get its row, ring and pages after it: 0 times
    NaN is NaN."""
    model = poisoned(kind)
    good = [(without_bad(ids), params) for ids, params in GOOD * 2]
    bad = [([BAD], 5), (without_bad(prompt(20)) + [BAD], 5), ([BAD] + without_bad(prompt(9)), 5)]
    wanted = [(ids, SamplingParams(n)) for ids,
              n in bad[:2]] + good[:4] + [(bad[2][0], SamplingParams(5))] + good[4:]
    engine = Engine(model, 3, needed(wanted), kv_dtype, page_size=page_size,
                    prefill_chunk=prefill_chunk)
    completions = engine.generate([ids for ids, _ in wanted], [p for _, p in wanted])
    for completion, (ids, params) in zip(completions, wanted):
        if BAD in ids:
            assert (completion.finish_reason, completion.tokens) == ('error',
                                                            []) and 'not finite' in completion.error
        else:
            assert_same(completion, alone(model, ids, params, kv_dtype=kv_dtype))
    assert_idle(engine)


def test_nan_in_the_midst_of_a_text_keeps_what_was_said(monkeypatch):
    model, plain, calls = model_of('full stack'), GPT.forward, []

    def forward(self, idx, **kw):
        logits, loss = plain(self, idx, **kw)
        calls.append(1)
        if len(calls) == 6:
            logits[0] = torch.inf
        return logits, loss
    whole = alone(model, 'abc', SamplingParams(12, logprobs=0), tokenizer=TOKENIZER)
    monkeypatch.setattr(GPT, 'forward', forward)
    engine = Engine(model, 2, 40, tokenizer=TOKENIZER)
    first, second = engine.generate(['abc', 'abc'], SamplingParams(12, logprobs=0))
    assert (first.finish_reason, first.tokens, first.text) == ('error', whole.tokens[:5],
                                                            whole.text[:5])
    assert len(first.logprobs) == 5
    assert first.error == 'the logits of token 5 are not finite (NaN or inf)'
    assert_same(second, whole)


# -- steps that fail -------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['full stack', 'vanilla', 'unshared'])
@pytest.mark.parametrize('error, tight', [(KeyboardInterrupt, True), (MemoryError, False)])
def test_a_step_may_fail_at_any_point_and_the_next_goes_on(kind, error, tight, monkeypatch):
    """In the midst of a forward pass, when some layers have written; before it; in whatever pass of
    a step. All events come once, and say what they would have said."""
    model, armed = model_of(kind), dict(at=None, n=0)

    def interrupt(*_):
        armed['n'] += 1
        if armed['n'] == armed['at']:
            raise error
    block = model.transformer.h[1]
    hooks = [block.register_forward_pre_hook(interrupt), model.register_forward_pre_hook(interrupt)]
    monkeypatch.setattr('engine.engine.sample_rows', lambda *args,
                        plain=Engine._forward.__globals__['sample_rows']: (
        interrupt(), plain(*args))[1])
    try:
        reference = [alone(model, ids, params, tokenizer=TOKENIZER) for ids, params in GOOD]
        for at in range(1, 48, 9):
            engine = Engine(model, 3, 40, page_size=4, prefill_chunk=6, tokenizer=TOKENIZER,
                            kv_budget=budget_for(model, 3, 40, 10, 4) if tight else 0)
            for ids, params in GOOD:
                engine.submit(ids, params)
            events, failed, armed['n'], armed['at'] = [], 0, 0, at
            while engine.n_unfinished:
                try:
                    events += engine.step()
                except error:
                    failed += 1
                    numbers = [r.number for r in engine.scheduler.waiting]  # nobody is overtaken
                    assert numbers == sorted(engine.jobs) and not engine.scheduler.running
                    armed['at'] += 7 if failed < 3 else -1000
            assert failed == 3
            for number, expected in enumerate(reference):
                mine = [e for e in events if e.index == number]
                assert_same(mine[-1].completion, expected)
                assert [e.token for e in mine] == expected.tokens and ''.join(e.text
                                                            for e in mine) == expected.text
            assert_idle(engine)
    finally:
        for hook in hooks:
            hook.remove()


BOOKKEEPING = ['engine.stopping.SampleText.add', 'engine.sampler.SampleRow.append',
               'engine.scheduler.Scheduler.finish', 'engine.scheduler.Scheduler._free_row',
               'engine.paged.PagedKVCache.move', 'engine.paged.PagedKVCache.reserve',
               'engine.pages.PageTable.extend',
               'engine.engine.Completion']


@pytest.mark.parametrize('before', [True, False], ids=['before', 'after'])
@pytest.mark.parametrize('at',
                         [1, 5, *(pytest.param(at, marks=pytest.mark.slow)
                                  for at in (2, 3, 8, 13, 21))])
@pytest.mark.parametrize('name', BOOKKEEPING)
def test_ctrl_c_amid_the_bookkeeping_loses_and_repeats_nothing(monkeypatch, name, at, before):
    """A completion of the same step was lost; a request interrupted on its last token went on for
    ever."""
    model = model_of('full stack')
    reference, (module, _, attribute) = good_alone(), name.rpartition('.')
    plain, hits = pydoc.locate(name), iter(range(1, 10 ** 6))

    def interrupted(*args, **kwargs):
        hit = next(hits) == at
        if hit and before:
            raise KeyboardInterrupt
        result = plain(*args, **kwargs)
        if hit:
            raise KeyboardInterrupt
        return result
    monkeypatch.setattr(pydoc.locate(module), attribute, interrupted)
    engine = Engine(model, 3, 40, page_size=4, prefill_chunk=6, tokenizer=TOKENIZER)
    for ids, params in GOOD:
        engine.submit(ids, params)
    events, failed = [], 0
    while engine.n_unfinished:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            failed += 1
        assert len(events) < 200
    completions = {e.index: e.completion for e in events if e.completion}
    assert failed <= 1 and sorted(completions) == [0, 1, 2, 3]
    for index, expected in enumerate(reference):
        assert_same(completions[index], expected)
        mine = [e for e in events if e.index == index]
        assert [e.token for e in mine] == expected.tokens and ''.join(e.text
                                                            for e in mine) == expected.text
    assert_idle(engine)
    assert next(hits) > 1
