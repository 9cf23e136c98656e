"""Traces: what files say, and what no cache can save."""
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.sessions import trace as traces
from lab.sessions.replay import Known
from lab.sessions.trace import Trace
from tests.helpers.sessions import common, forking, trace_of

SHIPPED = Path(traces.__file__).parent / 'traces'


@pytest.mark.parametrize('name', ['chat', 'editing', 'forking'])
def test_the_shipped_traces(name):
    """Conversations have at most 4,096 tokens, and requests follow those before them."""
    trace = Trace.read(SHIPPED / f'{name}.jsonl')
    assert trace.name == name
    for session in trace.sessions:
        lengths = {-1: trace.system_length}
        for i, request in enumerate(session):
            lengths[i] = lengths[request.after] + request.message + request.reply
            assert request.like < i and request.keep <= request.message
        assert max(lengths.values()) <= 4096


def test_a_message_keeps_what_the_one_before_it_had():
    trace = trace_of(forking(), forking(), system=5)
    first, second, edited, again, *_ = (trace.message(0, i) for i in range(6))
    assert np.array_equal(first, again) and len(edited) == 8
    assert np.array_equal(edited[:3], second[:3]) and edited[3] != second[3]
    assert len(trace.system()) == 5 and not np.array_equal(first, trace.message(1, 0))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12))
def test_what_no_cache_can_save(sequences):
    known = Known()
    for i, tokens in enumerate(sequences):
        longest = max((common(tokens, other) for other in sequences[:i]), default=0)
        assert known.unavoidable(tokens) == len(tokens) - min(longest, len(tokens) - 1) >= 1
        known.add(tokens)
