"""Frames of `sample.py --watch=True`: cells, sizes, and text that is shown but never obeyed."""
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from config.gpt_config import GPTConfig
from config.sizes import nice_bytes
from engine.text import watch
from engine.text.watch import EMPTY, GENERATED, LEGEND, NEWEST, NEXT, PROMPT, caption, frame, lane
from kv.cache import KVCache
from kv.plan import plan_kv

SHAPE = dict(n_layer=12, n_head=8, n_embd=128, block_size=256)
VANILLA = plan_kv(GPTConfig(**SHAPE))
SMALL = plan_kv(GPTConfig(**SHAPE, n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC',
                          window_size=64, share_global_kv=True, pos_embedding='rope'))


def lines(plan, width, height, length=150, text='ROMEO.\n', max_seq_len=501, **options):
    drawn = frame(plan, max_seq_len, 'float32', length, 20, text, 812.3, width, height, **options)
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
        assert lane(slot, length, n_prompt, 501, 600) == (cells, 1)
        assert lane(slot, length, n_prompt, 501, len(cells)) == (cells, 1)
    shown = lines(SMALL, 80, 23, length)
    assert written(SMALL.slots[0], length, 20, 501) in shown


def test_cells_of_several_positions_show_the_newest():
    ring, whole = SMALL.slots[0], SMALL.slots[2]
    assert lane(whole, 30, 10, 50, 7) == ('░▓▓█···', 8)
    assert lane(ring, 64 + 17, 10, 501, 10) == ('▓▓█›▓▓▓▓▓▓', 7)
    assert lane(ring, 126, 10, 501, 10) == ('▓▓▓▓▓▓▓▓█›', 7)
    assert lane(ring, 128, 10, 501, 10) == ('›▓▓▓▓▓▓▓▓█', 7)
    assert lane(ring, 127, 10, 501, 1) == ('█', 64)


@pytest.mark.parametrize('plan', [SMALL, VANILLA], ids=['small', 'vanilla'])
@pytest.mark.parametrize('width', [40, 56, 64, 80, 120, 200])
def test_every_frame_fits_and_shows_every_slot(plan, width):
    for max_seq_len, length in ((501, 0), (501, 150), (501, 500), (100_000, 99_999)):
        shown = lines(plan, width, 23, length, '日本 wide\n' * 40 + 'x' * 500, max_seq_len)
        assert len(shown) == 23 and max(map(cell_len, shown)) <= width
        assert shown[0].strip('x') in ('', '日本 wide')
        labels = [line.split() for line in shown if line.split()[1:2] in (['L'], ['G'])]
        assert [int(label[0]) for label in labels] == list(range(len(plan.slots)))


def test_text_keeps_the_lanes_in_place_and_its_last_lines_are_shown():
    few, many = lines(SMALL, 80, 23), lines(SMALL, 80, 23, text='\n'.join(map(str, range(100))))
    assert few[0] == 'ROMEO.' and few[1:8] == [''] * 7 and few[8:] == many[8:]
    assert many[:8] == [str(i) for i in range(92, 100)]
    assert lines(SMALL, 80, 23, text=None) == few[9:]


def test_a_caption_says_what_has_just_happened():
    read = 'The prompt was read at once. Its keys and values are stored.'
    shared = 'Layer 1 reads what layer 0 stored. It stores nothing itself.'
    full = 'Ring full: each new token overwrites the oldest one in slot 0, 1, 3, 4.'
    for n_prompt, length, said in ((20, 19, ''), (20, 20, read), (20, 27, read), (20, 28, shared),
                                   (20, 63, shared), (20, 64, full), (20, 400, full),
                                   (70, 85, shared), (70, 86, full)):
        assert caption(SMALL, 501, length, n_prompt) == said
    assert caption(SMALL, 64, 64, 20) == shared  # no ring is full before the end
    assert caption(VANILLA, 501, 400, 20) == read
    many = plan_kv(GPTConfig(**SHAPE | dict(layer_pattern='L', window_size=8)))
    assert caption(many, 501, 7, 5) == read
    assert caption(many, 501, 21, 5).endswith('the oldest one in 12 slots.')
    differ = plan_kv(GPTConfig(**SHAPE | dict(
        layer_pattern='LLG', window_pattern='16,64,0', n_layer=3)))
    assert caption(differ, 501, 63, 5).endswith('the oldest one in slot 0.')
    assert caption(differ, 501, 64, 5).endswith('the oldest one in slot 1.')
    assert caption(differ, 64, 64, 5).endswith('the oldest one in slot 0.')
    shown = lines(SMALL, 80, 23, 64)
    assert full in shown and len(shown) == 23
    assert len(lines(SMALL, 60, 23, 64)) == 23  # on two lines


def test_totals_are_the_bytes_of_the_plan():
    *_, last = lines(SMALL, 100, 23, 150)
    now, vanilla = SMALL.nbytes(1, 150, 'float32'), VANILLA.nbytes(1, 150, 'float32')
    assert last == (f'406 entries: {nice_bytes(now)} of '
                    f"{nice_bytes(SMALL.nbytes(1, 501, 'float32'))}; vanilla GPT-2: "
                    f'{nice_bytes(vanilla)}, {vanilla / now:.1f}x; 812 tokens/s')
    [position] = {slot.position_nbytes('float32') for slot in SMALL.slots}
    assert 406 == 4 * 64 + 150 and now == 406 * position
    assert lines(VANILLA, 140, 23, recomputes=True)[-1].endswith('; past block_size: recomputed')
    assert LEGEND in lines(SMALL, 80, 23)


def test_slots_that_do_not_fit_are_counted():
    deep = plan_kv(GPTConfig(**SHAPE | dict(n_layer=48)))
    shown = lines(deep, 80, 23)
    drawn = [line for line in shown if '/cell' in line]
    assert len(shown) == 23 and f'and {48 - len(drawn)} more slots' in shown and len(drawn) > 10
    for height in range(1, 24):
        tiny = lines(deep, 20, height)
        assert len(tiny) <= height and max(map(cell_len, tiny)) <= 20


def test_markup_and_control_characters_are_shown_not_interpreted():
    text = 'a[red]b[/red] :smile:\x1b[2J\rc\x07\u202e\x00\x9b\td'
    drawn = frame(SMALL, 501, 'float32', 150, 20, text, 1, 80, 23)
    shown, *_ = drawn.plain.split('\n')
    assert shown.split() == [r'a[red]b[/red]', r':smile:\x1b[2J\rc\x07\u202e\x00\x9b', 'd']
    assert min(span.start for span in drawn.spans) > len(shown)


def test_watching_waits_and_its_clock_does_not(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(watch.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(watch.time, 'sleep', lambda s: now.__setitem__(0, now[0] + s))
    generation = SimpleNamespace(cache=KVCache(SMALL, 1, 30), prompt_lens=[1], made=[])
    recomputes, totals = [], watch.totals
    monkeypatch.setattr(watch, 'totals', lambda *args: recomputes.append(args[-1]) or totals(*args))
    with watch.watching(generation, 50.0) as (write, clock):
        write('To')
        for _ in range(20):
            now[0] += 0.005  # a step of the model
            generation.made.append(0)
            generation.cache.fill_(len(generation.made))  # all but the newest
            write(' be')
        assert recomputes and not any(recomputes)
        assert now[0] == pytest.approx(100.4) and clock() == pytest.approx(100.1)
    assert capsys.readouterr().out.endswith('To' + ' be' * 20)
