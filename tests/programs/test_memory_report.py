"""train.py's memory report and recompute='auto'."""
import re

import pytest

from config.errors import UserError
from tests.programs.support import BOTH, FULL_STACK, TINY, losses, run_train

LESS = dict(FULL_STACK, n_layer=4, layer_pattern='LG', kv_share='AB')  # a prediction takes as long as there are layers


@BOTH
def test_the_report_changes_no_loss(tmp_path, capsys, config):
    config = dict(config, dropout=0.1, max_iters=3, eval_interval=2, n_layer=3)
    run_train(tmp_path / 'without', config)
    assert 'predicted' not in capsys.readouterr().out
    run_train(tmp_path / 'with', config, memory_report=True)
    out = capsys.readouterr().out
    assert losses(tmp_path / 'with') == losses(tmp_path / 'without')
    for name in ('parameters', 'gradients', 'optimizer state', 'activations', 'logits and loss', 'peak'):
        predicted, measured = re.search(rf'^{name} +([\d.]+ \w+) +([\d.]+ \w+) *$', out, re.M).groups()
        assert predicted == measured
    assert re.search(r'^residual stream +', out, re.M) and re.search(r'^0 (to 2)? +(local|global) +', out, re.M)
    assert [policy for policy in ('none', 'selective', 'mlp', 'block', 'sqrt') if re.search(f'^{policy} +.*%', out, re.M)] \
        == ['none', 'selective', 'mlp', 'block', 'sqrt']


def test_every_run_says_once_what_it_takes(tmp_path, capsys):
    run_train(tmp_path, max_iters=3, eval_interval=2)
    out = capsys.readouterr().out
    assert out.count('memory: ') == 1
    assert re.search(r'^memory: parameters 26.7 kB, gradients 26.7 kB, optimizer 53.4 kB,\n'
                     r'        peak [\d.]+ [MG]B \(of the whole process, with Python and torch\)$', out, re.M)


@pytest.mark.parametrize('budget, policy', [('400KB', 'selective'), ('300KB', 'block')])
def test_auto_takes_the_fastest_that_fits(tmp_path, capsys, budget, policy):
    config = dict(LESS, max_iters=2, eval_interval=2, eval_iters=1)
    run_train(tmp_path / 'auto', config, recompute='auto', memory_budget=budget)
    assert re.search(rf"^recompute='auto' is '{policy}': predicted peak [\d.]+ [kM]B, budget memory_budget={budget}$",
                     capsys.readouterr().out, re.M)
    run_train(tmp_path / 'given', config, recompute=policy)
    assert losses(tmp_path / 'auto') == losses(tmp_path / 'given')


def test_auto_without_a_budget_takes_what_is_free(tmp_path, capsys):
    run_train(tmp_path, TINY, max_iters=1, eval_interval=1, recompute='auto')
    assert re.search(r"^recompute='auto' is 'none': .* budget .*B, 90% of what is free$", capsys.readouterr().out, re.M)


def test_auto_says_by_how_much_nothing_fits(tmp_path):
    with pytest.raises(UserError, match=r"no policy fits memory_budget=100KB; the least is .*\(recompute='.*', batch_size=4\), "
                                        r'.* too much: give a smaller batch_size'):
        run_train(tmp_path, TINY, recompute='auto', memory_budget='100KB')
    with pytest.raises(UserError, match="memory_budget='lots'"):
        run_train(tmp_path, recompute='auto', memory_budget='lots')
