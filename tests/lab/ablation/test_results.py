"""Finished results: those with the same settings, wherever and whenever they were made."""

import pytest

from config.errors import UserError
from lab.ablation.results import Results
from tests.lab.ablation.conftest import CONFIG

# flags that change no training
LOGS = ['--log_interval=7', '--eval_iters=1', '--device=cpu']


@pytest.fixture
def results(ladder_of):
    return lambda *flags: Results(ladder_of(CONFIG, *flags))


def test_what_was_written_counts_for_the_same_settings_alone(results):
    here = results()
    row = here.ladder.rows['+ MQA']
    assert here.read(row, 1) is None
    found = {'fingerprint': here.ladder.fingerprint(row), 'settings': here.ladder.weighty(row)}
    here.write(row, 1, found)
    whole = {'row': '+ MQA', 'seed': 1, **found}
    assert here.read(row, 1) == whole and here.read(row, 2) is None
    for flags, same in (LOGS, True), (['--max_iters=7'], False):
        other = results(*flags)
        assert (other.read(other.ladder.rows['+ MQA'], 1) is not None) == same
    int8 = here.ladder.rows['+ int8 KV']
    here.write(int8, 1, found)
    assert here.read(int8, 1) is None  # a different row's
    here.write(row, 1, found | {'val_loss': 2.0})
    assert here.read(row, 1)['val_loss'] == 2.0  # the last line counts


def test_a_new_key_of_train_changes_nothing_and_another_default_does(results):
    here = results()
    row = here.ladder.rows['+ MQA']
    settings = {**here.ladder.weighty(row)}
    found = {'fingerprint': here.ladder.fingerprint(row), 'settings': settings}
    del settings['beta1']      # as if the key had not existed then
    here.write(row, 1, found)
    assert here.read(row, 1)
    settings['beta1'] = 0.8    # as if this had been its default
    here.write(row, 1, found)
    assert here.read(row, 1) is None
    with here.path.open('a') as file:
        file.write('{')
    with pytest.raises(UserError, match='runs.jsonl, line 3 cannot be read.*delete it'):
        here.read(row, 1)
