"""The committed figures: pages are what their JSON files make, and what README and the guide quote stands in them."""
import json
import re
from pathlib import Path

import pytest

from scripts import nanogpt_parity, rope_finetune

ROOT = Path(nanogpt_parity.__file__).resolve().parent.parent
PARTS = {part: json.loads((nanogpt_parity.RESULTS / f'{part}.json').read_text()) for part in nanogpt_parity.PARTS}
RUNS = [json.loads(path.read_text()) for path in sorted(rope_finetune.RESULTS.glob('*-seed*.json'))]


def prose(name):
    return ' '.join((ROOT / name).read_text().split())


@pytest.mark.parametrize('page, table', [(nanogpt_parity.RESULTS, lambda: nanogpt_parity.table(PARTS)),
                                         (rope_finetune.RESULTS, lambda: rope_finetune.table(RUNS))], ids=['nanogpt', 'rope'])
def test_pages_are_made_from_their_json_files(page, table):
    assert (page / 'README.md').read_text() == table()


def test_parts_were_measured_in_one_setting():
    for part in PARTS.values():
        assert {**part, **nanogpt_parity.setting()} == part
    assert len({(part['hardware'], part['torch'], part['nanogpt']) for part in PARTS.values()}) == 1


def test_readme_quotes_the_comparison_with_nanogpt():
    ratio, recipe, exchange = PARTS['speed']['ratio'], PARTS['recipe'], PARTS['exchange']
    logits = max(exchange[writer]['max_logit_difference'] for writer in ('nanoGPT', 'ours'))
    wanted = (r'over (\d+) steps .* agree to (\S+), logits of exchanged checkpoints to (\S+), .* does ([\d.]+) times '
              r'.* runs, ([\d.]+) to ([\d.]+)\); .* ends at ([\d.]+) .* ends at ([\d.]+) \(')
    quoted = re.search(wanted, prose('README.md')).groups()
    assert [float(x) for x in quoted] == [
        PARTS['curves']['steps'], pytest.approx(PARTS['curves']['max_loss_difference'], rel=1e-6),
        pytest.approx(logits, rel=0.05), pytest.approx(ratio['median'], abs=0.005), pytest.approx(ratio['min'], abs=0.005),
        pytest.approx(ratio['max'], abs=0.005), pytest.approx(recipe['ours']['val_loss'], abs=5e-4),
        pytest.approx(recipe['nanoGPT']['val_loss'], abs=5e-4)]


def test_the_guide_quotes_the_rope_runs():
    loss = {run['run']: run['val_loss'] for run in RUNS}
    wanted = (r'stands at ([\d.]+) after .* it is ([\d.]+), where vanilla trained on has ([\d.]+), and at T=128 \(B=6\) '
              r'([\d.]+)\. RoPE from scratch .* has ([\d.]+) \(T=128: ([\d.]+)\)')
    quoted = re.search(wanted, prose('docs/from_nanogpt.md')).groups()
    names = ('vanilla', 'into-rope', 'vanilla-more', 'into-rope-T128', 'rope', 'rope-T128')
    assert [float(x) for x in quoted] == [pytest.approx(loss[name], abs=5e-4) for name in names]
