"""Frames of `sample.py --watch=True`: cells, sizes, and text that is shown but never obeyed."""
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from common.gpt_config import GPTConfig
from common.sizes import nice_bytes
from engine.text import lanes
from engine.text.lanes import EMPTY, GENERATED, LEGEND, NEWEST, NEXT, PROMPT, frame, lane
from kv.cache import KVCache
from kv.plan import plan_kv

SHAPE = dict(n_layer=12, n_head=8, n_embd=128, block_size=256)
VANILLA = plan_kv(GPTConfig(**SHAPE))
SMALL = plan_kv(GPTConfig(**SHAPE, n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC',
                          window_size=64, share_global_kv=True, pos_embedding='rope'))


def lines(plan, width, height, length=150, text='ROMEO.\n', max_seq_len=501):
    drawn = frame(plan, max_seq_len, 'float32', length, 20, text, width, height)
    return drawn.plain.split('\n')


def written(slot, length, n_prompt, max_seq_len):
    """The cells of a slot, one position each, by writing the positions one after the other."""
    n = slot.capacity(max_seq_len)
    cells = [EMPTY] * n
    for p in range(length):
        cells[p % n] = NEWEST if p == length - 1 else PROMPT if p < n_prompt else GENERATED
    if slot.kind == 'local' and length:
        cells[length % n] = NEXT
    return ''.join(cells)


@pytest.mark.parametrize('length', [0, 1, 63, 64, 65, 127, 128, 300])
@pytest.mark.parametrize('n_prompt', [1, 70])
def test_cells_before_at_and_past_the_wrap(length, n_prompt):
    for slot in SMALL.slots:
        cells = written(slot, length, n_prompt, 501)
        assert lane(slot, length, n_prompt, 501, 600) == cells
        assert lane(slot, length, n_prompt, 501, len(cells)) == cells
    shown = lines(SMALL, 120, 23, length)
    assert any(line.endswith(' ' + written(SMALL.slots[0], length, 20, 501)) for line in shown)


def test_cells_of_several_positions_show_the_newest():
    ring, whole = SMALL.slots[0], SMALL.slots[2]
    assert lane(whole, 30, 10, 50, 7) == '░▓▓█···'
    assert lane(ring, 64 + 17, 10, 501, 10) == '▓▓█›▓▓▓▓▓▓'
    assert lane(ring, 126, 10, 501, 10) == '▓▓▓▓▓▓▓▓█›'
    assert lane(ring, 128, 10, 501, 10) == '›▓▓▓▓▓▓▓▓█'
    assert lane(ring, 127, 10, 501, 1) == '█'


@pytest.mark.parametrize('plan', [SMALL, VANILLA], ids=['small', 'vanilla'])
@pytest.mark.parametrize('width', [20, 40, 56, 80, 200])
def test_every_frame_fits_and_shows_every_slot(plan, width):
    for max_seq_len, length in ((501, 0), (501, 150), (501, 500), (100_000, 99_999)):
        shown = lines(plan, width, 23, length, '日本 wide\n' * 40 + 'x' * 500, max_seq_len)
        assert len(shown) == 23 and max(map(cell_len, shown)) <= width, shown
        assert shown[0].strip('x') in ('', '日本 wide')
        labels = [line.split() for line in shown if line.split()[1:2] in (['L'], ['G'])]
        assert [int(label[0]) for label in labels] == list(range(len(plan.slots)))
    for height in range(1, 23):
        small = lines(plan, width, height)
        assert len(small) <= height and max(map(cell_len, small)) <= width


def test_text_keeps_the_lanes_in_place_and_its_last_lines_are_shown():
    few, many = lines(SMALL, 80, 23), lines(SMALL, 80, 23, text='\n'.join(map(str, range(100))))
    assert few[0] == 'ROMEO.' and few[1:15] == [''] * 14 and few[15:] == many[15:]
    assert many[:15] == [str(i) for i in range(85, 100)]
    assert lines(SMALL, 80, 23, text=None) == few[15:]


def test_totals_are_the_bytes_of_the_plan():
    *_, legend, last = lines(SMALL, 100, 23, 150)
    now, vanilla = SMALL.nbytes(1, 150, 'float32'), VANILLA.nbytes(1, 150, 'float32')
    assert last == (f"{nice_bytes(now)} of {nice_bytes(SMALL.nbytes(1, 501, 'float32'))}; vanilla "
                    f'GPT-2: {nice_bytes(vanilla)}, {vanilla / now:.1f}x')
    assert legend == LEGEND


def test_markup_is_shown_not_interpreted():
    drawn = frame(SMALL, 501, 'float32', 150, 20, 'a[red]b[/red] :smile:\td', 80, 23)
    shown, *_ = drawn.plain.split('\n')
    assert shown.split() == ['a[red]b[/red]', ':smile:', 'd']
    assert min(span.start for span in drawn.spans) > len(shown)


def test_watching_waits_and_its_clock_does_not(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(lanes.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(lanes.time, 'sleep', lambda s: now.__setitem__(0, now[0] + s))
    monkeypatch.setattr(lanes, 'visible', lambda text: text.replace('\x07', r'\x07'))
    generation = SimpleNamespace(cache=KVCache(SMALL, 1, 30), prompt_lens=[1], made=[])
    texts = []
    monkeypatch.setattr(lanes, 'frame', lambda *args: texts.append(args[5]) or '')
    with lanes.watching(generation, 50.0) as (write, clock):
        write('To')
        for _ in range(20):
            now[0] += 0.005  # a step of the model
            generation.made.append(0)
            write(' be\x07')
        assert now[0] == pytest.approx(100.4) and clock() == pytest.approx(100.1)
    whole = 'To' + r' be\x07' * 20  # escapes never reach the terminal
    assert capsys.readouterr().out.endswith(whole)
    *drawn, last = texts
    assert last is None and len(drawn) > 4 and all(whole.startswith(text) for text in drawn)
