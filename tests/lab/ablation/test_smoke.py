"""The smoke ladder on real text: every row measured, every table and picture made."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ablate

ROOT = Path(ablate.__file__).resolve().parent


@pytest.mark.slow
def test_the_smoke_ladder(tmp_path):
    command = [sys.executable, 'ablate.py', 'config/ablate_smoke.py', f'--folder={tmp_path}',
               '--device=cpu', '--json=True']
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    rows = {row['name']: row for row in summary['rows']}
    assert len(rows) == 5
    for row in rows.values():
        assert row['seeds'] == [1, 2] and not row['seeds_missing']
        assert 1.5 < row['val_loss']['mean'] < 4 and row['val_loss']['sd'] > 0
        assert row['cache_minus_forward_largest'] < (2e-3 if row['name'] == '+ int8 KV' else 1e-4)
        bits = row['val_loss']['mean'] / 0.693147  # one byte per character
        assert row['bits_per_byte']['mean'] == pytest.approx(bits, rel=0.01)
    int8, plain = rows['+ int8 KV'], rows['+ window, wider MLP']
    assert int8['trained_as'] == plain['name'] and 0 < abs(int8['against_above']['mean']) < 0.01
    assert int8['kv']['smaller'] > 14 and int8['against_first']['seeds'] == [1, 2]
    assert {path.stem for path in tmp_path.glob('*.png')} == {'pareto'}
    report = (tmp_path / 'report.md').read_text()
    assert '\n## Rows' in report and report.count('![') == 1
    for title in ('The ladder', 'KV cache'):
        assert f'\n{title}' in report and title in run.stdout
