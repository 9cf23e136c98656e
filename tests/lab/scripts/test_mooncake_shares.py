"""Which earlier request a request belongs to, by the hashes of its blocks."""
import json

import pytest

from config.errors import UserError
from lab.scripts.mooncake_shares import classify, main


def row(timestamp, input_length, *hash_ids):
    return {'timestamp': timestamp, 'input_length': input_length, 'output_length': 7,
            'hash_ids': list(hash_ids)}


ROWS = [row(0, 1100, 0, 1, 2), row(1000, 700, 0, 3),
        row(5000, 1700, 0, 1, 4, 5),        # the third block of the first was incomplete
        row(6000, 1100, 0, 1, 2),           # the first again
        row(9000, 1800, 0, 1, 4, 6),        # leaves the third after its complete blocks
        row(9500, 2000, 0, 1, 4, 7, 8)]


def test_kinds_of_requests():
    kinds, pauses, growth = classify(ROWS)
    assert kinds == {'new': 2, 'continued': 3, 'repeated': 1}
    # of several that it continues, the newest counts
    assert pauses == [5.0, 4.0, 0.5] and growth == [600, 100, 200]
    kinds, *_ = classify([row(0, 2048, 0, 1, 2, 3), row(1, 2048, 0, 1, 4, 5)])
    assert kinds == {'new': 1, 'different inside': 1}


def test_the_program(tmp_path, capsys):
    trace = tmp_path / 'trace.jsonl'
    trace.write_text('\n'.join(map(json.dumps, ROWS)))
    main([str(trace), f'--save={tmp_path / "found.json"}'])
    found = json.loads((tmp_path / 'found.json').read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert found['shares'] == {'continued': 0.5, 'new': 2 / 6, 'repeated': 1 / 6}
    trace.write_text('{"timestamp": 1}')
    with pytest.raises(UserError, match='not a trace'):
        main([str(trace)])
