"""`python -m training.memory` and the search behind it."""
import json
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import training.loss
from config.errors import UserError
from config.gpt_config import GPTConfig
from training.memory import Plans, largest_batch, main
from training.memory_use import Predictor

FLAGS = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=4',
         '--dataset=unheard_of',
         '--device=cpu', '--gradient_accumulation_steps=1']


LINES = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=3)


@given(LINES, LINES, st.integers(0, 30), st.integers(1, 1500), st.integers(1, 60))
def test_largest_batch_where_the_peak_falls_or_rises_on_the_way(below, above, whole, budget, start):
    asked = []

    def peak(n):
        asked.append(n)
        return max(fixed + each * n for fixed, each in (below if n <= whole else above))
    found = largest_batch(peak, budget, start, whole)
    assert len(asked) < 40
    fitting = [n for n in range(1, 1502) if peak(n) <= budget]
    assert found == max(fitting, default=0)


@pytest.mark.parametrize('policy, chunked', [('none', True), ('block', True), ('none', False)])
def test_predicted_peaks_fall_where_the_search_expects_it(monkeypatch, policy, chunked):
    vocab, T = 500, 16
    # up to 5 sequences and a bit
    monkeypatch.setitem(training.loss.CHUNK_BYTES, 'cpu', 4 * vocab * (5 * T + 3))
    config = GPTConfig(vocab_size=vocab, n_layer=1, n_head=2, n_embd=16, block_size=T)
    s = SimpleNamespace(gradient_accumulation_steps=1, compile=False, batch_size=3, block_size=T,
                        chunked_loss=chunked,
                        attention_backend='auto', optimizer='adamw', offload_optimizer=False,
                        int8_forward=False, attention_z_loss=0.0)
    plans = Plans(s, config, torch.device('cpu'), torch.float32)
    peaks = [plans.memory(policy, n).peak for n in range(1, 9)]
    assert [n for n in range(1, 8) if peaks[n] < peaks[n - 1]] == [5] * chunked
    assert plans.whole == 5 * chunked
    for budget in (peaks[0] - 1, peaks[0], peaks[5] - 1, peaks[5], peaks[6]):
        n = largest_batch(lambda n: plans.memory(policy, n).peak, budget, 3, plans.whole)
        assert n == 0 or plans.memory(policy, n).peak <= budget
        assert plans.memory(policy, n + 1).peak > budget
        assert all(peak > budget for peak in peaks[n:])


def test_figures_are_predictions(capsys):
    main([*FLAGS, '--batch_size=6', '--budget=61MB', '--json=True'])  # small: the search ends soon
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    rows = {row['policy']: row for row in document['policies']}
    assert list(rows) == ['none', 'selective', 'mlp', 'block', 'sqrt']
    predictor = Predictor(GPTConfig(vocab_size=50304, bias=False, n_layer=2, n_head=2, n_embd=32,
                                    block_size=32))
    for policy in ('none', 'block'):
        row, at = rows[policy], predictor.predict(policy, 6)
        n = row['largest_batch']
        assert (row['peak'], row['activations']) == (at.peak, at.activations)
        assert n > 6 and row['largest_peak'] == predictor.predict(policy, n).peak <= 61e6
        assert predictor.predict(policy, n + 1).peak > 61e6
    assert rows['none']['recomputed'] == 0
    assert rows['block']['recomputed'] > 0
    assert re.search(rf"^none .* {rows['none']['largest_batch']} ", out, re.M)


@pytest.mark.parametrize('flag, words', [
    ('--budget=much', "budget='much': a number of bytes is needed"),
    ('--budget=1MB', 'nothing fits; the least is '),
    ('--batch_size=0', 'must be at least 1'), ('--device=nowhere', 'cannot be used here'),
    ('--n_head=5', 'n_head')])
def test_wrong_input_is_one_line(flag, words):
    with pytest.raises(UserError, match=words):
        main([*FLAGS, flag])
