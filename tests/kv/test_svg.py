"""The drawing of a plan: each layer, slot and line once, bars to scale, all texts within it."""
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.__main__ import main
from kv.plan import KV_DTYPES, plan_kv
from kv.svg import BAR, DARK, LIGHT, layers_text, plan_svg, slot_text
from tests.helpers.plans import plan_configs

ROOT = Path(__file__).resolve().parents[2]
STACK = dict(layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, n_kv_head=1,
             window_size=256, pos_embedding='rope')


def drawn(plan, max_seq_len=1024, kv_dtype='bfloat16'):
    svg = ElementTree.fromstring(plan_svg(plan, max_seq_len, kv_dtype))
    for element in svg.iter():
        element.tag = element.tag.removeprefix('{http://www.w3.org/2000/svg}')
    return svg


def texts(element):
    return [text.text for text in element.iter('text')]


def ends(line):
    return tuple(float(line.get(name)) for name in ('x1', 'y1', 'x2', 'y2'))


@pytest.mark.filterwarnings('ignore:layer_pattern')
@settings(max_examples=30, deadline=None)
@given(config=plan_configs(max_layers=96), kv_dtype=st.sampled_from(sorted(KV_DTYPES)),
       max_seq_len=st.sampled_from([1, 39, 1024, 131_072, 10 ** 9]))
def test_any_plan_is_drawn(config, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    svg = drawn(plan, max_seq_len, kv_dtype)
    groups = {group.get('id'): group for group in svg.findall('g')}
    assert len(groups) == len(plan.layers) + len(plan.slots)
    upright = []
    for slot in plan.slots:
        group = groups[f'slot-{slot.index}']
        line, _ = map(ends, group.findall('line'))
        upright.append(line)
        length = float(group.find('rect').get('width'))
        held = slot.capacity(max_seq_len) / max_seq_len
        assert length == pytest.approx(max(2, BAR * held), abs=0.01)
        [text] = texts(group)
        assert text.startswith(slot_text(slot, max_seq_len)) and layers_text(slot) in text
        assert text.endswith(f' {slot.nbytes(1, max_seq_len, kv_dtype):,}')
    for a, b in itertools.combinations(upright, 2):
        assert a[0] != b[0] or a[3] < b[1] or b[3] < a[1]

    for layer in plan.layers:
        group = groups[f'layer-{layer.index}']
        assert texts(group)[0].split() == [layer.kind[0].upper(), str(layer.index)]
        assert (group.find('rect').get('rx') == '0') == (layer.kind == 'global')
        dot, line = group.find('circle'), group.find('line')
        assert dot.get('class') == line.get('class') == ('owner' if layer.owns else 'reader')
        x, top, _, bottom = upright[layer.slot]
        y = float(dot.get('cy'))
        assert float(dot.get('cx')) == x and ends(line)[1] == ends(line)[3] == y
        assert ends(line)[2] > x if layer.owns else ends(line)[2] == x
        assert y == top if layer.owns else top < y <= bottom

    ours, vanilla = (each.nbytes(1, max_seq_len, kv_dtype) for each in (plan, plan.vanilla()))
    *_, all_slots, gpt2, ratio = texts(svg)
    assert all_slots.endswith(f' {ours:,}') and gpt2.endswith(f' {vanilla:,}')
    assert (f'{vanilla / ours:,.1f} times smaller' if vanilla > ours else 'as large as') in ratio
    assert ratio.endswith(f'vanilla GPT-2 in {kv_dtype}')

    width, height = float(svg.get('width')), float(svg.get('height'))
    for text in svg.iter('text'):
        right = float(text.get('x')) + 0.6 * 12 * len(text.text)
        assert right < width and 12 < float(text.get('y')) < height


def test_the_full_stack_says_what_the_documents_say():
    svg = drawn(plan_kv(GPTConfig(**STACK)))
    said = [text.split('  ') for text in texts(svg)]
    row = next(row for row in said if row[0].startswith('slot 2'))
    assert [each.strip() for each in row if each] == ['slot 2, global: all 1,024 tokens', '5 11',
                                                      '262,144']
    assert [row[-1].strip() for row in said[-3:-1]] == ['524,288', '37,748,736']
    assert '72.0 times smaller than vanilla GPT-2 in bfloat16' in said[-1][0]
    assert [svg.find(name).get('id') for name in ('title', 'desc')] == (
        svg.get('aria-labelledby').split())
    assert 'slot 2, global: all 1,024 tokens 5 11 262,144' in svg.find('desc').text


def test_the_legend_explains_only_what_is_drawn():
    vanilla, stack = (' '.join(texts(drawn(plan_kv(GPTConfig(**c))))) for c in ({}, STACK))
    for text in ('local, sees the last 256 tokens', 'reads them'):
        assert text in stack and text not in vanilla


@pytest.mark.parametrize('fields, T, held, layers', [
    (dict(share_global_kv=True), 1024, 'global: all 1,024 tokens', '0 1 2 3 ... 11'),
    (dict(layer_pattern='L', window_size=9), 10, 'local: the last 9 tokens', '0'),
    (dict(layer_pattern='L', window_size=9), 1, 'local: all 1 token', '0'),
    (dict(kv_tied='all'), 8, 'global: all 8 tokens, K = V', '0'),
    (dict(kv_latent=128, rope_fraction_global=0, pos_embedding='rope'), 8,
     'global: all 8 tokens, latent of 128', '0')])
@pytest.mark.filterwarnings('ignore:layer_pattern')
def test_what_a_slot_holds(fields, T, held, layers):
    slot = plan_kv(GPTConfig(**fields)).slots[0]
    assert (slot_text(slot, T), layers_text(slot)) == (f'slot 0, {held}', layers)


@pytest.mark.parametrize('colours', [LIGHT, DARK])
def test_text_has_enough_contrast(colours):
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(*pair):
        low, high = sorted(luminance(colours[name]) for name in pair)
        return (high + 0.05) / (low + 0.05)
    for text, ground in (('ink', 'page'), ('dim', 'page'), ('ink', 'pale'), ('on', 'blue')):
        assert contrast(text, ground) >= 4.5
    assert contrast('thin', 'page') >= 3 and contrast('blue', 'page') >= 3


def test_the_program_writes_it_over_what_was_there(tmp_path, capsys):
    file = tmp_path / 'plan.svg'
    file.write_text('old')
    main([f'--svg={file}', '--max_seq_len=64', '--kv_dtype=int8', '--batch=3', '--json=True'])
    assert file.read_text(encoding='utf-8') == plan_svg(plan_kv(GPTConfig()), 64, 'int8')
    json.loads(capsys.readouterr().out.splitlines()[-1])
    with pytest.raises(UserError, match='cannot be written: No such file'):
        main([f'--svg={tmp_path}/none/plan.svg'])


def test_the_committed_drawing_is_what_the_command_makes(tmp_path):
    main(['config/train_gpt2_mqa_local.py', f'--svg={tmp_path / "plan.svg"}'])
    committed = ROOT / 'results' / 'kv' / 'plan.svg'
    assert (tmp_path / 'plan.svg').read_bytes() == committed.read_bytes()
    assert '--svg=results/kv/plan.svg' in (ROOT / 'Makefile').read_text()
