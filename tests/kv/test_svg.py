"""The drawing of a plan: each layer, slot and line once, bars to scale, no text over another."""
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from string import ascii_uppercase
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config.errors import UserError
from config.gpt_config import GPTConfig
from kv.__main__ import main
from kv.plan import KV_DTYPES, plan_kv
from kv.svg import DARK, LIGHT, layers_text, plan_svg, slot_text
from tests.helpers.plans import plan_configs

ROOT = Path(__file__).resolve().parents[2]
STACK = dict(layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, n_kv_head=1,
             window_size=256, pos_embedding='rope')
pytestmark = pytest.mark.filterwarnings('ignore:layer_pattern')
WIDEST = [dict(n_layer=96), dict(STACK, n_layer=96), dict(
    n_layer=52, layer_pattern='L' * 52, kv_share=ascii_uppercase * 2, window_size=4096)]


def any_plan(test):
    """Run the test for random plans, and for long ones with many lines."""
    for settings_, length in itertools.product(WIDEST, (131_072, 10 ** 12)):
        test = example(config=GPTConfig(**settings_), max_seq_len=length, kv_dtype='int8')(test)
    return settings(max_examples=40, deadline=None)(given(
        config=plan_configs(max_layers=96), kv_dtype=st.sampled_from(sorted(KV_DTYPES)),
        max_seq_len=st.sampled_from([1, 7, 39, 1024, 131_072, 10 ** 9]))(test))


def drawn(plan, max_seq_len=1024, kv_dtype='bfloat16'):
    svg = ElementTree.fromstring(plan_svg(plan, max_seq_len, kv_dtype))
    for element in svg.iter():
        element.tag = element.tag.removeprefix('{http://www.w3.org/2000/svg}')
    return svg


def group(svg, name):
    found, = svg.findall(f"g[@id='{name}']")
    return found


def texts(element):
    return [text.text for text in element.iter('text')]


def box(rect):
    """x and y of the left upper corner and of the right lower one."""
    x, y, width, height = (float(rect.get(name)) for name in ('x', 'y', 'width', 'height'))
    return x, y, x + width, y + height


def text_box(text):
    """A box that the text is sure to fit in, in any common font."""
    x, y, size = (float(text.get(name)) for name in ('x', 'y', 'font-size'))
    width = 0.62 * size * len(text.text)
    x -= width * {None: 0, 'middle': 0.5, 'end': 1}[text.get('text-anchor')]
    return x, y - 0.8 * size, x + width, y + 0.22 * size


def points(path):
    """The points (x, y) of a path of the commands M, H, V, h, v, l, q and z, in order."""
    x = y = 0
    found = []
    for command, rest in re.findall(r'([A-Za-z])([^A-Za-z]*)', path.get('d')):
        n = [float(each) for each in rest.split()]
        if command in 'ML':
            x, y = n
        elif command in 'lq':
            x, y = x + n[-2], y + n[-1]
        elif command in 'Hh':
            x = n[0] + x * (command == 'h')
        elif command in 'Vv':
            y = n[0] + y * (command == 'v')
        found.append((x, y))
    return found


@any_plan
def test_each_layer_and_slot_is_drawn_once_with_its_texts(config, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    svg = drawn(plan, max_seq_len, kv_dtype)
    names = [each.get('id') for each in svg.findall('g')]
    assert sorted(names) == sorted(
        [f'layer-{layer.index}' for layer in plan.layers]
        + [f'layer-{layer.index}-slot-{layer.slot}' for layer in plan.layers]
        + [f'slot-{slot.index}' for slot in plan.slots])
    for layer in plan.layers:
        each = group(svg, f'layer-{layer.index}')
        assert texts(each) == [str(layer.index), layer.kind[0].upper()]
        assert each.find('rect').get('class') == layer.kind
        square = each.find('rect').get('rx') == '0'  # told apart by shape, too
        assert square == (layer.kind == 'global')
    for slot in plan.slots:
        size = slot.nbytes(1, max_seq_len, kv_dtype)
        assert texts(group(svg, f'slot-{slot.index}')) == [
            slot_text(slot, max_seq_len), layers_text(slot), f'{size:,}']
    ours, vanilla = (each.nbytes(1, max_seq_len, kv_dtype) for each in (plan, plan.vanilla()))
    sizes = [text for text in texts(svg) if text.endswith(' bytes')]
    assert sizes == [f'{ours:,} bytes', f'{vanilla:,} bytes']
    verdict = f'{vanilla / ours:,.1f} times smaller' if vanilla > ours else 'as large as'
    assert verdict in texts(svg)[-1] and texts(svg)[-1].endswith(f'vanilla GPT-2 in {kv_dtype}')


@any_plan
def test_a_line_joins_each_layer_to_its_slot(config, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    svg = drawn(plan, max_seq_len, kv_dtype)
    upright = {}  # slot -> x, upper and lower end of the line that its readers share
    for layer in reversed(plan.layers):
        left, top, right, bottom = box(group(svg, f'layer-{layer.index}').find('rect'))
        line, tip = group(svg, f'layer-{layer.index}-slot-{layer.slot}')
        assert line.get('class') == ('owner' if layer.owns else 'reader')
        assert tip.get('class') == line.get('class') + '-tip'
        (x, y), *_, end = points(line)
        assert 0 <= x - right < 5 and y == (top + bottom) / 2
        bar = box(group(svg, f'slot-{layer.slot}').find('rect'))
        if layer.owns:
            assert end[1] == y == (bar[1] + bar[3]) / 2 and 0 <= bar[0] - end[0] < 5
        elif layer.slot not in upright:  # the last reader
            assert end[1] == (bar[1] + bar[3]) / 2
            upright[layer.slot] = end[0], end[1], y
            assert right < end[0] < bar[0]
        else:
            x, upper, lower = upright[layer.slot]
            assert end[0] == x and upper < end[1] < lower
    dots = [(float(dot.get('cx')), float(dot.get('cy'))) for dot in svg.findall('circle')]
    assert sorted(dots) == sorted((x, upper) for x, upper, _ in upright.values())
    for (x, upper, lower), (other_x, other_upper, other_lower) in itertools.combinations(
            upright.values(), 2):
        assert x != other_x or lower < other_upper or other_lower < upper


@any_plan
def test_bars_are_to_scale(config, max_seq_len, kv_dtype):
    plan = plan_kv(config)
    svg = drawn(plan, max_seq_len, kv_dtype)
    ours, vanilla = (box(rect) for rect in svg.findall('rect')[-2:])
    full = vanilla[2] - vanilla[0]
    share = plan.nbytes(1, max_seq_len, kv_dtype) / plan.vanilla().nbytes(1, max_seq_len, kv_dtype)
    assert ours[2] - ours[0] == pytest.approx(max(2, full * share), abs=0.01)
    for slot in plan.slots:
        left, _, right, _ = box(group(svg, f'slot-{slot.index}').find('rect'))
        assert left == ours[0] == vanilla[0]
        held = slot.capacity(max_seq_len) / max_seq_len
        assert right - left == pytest.approx(max(2, full * held), abs=0.01)


@any_plan
def test_no_text_overlaps_another_or_leaves_the_drawing(config, max_seq_len, kv_dtype):
    svg = drawn(plan_kv(config), max_seq_len, kv_dtype)
    width, height = (float(svg.get(name)) for name in ('width', 'height'))
    assert svg.get('viewBox') == f'0 0 {width:g} {height:g}' and width >= 900
    assert width == 900 or max_seq_len > 131_072
    boxes = {text: text_box(text) for text in svg.iter('text')}
    assert min(float(text.get('font-size')) for text in boxes) >= 9
    rects = [box(rect) for rect in svg.iter('rect')]
    corners = [(x, y, x, y) for path in svg.iter('path') for x, y in points(path)]
    for left, top, right, bottom in [*boxes.values(), *rects, *corners]:
        assert 0 <= left <= right <= width + 0.01 and 0 <= top <= bottom <= height
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f'{one.text!r} and {other.text!r}'


def test_the_full_stack_says_what_the_documents_say():
    svg = drawn(plan_kv(GPTConfig(**STACK)))
    assert texts(group(svg, 'slot-2')) == ['slot 2, global: all 1,024 tokens', 'layers 5* 11',
                                           '262,144']
    assert texts(group(svg, 'slot-1'))[:2] == ['slot 1, local: the last 256 tokens',
                                               'layers 2* 3 4']
    assert ['524,288 bytes', '37,748,736 bytes'] == [t for t in texts(svg) if ' bytes' in t]
    assert '72.0 times smaller than vanilla GPT-2 in bfloat16' in texts(svg)[-1]
    assert svg.get('role') == 'img'
    assert [svg.find(name).get('id') for name in ('title', 'desc')] == (
        svg.get('aria-labelledby').split())
    assert 'slot 2, global: all 1,024 tokens, layers 5* 11' in svg.find('desc').text


def test_the_legend_explains_only_what_is_drawn():
    vanilla, stack = (' '.join(texts(drawn(plan_kv(GPTConfig(**c))))) for c in ({}, STACK))
    for text in ('local: sees the last 256 tokens', 'only reads them'):
        assert text in stack and text not in vanilla


def test_long_lists_of_layers_are_cut_and_windows_beyond_the_text_named():
    slot = plan_kv(GPTConfig(n_layer=96, share_global_kv=True)).slots[0]
    assert layers_text(slot) == '96 layers: 0* 1 2 ... 95'
    local = plan_kv(GPTConfig(n_layer=1, layer_pattern='L', window_size=9)).slots[0]
    assert slot_text(local, 1) == 'slot 0, local: all 1 token (W = 9)'
    assert slot_text(local, 9) == 'slot 0, local: all 9 tokens'
    assert slot_text(local, 10) == 'slot 0, local: the last 9 tokens'


@pytest.mark.parametrize('colours, page', [(LIGHT, '#ffffff'), (DARK, '#0d1117')])
def test_text_has_enough_contrast(colours, page):
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(*pair):
        low, high = sorted(map(luminance, pair))
        return (high + 0.05) / (low + 0.05)
    for text, ground in (('ink', page), ('dim', page), ('ink', colours['pale']),
                         ('on', colours['blue'])):
        assert contrast(colours[text], ground) >= 4.5
    assert contrast(colours['thin'], page) >= 3 and contrast(colours['blue'], page) >= 3


def test_an_unknown_dtype_is_refused():
    with pytest.raises(UserError, match="kv_dtype='int3'"):
        plan_svg(plan_kv(GPTConfig()), 8, 'int3')


def test_the_program_writes_it_over_what_was_there(tmp_path, capsys):
    file = tmp_path / 'plan.svg'
    file.write_text('old')
    main([f'--svg={file}', '--max_seq_len=64', '--kv_dtype=int8', '--batch=3', '--json=True'])
    assert file.read_text(encoding='utf-8') == plan_svg(plan_kv(GPTConfig()), 64, 'int8')
    json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    file = tmp_path / 'none' / 'plan.svg'
    done = subprocess.run([sys.executable, '-m', 'kv', f'--svg={file}'], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr == f"error: svg='{file}' cannot be written: No such file or directory\n"


def test_the_committed_drawing_is_what_the_command_makes(tmp_path):
    main(['config/train_gpt2_mqa_local.py', f'--svg={tmp_path / "plan.svg"}'])
    committed = ROOT / 'results' / 'kv' / 'plan.svg'
    assert (tmp_path / 'plan.svg').read_bytes() == committed.read_bytes()
    assert '--svg=results/kv/plan.svg' in (ROOT / 'Makefile').read_text()


@pytest.mark.parametrize('fields, form', [
    (dict(kv_tied='global'), 'K = V'), ({}, ''),
    (dict(kv_latent=128, rope_fraction_global=0), 'latent of 128')])
def test_a_slot_that_stores_one_tensor_says_so(fields, form):
    plan = plan_kv(GPTConfig(**STACK, **fields))
    for slot in plan.slots:
        end = f', {form}' if form and slot.kind == 'global' else ''
        assert slot_text(slot, 1024).endswith(' tokens' + end)
