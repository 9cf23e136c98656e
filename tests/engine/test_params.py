"""What a request may ask for, what it may not, and what comes back as JSON."""
import dataclasses
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from engine.params import Completion, SamplingParams, TokenLogprob, sample_seed

NAMES = [f.name for f in dataclasses.fields(SamplingParams)]


def refusal(**settings):
    """Made directly and from JSON's dict, the message is the same."""
    with pytest.raises(UserError) as direct:
        SamplingParams(**settings)
    with pytest.raises(UserError) as by_dict:
        SamplingParams.from_dict(settings)
    assert str(direct.value) == str(by_dict.value) and '\n' not in str(direct.value)
    assert len(str(direct.value)) < 200
    return str(direct.value)


def test_the_defaults_restrict_nothing():
    p = SamplingParams()
    assert dataclasses.astuple(p) == (128, 1.0, 0, 1.0, 0.0, 1.0, 0, (), (), -1)
    assert NAMES == ['max_new_tokens', 'temperature', 'top_k', 'top_p', 'min_p',
                     'repetition_penalty', 'seed', 'stop_tokens', 'stop', 'logprobs']
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.seed = 1


@pytest.mark.parametrize('name, value',
                         [('max_new_tokens', 1), ('max_new_tokens', 2 ** 31 - 1),
                          ('temperature', 0), ('temperature', 1e-4), ('temperature', 100),
                          ('top_k', 0), ('top_k', 10 ** 9), ('top_p', 1), ('top_p', 5e-324),
                          ('min_p', 0), ('min_p', math.nextafter(1, 0)),
                          ('repetition_penalty', 1e-3), ('repetition_penalty', 1e3),
                          ('seed', -2 ** 63), ('seed', 2 ** 64 - 1), ('logprobs', -1),
                          ('logprobs', 0), ('logprobs', 10 ** 9), ('stop_tokens', (0, 5)),
                          ('stop', ('a', '\n\n'))])
def test_the_ends_of_each_range_are_allowed(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    assert kept == value
    assert type(kept) is (float if name in ('temperature', 'top_p', 'min_p', 'repetition_penalty')
                          else type(value))


@pytest.mark.parametrize('name, values, allowed',
                         [('max_new_tokens', (0, -1), 'at least 1'),
                          ('max_new_tokens', (2 ** 31, 10 ** 60), 'at most 2,147,483,647'),
                          ('temperature', (-1, -1e-9, 1e-5, 5e-324), '0 (greedy) or at least 1e-4'),
                          ('top_k', (-1,), 'at least 0'),
                          ('top_p', (0, -0.1, 1.0001, 2), 'above 0 and at most 1'),
                          ('min_p', (-0.1, 1, 1.5), 'at least 0 and below 1'),
                          ('repetition_penalty', (0, -1.0, 9e-4, 1001), 'from 0.001 to 1000'),
                          ('seed', (-2 ** 63 - 1, 2 ** 64), 'at least -2**63 and below 2**64'),
                          ('logprobs', (-2,), 'at least -1')])
def test_values_out_of_range_are_refused(name, values, allowed):
    for value in values:
        message = refusal(**{name: value})
        assert allowed in message
        assert message.startswith((f'{name}={value}'[:60], f'{name}={float(value)}:'))


WRONG = [True, False, None, '1', 'a', [], [1], {}, {'a': 1}, math.nan, math.inf, -math.inf, b'x']


@pytest.mark.parametrize('name', NAMES[:7] + ['logprobs'])
def test_values_of_the_wrong_type_are_refused(name):
    floats = name in ('temperature', 'top_p', 'min_p', 'repetition_penalty')
    for value in WRONG + ([] if floats else [1.0, 1.5]) + [10 ** 400] * floats:
        message = refusal(**{name: value})
        assert message.startswith(f'{name}=')
        assert ('finite number' if floats else 'integer') in message
        assert repr(value)[:50] in message


@pytest.mark.parametrize('value',
                         [5, None, 'ab', [True], [1.0], ['1'], [-1], [1, None], {1: 2}, {1, 2},
                          [[1]]], ids=str)
def test_stop_tokens_are_ids(value):
    message = refusal(stop_tokens=value)
    assert f'stop_tokens={value!r}' in message and 'token ids' in message


@pytest.mark.parametrize('value, why',
                         [(5, 'list of texts'), (None, 'list of texts'),
                          (['a', 5], 'list of texts'), ([['a']], 'list of texts'),
                          ({'a': 1}, 'list of texts'), ({'a'}, 'list of texts'),
                          ('', 'at least one character'), (['a', ''], 'at least one character'),
                          ('\ud800', 'surrogate'), (['a', 'b\udfffc'], 'surrogate')], ids=ascii)
def test_stop_texts_are_texts_that_can_come_up(value, why):
    message = refusal(stop=value)
    assert f'stop={value!r}' in message and why in message
    message.encode()  # can be printed


def test_a_dict_overrides_the_defaults_and_only_what_it_names():
    defaults = SamplingParams(temperature=0.5, top_k=7, stop=('x',), seed=3)
    assert SamplingParams.from_dict({}, defaults) == defaults
    assert SamplingParams.from_dict({'top_k': 2, 'stop': []},
                                    defaults) == SamplingParams(temperature=0.5, top_k=2, seed=3)
    assert defaults.top_k == 7


@pytest.mark.parametrize('key, near',
                         [('top-k', "'top_k'"), ('temprature', "'temperature'"), ('Seed', "'seed'"),
                          ('zzz', ''), (5, ''), ('', '')])
def test_an_unknown_key_names_what_looks_like_it_and_all_there_are(key, near):
    with pytest.raises(UserError) as caught:
        SamplingParams.from_dict({'seed': 1, key: 1})
    message = str(caught.value)
    assert repr(key) in message and ('did you mean' in message) == bool(near)
    assert near in message.split('allowed')[0]
    assert all(name in message.split('allowed')[1] for name in NAMES)


@pytest.mark.parametrize('given', [None, 5, 'seed', ['seed'], [['seed', 1]], True])
def test_what_is_no_dict_of_parameters(given):
    with pytest.raises(UserError, match='must be an object'):
        SamplingParams.from_dict(given)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=3), inner, max_size=2))


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), JSON, max_size=4))
def test_whatever_json_says_is_taken_or_refused(given):
    try:
        p = SamplingParams.from_dict(given)
    except UserError as e:
        assert any(key in str(e) or repr(key)[1:-1] in str(e) for key in given)
    else:
        document = json.dumps(dataclasses.asdict(p), allow_nan=False)
        assert SamplingParams.from_dict(json.loads(document)) == p


def test_huge_and_deep_values_make_short_messages():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (10 ** 5000, [0] * 10 ** 5, 'x' * 10 ** 5, deep):
        refusal(temperature=value)


def test_a_completion_as_json():
    logprobs = [TokenLogprob(3, -0.5, ((3, -0.5), (4, -1.5)))]
    top = [{'token': 3, 'logprob': -0.5}, {'token': 4, 'logprob': -1.5}]
    done = Completion([1, 2], [3], 'c', 'stop', logprobs=logprobs, ttft_s=0.1, seconds=0.2)
    assert json.loads(json.dumps(done.as_json(), allow_nan=False)) == {
        'prompt_tokens': [1, 2], 'tokens': [3], 'text': 'c', 'finish_reason': 'stop', 'error': '',
        'logprobs': [{'token': 3, 'logprob': -0.5, 'top': top}],
        'ttft_s': 0.1, 'seconds': 0.2, 'n_cached': 0}
    failed = Completion([], [], '', 'error', 'no room').as_json()
    assert (failed['logprobs'], failed['ttft_s'], failed['error']) == (None, None, 'no room')
    assert Completion([1], [], '', 'cancelled', logprobs=[]).as_json()['logprobs'] == []


def test_seeds_of_samples_differ_and_the_first_is_the_runs_own():
    assert [sample_seed(seed, 0) for seed in (5, -1, 2 ** 64 - 1)] == [5, -1, 2 ** 64 - 1]
    seeds = [sample_seed(seed, k) for seed in (0, 1, 2) for k in range(1, 100)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


def test_no_torch_is_imported():
    code = 'import sys, engine.params, engine.prompts; sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0
