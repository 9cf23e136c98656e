"""Parameters of a request: which values are accepted and which are refused."""
import dataclasses
import math

import pytest

from common.errors import UserError
from engine.requests.params import SamplingParams, sample_seed

NAMES = [f.name for f in dataclasses.fields(SamplingParams)]
FLOATS = ('temperature', 'top_p', 'min_p', 'repetition_penalty')


def refusal(**settings):
    """The error message, which must be the same for the constructor and for a dict from JSON."""
    with pytest.raises(UserError) as direct:
        SamplingParams(**settings)
    with pytest.raises(UserError) as by_dict:
        SamplingParams.from_dict(settings)
    assert str(direct.value) == str(by_dict.value) and '\n' not in str(direct.value)
    assert len(str(direct.value)) < 200
    return str(direct.value)


def test_the_defaults_restrict_nothing():
    assert dataclasses.asdict(SamplingParams()) == dict(
        max_new_tokens=128, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        seed=0, stop_tokens=(), stop=(), logprobs=-1, ignore_eos=False)


@pytest.mark.parametrize('name, values', [
    ('max_new_tokens', (1, 2 ** 31 - 1)), ('temperature', (0, 1e-4, 100)), ('top_k', (0, 10 ** 9)),
    ('top_p', (1, 5e-324)), ('min_p', (0, math.nextafter(1, 0))),
    ('repetition_penalty', (1e-3, 1e3)), ('seed', (-2 ** 63, 2 ** 64 - 1)),
    ('logprobs', (-1, 0, 10 ** 9)), ('stop_tokens', ((0, 5),)), ('stop', (('a', '\n\n'),))])
def test_the_ends_of_each_range_are_allowed(name, values):
    for value in values:
        kept = getattr(SamplingParams(**{name: value}), name)
        assert kept == value and type(kept) is (float if name in FLOATS else type(value))


WRONG = [True, '1', [1], {'a': 1}, math.nan, math.inf, b'x']


@pytest.mark.parametrize('name, values, allowed', [
    ('max_new_tokens', (0, -1), 'at least 1'),
    ('max_new_tokens', (2 ** 31, 10 ** 60), 'at most 2,147,483,647'),
    ('temperature', (-1, -1e-9), 'at least 0 (greedy)'),
    ('top_k', (-2,), 'at least -1 (all)'), ('top_p', (-0.1, 1.0001, 2), 'at least 0 and at most 1'),
    ('min_p', (-0.1, 1, 1.5), 'at least 0 and below 1'),
    ('repetition_penalty', (0, -1.0, 9e-4, 1001), 'from 0.001 to 1000'),
    ('seed', (-2 ** 63 - 1, 2 ** 64), 'at least -2**63 and below 2**64'),
    ('logprobs', (-2,), 'at least -1'),
    *((name, (*WRONG, 10 ** 400), 'finite number') for name in FLOATS),
    *((name, (*WRONG, 1.5), 'integer') for name in ('max_new_tokens', 'top_k', 'seed', 'logprobs')),
    ('stop_tokens', (5, 'ab', [True], [1.5], [-1], [1, None], {1: 2}, [[1]]), 'token ids'),
    ('stop', (5, ['a', 5], [['a']], {'a': 1}, {'a'}), 'list of texts'),
    ('stop', (['a', 'b\udfffc'],), 'surrogate'),
    ('ignore_eos', (0, 1, 'true', {'a': 1}), ': must be true or false')])
def test_values_out_of_range_or_of_the_wrong_type_are_refused(name, values, allowed):
    for value in values:
        message = refusal(**{name: value})
        assert message.startswith(f'{name}={value!r}'[:50]) and allowed in message
        message.encode()  # can be printed


def test_equivalent_values_become_one():
    for greedy in (dict(temperature=5e-324), dict(temperature=9e-5), dict(top_p=0)):
        assert SamplingParams(**greedy) == SamplingParams(temperature=0)
    assert SamplingParams(top_k=-1, stop='') == SamplingParams() == SamplingParams(stop=['', ''])
    floats = SamplingParams(50.0, top_k=3.0, seed=-7.0, stop_tokens=[4.0], logprobs=2.0)
    assert repr(floats) == repr(SamplingParams(50, top_k=3, seed=-7, stop_tokens=(4,), logprobs=2))


def test_a_dict_overrides_the_defaults_and_only_those_that_it_names():
    defaults = SamplingParams(temperature=0.5, top_k=7, stop='x', seed=3)
    assert defaults.stop == ('x',) and SamplingParams.from_dict({}, defaults) == defaults
    given = SamplingParams.from_dict({'top_k': 2, 'stop': ['a', 'b']}, defaults)
    assert given == SamplingParams(temperature=0.5, top_k=2, stop=('a', 'b'), seed=3)
    nothing = {'top_k': None, 'stop': '', 'stop_tokens': [], 'seed': -1, 'top_p': {},
               'unknown': None}
    assert SamplingParams.from_dict(nothing, defaults) == defaults


@pytest.mark.parametrize('wrong, named', [(dict(stop=['a'] * 17), '17 texts, at most 16'),
                                          (dict(logprobs=21), 'logprobs=21: must be at most 20')])
def test_a_dict_has_limits(wrong, named):
    with pytest.raises(UserError, match=named):
        SamplingParams.from_dict(wrong)
    assert SamplingParams(**wrong)  # from Python there are none


@pytest.mark.parametrize('key, near', [('top-k', "'top_k'"), ('temprature', "'temperature'"),
                                       ('zzz', ''), (5, '')])
def test_an_unknown_key_is_refused(key, near):
    with pytest.raises(UserError) as caught:
        SamplingParams.from_dict({'seed': 1, key: 1})
    before, after = str(caught.value).split('allowed')
    assert repr(key) in before and ('did you mean' in before) == bool(near) and near in before
    assert all(name in after for name in NAMES)


def test_huge_and_deep_values_make_short_messages():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (10 ** 5000, [0] * 10 ** 5, 'x' * 10 ** 5, deep):
        refusal(temperature=value)


def test_seeds_of_samples_differ_and_the_first_is_the_seed_given():
    assert [sample_seed(seed, 0) for seed in (5, -1, 2 ** 64 - 1)] == [5, -1, 2 ** 64 - 1]
    seeds = [sample_seed(seed, k) for seed in (0, 1, 2) for k in range(1, 100)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0
