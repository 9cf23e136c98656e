"""Finished results: those with the same settings, wherever and whenever they were made."""
import json

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


def test_files_of_two_machines_are_joined(results):
    """Settings are stored as differences, each file's from its own first line."""
    here = results()
    row, path = here.ladder.rows['+ MQA'], here.path
    found = {'fingerprint': here.ladder.fingerprint(row), 'settings': here.ladder.weighty(row)}
    whole, files = {}, []
    for first in (1, 3):
        for seed in (first, first + 1, first):
            beta1 = 0.5 if seed == 4 else 0.9
            whole['mqa', seed] = {'row': '+ MQA', 'seed': seed, **found,
                                  'settings': found['settings'] | {'beta1': beta1, 'at': first}}
            here.write(row, seed, whole['mqa', seed])
        here.compact()
        assert here.runs() == {key: run for key, run in whole.items() if key[1] >= first}
        base, *lines = path.read_text().splitlines()
        assert len(lines) == 2 and json.loads(base)['base']['at'] == first
        assert json.loads(lines[0])['settings'] == {}
        files.append(path.read_text())
        path.unlink()
    path.write_text(''.join(files))
    assert here.runs() == whole
    here.compact()
    assert here.runs() == whole and path.read_text().count('"base"') == 1


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
