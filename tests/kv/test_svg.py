"""The drawing of a plan: each layer and slot once, bars to scale, all texts within it."""
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.gpt_config import GPTConfig
from kv.__main__ import main
from kv.plan import KV_DTYPES, plan_kv
from kv.svg import BAR, lanes_of, plan_svg, slot_text
from tests.helpers.plans import plan_configs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.filterwarnings('ignore:layer_pattern')
@settings(max_examples=30, deadline=None)
@given(config=plan_configs(max_layers=96), kv_dtype=st.sampled_from(sorted(KV_DTYPES)),
       max_seq_len=st.sampled_from([1, 39, 1024, 131_072]))
def test_any_plan_is_drawn(config, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    svg = ElementTree.fromstring(plan_svg(plan, max_seq_len, kv_dtype))
    for element in svg.iter():
        element.tag = element.tag.removeprefix('{http://www.w3.org/2000/svg}')
    words = [text.text for text in svg.iter('text')]
    bars = [bar for bar in svg.iter('rect') if bar.get('height') == '10']

    for slot, bar in zip(plan.slots, bars):
        held = slot.capacity(max_seq_len) / max_seq_len
        assert float(bar.get('width')) == pytest.approx(max(2, BAR * held), abs=0.01)
        [row] = [text for text in words if text.startswith(f'slot {slot.index},')]
        assert row.startswith(slot_text(slot, max_seq_len))
        assert row.endswith(f' {slot.nbytes(1, max_seq_len, kv_dtype):,} bytes')
    ours, vanilla = (each.nbytes(1, max_seq_len, kv_dtype) for each in (plan, plan.vanilla()))
    *_, all_slots, gpt2, ratio = words
    assert all_slots.endswith(f' {ours:,} bytes') and gpt2.endswith(f' {vanilla:,} bytes')
    assert f'{vanilla / ours:,.1f} times smaller than vanilla GPT-2 in {kv_dtype}' in ratio

    # a dot in each layer's row, in the lane of its slot, whose line goes from the first to the last
    dots = list(svg.iter('circle'))
    assert len(dots) == len(plan.layers)
    lines = {tuple(float(line.get(name)) for name in ('x1', 'y1', 'x2', 'y2'))
             for line in svg.iter('line')}
    heights = [float(dot.get('cy')) for dot in dots]
    assert heights == sorted(set(heights))
    for slot in plan.slots:
        x, = {float(dots[i].get('cx')) for i in slot.layers}
        assert (x, heights[slot.owner], x, heights[slot.layers[-1]]) in lines
        assert [dots[i].get('class') for i in slot.layers] == (
            ['owner'] + ['reader'] * (len(slot.layers) - 1))
    taken = [(lane, i) for slot, lane in zip(plan.slots, lanes_of(plan.slots))
             for i in range(slot.owner, slot.layers[-1] + 1)]
    assert len(taken) == len(set(taken))

    width, height = float(svg.get('width')), float(svg.get('height'))
    for text in svg.iter('text'):
        right = float(text.get('x')) + 0.6 * 12 * len(text.text)
        assert right < width and 12 < float(text.get('y')) < height


@pytest.mark.parametrize('fields, T, held', [
    (dict(layer_pattern='L', window_size=9), 10, 'local: 9 tokens'),
    (dict(kv_tied='all'), 8, 'global: 8 tokens, K = V'),
    (dict(kv_latent=128, rope_fraction_global=0, pos_embedding='rope'), 8,
     'global: 8 tokens, latent of 128')])
def test_what_a_slot_holds(fields, T, held):
    assert slot_text(plan_kv(GPTConfig(**fields)).slots[0], T) == f'slot 0, {held}'


def test_the_committed_drawing_is_what_the_command_makes(tmp_path):
    file = tmp_path / 'plan.svg'
    file.write_text('old')
    main(['config/train_gpt2_mqa_local.py', f'--svg={file}'])
    assert file.read_bytes() == (ROOT / 'results' / 'kv' / 'plan.svg').read_bytes()
    assert '--svg=results/kv/plan.svg' in (ROOT / 'Makefile').read_text()
