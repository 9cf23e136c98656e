"""bench.py --mode=recompute and lengths on tiny shapes."""
import pytest

import bench
from config.errors import UserError
from lab.benchmarks import table
from tests.programs.support import flags
from tests.programs.test_bench_modes import (  # noqa: F401
    SMALL,
    VANILLA,
    _in_tiny_data,
    ratios,
    run_bench,
)
from training import loss


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setitem(loss.CHUNK_BYTES, 'cpu', 4 * 40 * 5)  # 5 tokens of the tiny alphabet


def test_policies_side_by_side(capsys):
    found, lines = run_bench(capsys, SMALL, mode='recompute', against='vanilla', contexts=24,
                             batch_sizes=2, policies='none,selective,block,every:2')
    assert [(c['model'], c['context']) for c in found['cells']] == [('ours', 24), ('vanilla', 24)]
    for cell in found['cells']:
        sides = cell['sides']
        assert list(sides) == ['none', 'selective', 'block', 'every:2', 'whole logits']
        held = {name: side['memory']['activations'] for name, side in sides.items()}
        assert held['none'] > held['selective'] > held['block'] > held['every:2']
        # the last norm's output, which lm_head keeps
        assert held['whole logits'] - held['none'] == 4 * 2 * 24 * 16
        for name, side in sides.items():
            assert side['activations_saved'] == pytest.approx(1 - held[name] / held['none'])
            assert side['gradient_difference'] < 1e-6 and len(side['step_ms']['each']) == 5
            if name != 'none':
                assert cell['ratios']['step_time'][name]['each'] == ratios(
                    side['step_ms']['each'], sides['none']['step_ms']['each'])
        assert sides['none']['gradient_difference'] == 0 and 0 < cell['loss_saved'] < 1
        peaks = [sides[name]['memory']['loss_peak'] for name in ('none', 'whole logits')]
        assert cell['loss_saved'] == pytest.approx(1 - peaks[0] / peaks[1])
    assert sum(line.split()[:1] == ['vanilla'] for line in lines) == 2 * 5


def test_lengths_against_vanilla(capsys, tmp_path):
    found, lines = run_bench(capsys, SMALL, mode='lengths', against='vanilla', contexts='8,40',
                             batch_sizes='1,3', recompute='block', save=tmp_path / 'lengths.json')
    assert found['recompute'] == 'block' and found['models']['vanilla']['block_size'] == 40
    cells = [(cell['context'], cell['sides']['ours']['batch']) for cell in found['cells']]
    assert cells == [(8, 1), (8, 3), (40, 1), (40, 3)]
    for cell in found['cells']:
        ours, vanilla = cell['sides']['ours'], cell['sides']['vanilla']
        for side in (ours, vanilla):
            tokens = side['batch'] * cell['context']
            each = side['tokens_per_second']['each']
            assert each == ratios([1000 * tokens] * 5, side['step_ms']['each'])
        ratio = cell['ratios']['tokens_per_second']['vanilla']['each']
        assert ratio == ratios(vanilla['step_ms']['each'], ours['step_ms']['each'])
    page = table.page({'lengths': table.read(tmp_path / 'lengths.json')})
    assert '## lengths' in page and page.count('| vanilla |') == 4


@pytest.mark.parametrize('settings, named', [
    (dict(mode='recompute', policies='block,none'), ['policies', "'none'"]),
    (dict(mode='recompute', policies='none,block,block'), ['policies', 'once']),
    (dict(mode='recompute', policies='none,blocks'), ["'blocks'", "'every:K'"]),
    (dict(mode='lengths', recompute='every:3'), ["'every:3'", 'n_layer=2']),
    (dict(mode='lengths', against='hf'), ["'hf'", "'lengths'"]),
    (dict(mode='lengths', compile=True), ['compile=True']),
    (dict(mode='recompute', budget='1GB'), ['budget']),
])
def test_bad_settings(settings, named):
    with pytest.raises(UserError) as caught:
        bench.main(flags(VANILLA | settings))
    assert all(text in str(caught.value) for text in named)
