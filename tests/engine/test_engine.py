"""The engine: what a request gets depends on nothing but itself, however rows, pages and chunks are
shared (in float64)."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.params import SamplingParams
from generate import generate
from model import GPT
from tests.helpers.serving import (
    ALPHABET,
    KINDS,
    TOKENIZER,
    alone,
    assert_as_full_forwards_say,
    assert_idle,
    assert_same,
    budget_for,
    engines,
    model_of,
    needed,
    prompt,
    requests,
    said,
)

EVERY_KIND = pytest.mark.parametrize('kind', KINDS)


def ask(engine, wanted):
    return engine.generate([ids for ids, _ in wanted], [p for _, p in wanted])


# -- what each gets --------------------------------------------------------------------------------

@EVERY_KIND
@settings(max_examples=12)
@given(data=st.data())
def test_every_request_gets_the_tokens_of_full_forwards(kind, data):
    wanted = data.draw(requests())
    engine = data.draw(engines(model_of(kind), wanted))
    completions = ask(engine, wanted)
    assert [c.prompt_tokens for c in completions] == [ids for ids, _ in wanted]
    for completion, (_, params) in zip(completions, wanted):
        assert_as_full_forwards_say(model_of(kind), completion, params)
    assert_idle(engine)


@EVERY_KIND
@settings(max_examples=8)
@given(data=st.data())
def test_every_request_gets_in_int8_what_it_gets_alone(kind, data):
    """Also when it was thrown out and its own tokens come back as a prompt: they are rounded
    alike."""
    wanted = data.draw(requests(most=5))
    engine = data.draw(engines(model_of(kind), wanted, kv_dtype='int8'))
    for completion, (ids, params) in zip(ask(engine, wanted), wanted):
        assert_same(completion, alone(model_of(kind), ids, params, kv_dtype='int8'))
    assert_idle(engine)


PARAMS = [SamplingParams(20, temperature=0), SamplingParams(30, seed=1, logprobs=3),
          SamplingParams(25, temperature=2.0, repetition_penalty=1.7, seed=2),
          SamplingParams(28, top_p=0.9, top_k=9, seed=3),
          SamplingParams(22, temperature=0, repetition_penalty=1.3, logprobs=0),
          SamplingParams(1, seed=4)]
MIXED = [(prompt(n, seed=n), params) for n, params in zip((9, 3, 14, 1, 6, 30), PARAMS)]


@pytest.mark.parametrize('kind', ['full stack', 'vanilla', 'unshared'])
@pytest.mark.parametrize('kv_dtype', ['float64', 'int8'])
def test_giving_pages_back_changes_no_text(kind, kv_dtype):
    """The case that matters, and happens for certain: repeated preemption of requests with
    penalties and seeds."""
    model, preempted = model_of(kind), 0
    engine = Engine(model, 4, needed(MIXED), kv_dtype, page_size=2, prefill_chunk=7,
                    kv_budget=budget_for(model, 4, needed(MIXED), 20, 2, kv_dtype))
    for ids, params in MIXED:
        engine.submit(ids, params)
    asked, completions = [job.request for job in engine.jobs.values()], {}
    while engine.n_unfinished:
        completions |= {event.index: event.completion for event in engine.step()
                        if event.completion}
        preempted = max(preempted, sum(request.preempted for request in asked))
    assert preempted >= 3 and any(request.preempted > 0 and request.params.repetition_penalty > 1
                                  for request in asked)
    for number, (ids, params) in enumerate(MIXED):
        assert_same(completions[number], alone(model, ids, params, kv_dtype=kv_dtype))
    assert_idle(engine)


@EVERY_KIND
@settings(max_examples=8)
@given(data=st.data())
def test_requests_that_come_while_others_run_and_are_cancelled_at_any_time(kind, data):
    model, wanted = model_of(kind), data.draw(requests(most=7))
    engine = data.draw(engines(model, wanted))
    events, todo, cancelled = {}, list(enumerate(wanted)), set()
    while todo or engine.n_unfinished:
        what = data.draw(st.sampled_from(['submit', 'step', 'step', 'step', 'step', 'cancel']))
        if what == 'submit' and todo:
            number, (ids, params) = todo.pop(0)
            assert engine.submit(ids, params) == number
            events[number] = []
        elif what == 'cancel' and engine.jobs:
            number = data.draw(st.sampled_from(sorted(engine.jobs)))
            assert engine.cancel(number).completion.finish_reason == 'cancelled'
            assert engine.cancel(number) is None
            cancelled.add(number)
        else:
            for event in engine.step():
                events[event.index].append(event)
    for number, (ids, params) in enumerate(wanted):
        *_, last = events[number]
        got, expected = last.completion, alone(model, ids, params)
        assert [e.token for e in events[number] if e.token >= 0] == got.tokens
        assert [e.logprob for e in events[number] if e.token >= 0 and e.logprob] == (got.logprobs
                                                            or [])
        if number in cancelled:
            assert (got.finish_reason, last.token) == ('cancelled', -1)
            assert got.tokens == expected.tokens[:len(got.tokens)]
        else:
            assert_same(got, expected)
    assert_idle(engine)


# -- lengths at the edge ---------------------------------------------------------------------------

@EVERY_KIND
@pytest.mark.parametrize('n, max_new_tokens',
                         [(1, 1), (1, 30), (7, 5), (8, 5), (9, 1), (9, 5), (16, 15), (17, 14),
                          (30, 1)])
def test_lengths_at_the_edge_of_chunks_pages_and_rows(kind, n, max_new_tokens):
    """Prompts of one token, of a chunk (8), of one more; requests that fill max_seq_len (30) to the
    last position."""
    model, params = model_of(kind), SamplingParams(max_new_tokens, seed=n, logprobs=1)
    engine = Engine(model, 2, 30, page_size=4, prefill_chunk=8)
    for completion in engine.generate([prompt(n), prompt(n, seed=1), prompt(n, seed=2)], params):
        assert_as_full_forwards_say(model, completion, params)
    assert_idle(engine)


@pytest.mark.parametrize('kind', ['vanilla', 'full stack'])
def test_positions_end_with_learned_ones_or_where_max_seq_len_says(kind):
    model, limit = model_of(kind), 64 if kind == 'vanilla' else 100
    engine = Engine(model, 2, 0 if kind == 'vanilla' else limit, page_size=16)
    good, bad = engine.generate([prompt(limit - 10), prompt(limit - 9)], SamplingParams(11))
    assert_as_full_forwards_say(model, good, SamplingParams(11))
    assert bad.finish_reason == 'error' and f'take {limit + 1} positions' in bad.error
    assert bad.tokens == []


# -- events and texts ------------------------------------------------------------------------------

@pytest.mark.parametrize('budget', [0, 12])
def test_texts_as_they_come_and_stop_texts_that_straddle_tokens(budget):
    """Streamed pieces joined are the completion's text, which is cut before the stop text; also
    across preemption."""
    model, base = model_of('full stack'), dict(max_new_tokens=40, temperature=1.5)
    texts = ['ab', 'cde', 'wvutsrq', 'a']
    whole = [alone(model, text, SamplingParams(seed=k, **base), tokenizer=TOKENIZER).text for k,
             text in enumerate(texts)]
    stops = [(whole[0][9:12],), (whole[1][20:22], 'zz'), (), (whole[3][:1] + 'z', whole[3][30:34])]
    params = [SamplingParams(seed=k, stop=stop, **base) for k, stop in enumerate(stops)]
    engine = Engine(model, 3, 60, page_size=4, prefill_chunk=4, tokenizer=TOKENIZER,
                    kv_budget=budget and budget_for(model, 3, 60, budget, 4)
                    + model.plan.page_nbytes(4, 'float64') * 4)
    pieces, completions = [''] * 4, [None] * 4
    for event in engine.stream(texts, params):
        assert completions[event.index] is None
        pieces[event.index] += event.text
        completions[event.index] = event.completion
        job = engine.jobs.get(event.index)
        if job and job.request.tokens:
            made = whole[event.index][:len(job.request.tokens)]
            assert made.startswith(pieces[event.index])
    for completion, piece, text, stop in zip(completions, pieces, whole, stops):
        cut = min([text.find(s) for s in stop if s in text], default=len(text))
        assert piece == completion.text == text[:cut]
        assert completion.finish_reason == ('stop' if any(s in text for s in stop) else 'length')
        assert TOKENIZER.decode(completion.tokens).startswith(completion.text)
    assert completions[0].text == whole[0][:whole[0].find(stops[0][0])]
    assert len(completions[2].text) == 40
    assert_idle(engine)


def test_a_stop_token_is_among_the_tokens_and_not_in_the_text():
    model = model_of('full stack')
    text = alone(model, 'abc', SamplingParams(30, seed=5, temperature=1.5),
                 tokenizer=TOKENIZER).text
    last = text[7]
    completion = alone(model, 'abc',
                       SamplingParams(30, seed=5, temperature=1.5,
                                      stop_tokens=(ALPHABET.index(last),)),
                       tokenizer=TOKENIZER)
    n = text.index(last)
    assert (completion.text, completion.finish_reason, len(completion.tokens)) == (text[:n], 'stop',
                                                            n + 1)


def test_a_stop_text_of_the_very_last_token_is_a_stop():
    model, params = model_of('full stack'), dict(seed=5, temperature=1.5)
    text = alone(model, 'abc', SamplingParams(12, **params), tokenizer=TOKENIZER).text
    n = next(n for n in range(12) if text[n] not in text[:n] and n > 2)
    completion = alone(model, 'abc', SamplingParams(n + 1, stop=(text[n],), **params),
                       tokenizer=TOKENIZER)
    assert (completion.text, completion.finish_reason) == (text[:n], 'stop')


def test_what_was_held_back_comes_with_the_last_event():
    """The end of a text may look like the beginning of a stop text; when no more comes, it is
    text."""
    model, params = model_of('full stack'), dict(max_new_tokens=8, seed=5, temperature=1.5)
    text = alone(model, 'abc', SamplingParams(**params), tokenizer=TOKENIZER).text
    engine = Engine(model, 1, 20, tokenizer=TOKENIZER)
    *before, last = engine.stream(['abc'], SamplingParams(stop=(text[-2:] + 'a',), **params))
    assert last.text == text[-2:] and last.completion.text == text == ''.join(e.text
                                                            for e in before) + last.text


def test_without_a_tokenizer_there_are_tokens_but_no_texts():
    [event] = Engine(model_of('vanilla'), 1).stream([torch.tensor([1, 2])], SamplingParams(1))
    assert event.text == event.completion.text == '' and event.token == event.completion.tokens[0]
    assert event.completion.logprobs is None
    assert 0 <= event.completion.ttft_s <= event.completion.seconds


def test_on_event_sees_every_token_before_generate_returns():
    model, seen = model_of('unshared'), []
    completions = Engine(model, 2, needed(MIXED)).generate([ids for ids, _ in MIXED],
                                                           [p for _, p in MIXED], seen.append)
    assert [[e.token for e in seen if e.index == n] for n in range(len(MIXED))] == [c.tokens
                                                            for c in completions]
    assert sorted(e.index for e in seen if e.completion) == list(range(len(MIXED)))
    assert Engine(model, 2).generate([]) == []


# -- streams ---------------------------------------------------------------------------------------

def test_a_stream_left_early_cancels_what_has_not_ended():
    model = model_of('full stack')
    engine = Engine(model, 2, 40, page_size=4)
    for event in engine.stream([prompt(5), prompt(6), prompt(7)], SamplingParams(20)):
        if event.completion is None and len(engine.jobs[0].request.tokens) > 3:
            break
    assert_idle(engine)
    stream = engine.stream([prompt(5)], SamplingParams(3))
    stream.close()  # before it began
    assert_idle(engine)
    assert_same(engine.generate([prompt(5)], SamplingParams(9, seed=2))[0],
                alone(model, prompt(5), SamplingParams(9, seed=2)))


def test_a_callback_that_fails_leaves_nothing_behind():
    engine = Engine(model_of('full stack'), 2, 40)
    with pytest.raises(ZeroDivisionError) as caught:
        engine.generate([prompt(5), prompt(6), prompt(7)], SamplingParams(20), lambda event: 1 / 0)
    # which keeps the frame, and so would have kept the stream
    assert caught.value.__traceback__ is not None
    assert_idle(engine)


def test_a_request_cancelled_within_its_stream_ends_there():
    """The stream waited for ever for its end."""
    model, ended = model_of('full stack'), {}
    engine = Engine(model, 2, 40)
    for event in engine.stream([prompt(5), prompt(6), prompt(7)], SamplingParams(15, seed=1)):
        if event.index == 0:
            for number in (1, 2):  # one that runs, one that waits
                engine.cancel(number)
        if event.completion:
            ended[event.index] = event.completion
    assert [ended[n].finish_reason for n in range(3)] == ['length', 'cancelled', 'cancelled']
    assert ended[2].tokens == [] and ended[2].ttft_s is None
    assert_same(ended[0], alone(model, prompt(5), SamplingParams(15, seed=1)))
    assert_idle(engine)


def test_two_streams_and_requests_beside_them_do_not_take_each_others_events():
    """Each stream dropped what the other waited for, and neither ended."""
    model, params = model_of('unshared'), SamplingParams(12, seed=3)
    engine = Engine(model, 3, 40, prefill_chunk=4)
    single = engine.submit(prompt(9, seed=9), params)
    streams = [engine.stream([prompt(5, seed=k), prompt(11, seed=k)], params) for k in range(2)]
    tokens = [[[], []], [[], []]]
    for events in zip(*streams):
        for k, event in enumerate(events):
            tokens[k][event.index].append(event.token)
    for k in range(2):
        for event in streams[k]:
            tokens[k][event.index].append(event.token)
        for n, length in enumerate((5, 11)):
            assert tokens[k][n] == alone(model, prompt(length, seed=k), params).tokens
    assert single not in engine.jobs
    assert_idle(engine)


# -- how it is computed ----------------------------------------------------------------------------

@pytest.fixture
def passes(monkeypatch):
    """(shape, lens) of each forward pass."""
    fed, plain = [], GPT.forward

    def forward(self, idx, **kw):
        fed.append((tuple(idx.shape), list(kw['lens'])))
        return plain(self, idx, **kw)
    monkeypatch.setattr(GPT, 'forward', forward)
    return fed


def test_a_row_that_is_free_is_taken_at_once_and_a_long_prompt_does_not_stall_the_others(passes):
    engine = Engine(model_of('full stack'), 2, 60, prefill_chunk=8)
    engine.generate([prompt(3), prompt(3), prompt(18)],
                    [SamplingParams(7), SamplingParams(2), SamplingParams(2)])
    assert passes == [((2, 3), [3, 3]), ((2, 1), [1, 1]), ((1, 8), [8]), ((1, 1), [1]),
                      ((1, 8), [8]), ((1, 1), [1]),
                      ((1, 2), [2]), ((1, 1), [1]), ((2, 1), [1, 1]), ((1, 1), [1])]


@pytest.mark.parametrize('kind', KINDS)
def test_no_more_is_allocated_than_the_budget(kind):
    model, rows = model_of(kind), 3
    full = Engine(model, rows, 50, page_size=8).cache.nbytes
    rings = model.plan.rings_nbytes(rows, 50, 'float64')
    for budget in (rings + model.plan.page_nbytes(8, 'float64'), (full + rings) // 2, full,
                   10 * full):
        cache = Engine(model, rows, 50, page_size=8, kv_budget=max(budget, 1)).cache
        assert cache.nbytes <= budget and cache.nbytes > budget - max(1,
                                                            model.plan.page_nbytes(8,
                                                            'float64')) or (
            cache.nbytes == full)
