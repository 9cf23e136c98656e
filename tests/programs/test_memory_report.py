"""train.py's memory report and recompute='auto'."""
import re

import pytest

from config.errors import UserError
from tests.programs.support import BOTH, FULL_STACK, TINY, losses, run_train

# the time of a prediction grows with the number of layers
LESS = dict(FULL_STACK, n_layer=4, layer_pattern='LG', kv_share='AB')


@BOTH
def test_the_report_changes_no_loss(tmp_path, capsys, config):
    config = dict(config, dropout=0.1, max_iters=3, eval_interval=2, n_layer=3)
    run_train(tmp_path / 'without', config)
    out = capsys.readouterr().out
    assert 'predicted' not in out and out.count('memory: ') == 1
    run_train(tmp_path / 'with', config, memory_report=True)
    out = capsys.readouterr().out
    assert losses(tmp_path / 'with') == losses(tmp_path / 'without')
    for name in ('parameters', 'gradients', 'optimizer state', 'activations', 'logits and loss',
                 'peak'):
        row = re.search(rf'^{name} +([\d.]+ \w+) +([\d.]+ \w+) *$', out, re.M)
        predicted, measured = row.groups()
        assert predicted == measured
    for policy in ('none', 'selective', 'mlp', 'block', 'sqrt'):
        assert re.search(f'^{policy} +.*%', out, re.M)


@pytest.mark.parametrize('budget, policy', [('400KB', 'selective'), ('300KB', 'block')])
def test_auto_takes_the_fastest_that_fits(tmp_path, capsys, budget, policy):
    config = dict(LESS, max_iters=2, eval_interval=2, eval_iters=1)
    run_train(tmp_path / 'auto', config, recompute='auto', memory_budget=budget)
    message = (rf"^recompute='auto' is '{policy}': predicted peak [\d.]+ [kM]B, "
               rf'budget memory_budget={budget}$')
    assert re.search(message, capsys.readouterr().out, re.M)
    run_train(tmp_path / 'given', config, recompute=policy)
    assert losses(tmp_path / 'auto') == losses(tmp_path / 'given')


def test_auto_without_a_budget_takes_what_is_free(tmp_path, capsys):
    run_train(tmp_path, TINY, max_iters=1, eval_interval=1, recompute='auto')
    message = r"^recompute='auto' is 'none': .* budget .*B, 90% of what is free$"
    assert re.search(message, capsys.readouterr().out, re.M)


@pytest.mark.parametrize('budget, message', [
    ('100KB', r"no policy fits memory_budget=100KB; the least is .*\(recompute='.*', "
              r'batch_size=4\), .* too much: give a smaller batch_size'),
    ('lots', "memory_budget='lots'")])
def test_budgets_that_are_refused(tmp_path, budget, message):
    with pytest.raises(UserError, match=message):
        run_train(tmp_path, TINY, recompute='auto', memory_budget=budget)
