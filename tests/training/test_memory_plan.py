"""`python -m training.memory` and the search behind it."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from training.memory import Predictor
from training.memory_plan import LARGEST, largest_batch, main

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=32', '--batch_size=4', '--dataset=unheard_of',
         '--device=cpu', '--gradient_accumulation_steps=1']


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=4), st.integers(1, 5000),
       st.integers(1, 300))
def test_largest_batch_is_the_largest_that_fits(lines, budget, start):
    asked = []

    def peak(n):
        asked.append(n)
        return max(fixed + each * n for fixed, each in lines)
    n = largest_batch(peak, budget, start)
    assert len(asked) < 25
    assert n == 0 or peak(n) <= budget
    assert peak(n + 1) > budget


def test_largest_batch_of_a_constant_is_bounded():
    assert largest_batch(lambda n: 5, 10) == LARGEST


def test_figures_are_predictions_and_the_advice_follows_from_them(capsys):
    main([*FLAGS, '--batch_size=6', '--budget=61MB', '--json=True'])  # little: the search ends soon
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    rows = {row['policy']: row for row in document['policies']}
    assert list(rows) == ['none', 'selective', 'mlp', 'block', 'sqrt']
    predictor = Predictor(GPTConfig(vocab_size=50304, bias=False, n_layer=2, n_head=2, n_embd=32, block_size=32))
    for policy in ('none', 'block'):
        row, at = rows[policy], predictor.predict(policy, 6)
        n = row['largest_batch']
        assert (row['peak'], row['activations'], row['fits']) == (at.peak, at.activations, at.peak <= 61e6)
        assert n > 6 and row['largest_peak'] == predictor.predict(policy, n).peak <= 61e6
        assert predictor.predict(policy, n + 1).peak > 61e6
    assert document['fastest'] == document['at_batch_size'] == 'none' and rows['none']['recomputed'] == 0
    assert rows['block']['recomputed'] > 0
    assert document['largest_batch'] == max(row['largest_batch'] for row in rows.values())
    assert '--recompute=none is the fastest that fits' in out


@pytest.mark.parametrize('flag, words', [
    ('--budget=much', "budget='much': a number of bytes is needed"), ('--budget=1MB', 'nothing fits; the least is '),
    ('--batch_size=0', 'must be at least 1'), ('--device=nowhere', 'cannot be used here'), ('--n_head=5', 'n_head')])
def test_wrong_input_is_one_line(flag, words):
    with pytest.raises(UserError, match=words):
        main([*FLAGS, flag])


def test_runs_as_a_program():
    done = subprocess.run([sys.executable, '-m', 'training.memory', '--budget=0'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == "error: budget='0': a number of bytes is needed, as '1GB', '512MiB' or '4096'\n"
