"""lab/scripts/engine_host.py: every step that is timed decodes all rows."""
import json

from engine.engine import Engine
from lab.scripts import engine_host


def test_all_rows_decode_in_the_steps_that_are_timed(tmp_path, monkeypatch, capsys):
    steps, step = [], Engine.step

    def counted(engine):
        events = step(engine)
        steps.append((engine.asynchronous, len(events)))
        return events
    monkeypatch.setattr(Engine, 'step', counted)
    for name, value in (('ROWS', 4), ('WARM_UP', 6), ('STEPS', 5)):
        monkeypatch.setattr(engine_host, name, value)
    engine_host.main([f'--save={tmp_path}/host.json'])
    found = json.loads((tmp_path / 'host.json').read_text())
    assert found['rows'] == 4 and found['steps'] == 5
    for times in found['milliseconds'].values():
        assert min(times['synchronous'], times['asynchronous']) > 0
    assert capsys.readouterr().out.count('asynchronous') == 3
    for asynchronous in (False, True):
        timed = [n for kind, n in steps if kind == asynchronous]
        assert timed.count(4) >= 3 * 5 and timed[-5:] == [4] * 5
