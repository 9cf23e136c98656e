"""The page in a browser, with a server for a tiny random model: what it draws of the KV cache is
what the engine holds. Needs Chromium, from PATH or $CHROMIUM."""
import re

import pytest
from playwright.sync_api import expect

from tests.serving.browser import MARKUP, drawn, edit, number, said, send, streamed
from tests.serving.cache_events import Recorder
from tests.serving.conftest import LONGEST, MODEL, assert_free

pytestmark = pytest.mark.slow
PAGE_SIZE = 4
RING = min(slot.capacity(LONGEST) for slot in MODEL.plan.slots)


def cells_of(slot, state):
    """What a lane has to show, from the plan and a recorded state of the engine."""
    positions = slot.positions(state['length'], LONGEST)
    size = (slot.capacity(LONGEST) if slot.kind == 'local' else
            PAGE_SIZE * len(state['pages']))
    return positions + [None] * (size - len(positions))


def watched_generation(server, page):
    """Generate 20 tokens past the wrap of a ring. Returns {length: state} of the engine."""
    recorder = Recorder(server.engine)
    page.get_by_label('Plain prompt').check()
    send(page, 'ab1', tokens=RING + 20)
    assert_free(server.worker)
    [states] = recorder.states.values()
    return {state['length']: state for state, *_ in states}


def test_a_conversation_and_an_edit(markup_server, visit):
    server = markup_server()
    page, recorder = visit(server), Recorder(server.engine)
    expect(page.locator('#model')).to_have_text('tiny')
    for text in ('ab1', 'in', 'a1'):
        send(page, text)
    assert [turn.inner_text() for turn in page.locator('.user span').all()] == ['ab1', 'in', 'a1']
    assert page.locator('.assistant').count() == 3
    edit(page, 1)
    expect(page.locator('#text')).to_have_value('in')
    send(page, 'ie')
    assert page.locator('.user').count() == page.locator('.assistant').count() == 2
    state = recorder.states[max(recorder.states)][-1][0]
    found = page.evaluate('nanokv.frame().cached')
    assert found == state['cached'] > 0  # the beginning that was not edited
    expect(page.locator('.note').last).to_contain_text(f"{found} of {state['prompt']} prompt")
    page.get_by_role('button', name='New chat').click()
    assert page.locator('.user, .assistant').count() == 0
    assert all(set(lane['cells']) <= {None} for lane in drawn(page))


def assert_numbers_are_those_of(page, state):
    """Check the bytes and the marks that the page shows at the end."""
    frame = page.evaluate('nanokv.frame()')
    for name in ('pages', 'nbytes', 'cached', 'row', 'done'):
        assert frame[name] == state[name], name
    expect(page.locator('#ratio')).to_contain_text(f"after {state['length']} tokens")
    assert number(page, 'This model') == f"{state['nbytes'] / 1000:.1f} kB"
    about = page.locator('#lanes small').all_inner_texts()
    for text, slot, lane in zip(about, MODEL.plan.slots, drawn(page), strict=True):
        layers = ', '.join(f'{i}*' if i == slot.owner else str(i) for i in slot.layers)
        nbytes = len(lane['cells']) * slot.position_nbytes('float64')
        shown = f'{nbytes} B' if nbytes < 1000 else f'{nbytes / 1000:.1f} kB'
        assert text == f'layers {layers} · {shown}'


def test_lanes_are_what_the_engine_holds(markup_server, visit, slow_steps):
    """At each moment of the slider."""
    server = markup_server()
    page = visit(server)
    states = watched_generation(server, page)
    last = max(states)
    assert last >= RING + 20 and page.evaluate('nanokv.frame().length') == last
    lengths = set()
    for i in reversed(range(page.evaluate('nanokv.frames'))):
        page.locator('#slider').fill(str(i))
        lanes, frame = drawn(page), page.evaluate('nanokv.frame()')
        state = states[frame['length']]
        lengths.add(frame['length'])
        for lane, slot in zip(lanes, MODEL.plan.slots, strict=True):
            assert lane['slot'] == slot.index and lane['cells'] == cells_of(slot, state)
        for name in ('pages', 'nbytes', 'row'):
            assert frame[name] == state[name], name
        shown = page.locator('.assistant span').first.inner_text()
        assert len(shown) == min(frame['length'] - 3, RING + 19) + 1
    assert len(lengths) > len(states) / 2  # the server may leave some out
    expect(page.locator('#moment')).to_have_text(re.compile(r'^0\.\d\d s$'))
    page.get_by_role('button', name='Play').click()
    expect(page.locator('#moment')).to_have_text('end')  # it played all
    assert drawn(page)[0]['cells'] == cells_of(MODEL.plan.slots[0], states[last])
    expect(page.locator('#note')).to_contain_text('its memory was freed')
    assert_numbers_are_those_of(page, states[last])


def test_markup_is_text(markup_server, visit):
    page = visit(markup_server())
    for text in (MARKUP, '<script>go()'):
        page.get_by_role('button', name='New chat').click()
        send(page, text, tokens=12)
        assert page.locator('.user span').inner_text() == text
    assert page.locator('img').count() == 0 and page.locator('script').count() == 1


def test_by_keyboard(markup_server, visit):
    page = visit(markup_server())
    send(page, 'ab1\nb', tokens=12, plain=True)
    for _ in range(40):
        page.keyboard.press('Tab')
        if page.evaluate('document.activeElement.tagName') == 'CANVAS':
            break
    lane = page.locator('#lanes canvas:focus')
    expect(lane).to_have_attribute('aria-valuetext', re.compile(r'^\d+ positions$'))
    texts = []
    for _ in range(3):
        page.keyboard.press('ArrowRight')
        drawn(page)
        texts.append(lane.get_attribute('aria-valuetext'))
        expect(page.locator('#note')).to_have_text(texts[-1])
    assert len(set(texts)) == 3 and all('index' in text for text in texts)
    last = page.locator('#lanes section', has_text='pages').locator('canvas')
    last.focus()
    for _ in range(4):
        page.keyboard.press('ArrowRight')
    expect(last).to_have_attribute('aria-valuetext', re.compile('^position 3 · index 3 · “↵” · '))
    last.hover(position=dict(x=5, y=5))
    expect(last).to_have_attribute('aria-valuetext', re.compile('^position 0 · index 0 · “a” · '))


def test_a_key(markup_server, visit):
    page = visit(markup_server(keys=['secret']))
    expect(page.get_by_label('API key')).to_be_visible()
    expect(page.locator('#error')).to_contain_text('a key is needed')
    page.locator('#text').fill('draft')
    page.get_by_label('API key').fill('secretive')
    page.get_by_label('API key').press('Enter')
    expect(page.locator('#error')).to_have_text('the key is not valid')
    page.get_by_label('API key').fill('secret')
    page.get_by_label('API key').press('Enter')
    expect(page.locator('#model')).to_have_text('tiny')
    expect(page.get_by_label('API key')).to_be_hidden()
    page.locator('#tokens').press('Enter')
    assert page.locator('.user').count() == 0
    expect(page.locator('#text')).to_have_value('draft')  # Enter in a field has not sent it
    send(page, 'ab')
    assert any(position is not None for lane in drawn(page) for position in lane['cells'])
    assert all('401' in text for text in page.wrong)  # printed by Chromium itself
    page.wrong.clear()
    page.reload()
    expect(page.get_by_label('API key')).to_be_visible()  # since it was asked for again
    expect(page.get_by_label('API key')).to_have_value('')
    assert 'secret' not in page.evaluate('JSON.stringify(localStorage)')
    assert '401' in page.wrong.pop() and not page.wrong


def test_on_a_phone(markup_server, visit):
    page = visit(markup_server(), size=(360, 740), device_scale_factor=2, color_scheme='dark')
    send(page, 'a' * 25, tokens=25)
    assert page.evaluate('document.documentElement.scrollWidth') <= 360
    text, lanes = page.locator('#turns').bounding_box(), page.locator('#lanes').bounding_box()
    assert lanes['y'] > text['y'] + text['height']  # below
    for width, height in ((360, 560), (390, 844), (640, 400)):  # the note covers nothing
        page.set_viewport_size(dict(width=width, height=height))
        main, note = (page.locator(each).bounding_box() for each in ('main', '#note'))
        assert main['y'] + main['height'] <= note['y'] + 1
        assert height >= note['y'] + note['height'] > height - 60


def visit_a_larger_model(server, visit, length, rings, size, text='x'):
    """A plan with rings and one global slot, and a reply with 41 cache events, the last of which
    has `length` positions."""
    stores = dict(position_nbytes=64, state_nbytes=0, tied=True, latent=False)
    slots = [dict(slot=i, kind='local', window=ring, capacity=ring, owner=i, layers=[i], **stores)
             for i, ring in enumerate(rings)]
    slots.append(dict(slot=len(rings), kind='global', window=0, capacity=16384, owner=len(rings),
                      layers=[len(rings)], **stores))
    plan = dict(model='larger', models=['larger'], parameters=9, dataset='', gemma_slots=[[0, 9]],
                max_positions=16384, kv_dtype='int8', page_size=64, pages=300, rows=4, slots=slots,
                vanilla_position_nbytes=9, vanilla_position_nbytes_bf16=9)
    num_pages = -(-length // 64)
    event = dict(time=1, first_token=0.5, row=0, prompt=length // 2, cached=64,
                 pages=[[i, 1] for i in range(num_pages)], prefix_pages=[False] * num_pages,
                 nbytes=1, held_nbytes=1, prefix_nbytes=0, running=1, free_pages=300 - num_pages,
                 texts=[text] * (length + 1), texts_from=0)
    lengths = [length - length // 80 * i for i in reversed(range(41))]
    events = [dict(event, length=n, done=n == length) for n in lengths]
    stream = streamed(said(text * (length - length // 2 + 1)), *events)
    page = visit(server, size=size, routes={
        'nanokv/plan': dict(json=plan), 'nanokv/chat/completions': stream})
    send(page, 'ab')
    return page


@pytest.mark.parametrize('size', [(390, 844), (1000, 560), (1280, 800), (1920, 1080)])
def test_all_lanes_are_in_view(markup_server, visit, size):
    page = visit_a_larger_model(markup_server(), visit, 300, [256] * 4, size)
    for canvas in page.locator('#lanes canvas').all():
        box = canvas.bounding_box()
        assert 0 < box['y'] < box['y'] + box['height'] < size[1] - 16
    note, numbers = (page.locator(id).bounding_box() for id in ('#note', '#numbers'))
    if size[0] == 1000:
        assert note['y'] + note['height'] <= numbers['y']


def test_whole_tokens(markup_server, visit):
    page = visit_a_larger_model(markup_server(), visit, 100, [32] * 4, (1280, 800), 'Hamlet')
    ring = page.locator('#lanes canvas').first
    assert ring.bounding_box()['height'] == 44  # two rows of 16 cells, 40 x 20 pixels
    ring.hover(position=dict(x=15 * 40 + 20, y=36))
    expect(ring).to_have_attribute('aria-valuetext', re.compile('^position 95 · index 31 · '))


def luminance(colour):
    """Of WCAG 2, from 'rgb(r, g, b)'."""
    parts = [int(x) / 255 for x in re.findall(r'\d+', colour)[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_text_can_be_read(markup_server, visit, scheme):
    """A contrast of 4.5 at least (WCAG 2, level AA), also of the text in cells."""
    page = visit(markup_server(), size=(1920, 1080), color_scheme=scheme)
    send(page, 'ab1', tokens=12)
    colours = page.evaluate("""() => {
        const style = getComputedStyle(document.body), probe = document.createElement('i')
        document.body.append(probe)
        return Object.fromEntries(['card', 'paper', 'ink', 'soft', 'error', 'accent', 'on-accent',
                                   'computed', 'found', 'edge'].map(name => {
            probe.style.color = style.getPropertyValue('--' + name)
            return [name, getComputedStyle(probe).color]
        }))
    }""")
    light = {name: luminance(colour) for name, colour in colours.items()}
    assert (light['card'] > 0.5) == (scheme == 'light')
    for text, ground in (('ink', 'card'), ('ink', 'paper'), ('soft', 'card'), ('soft', 'paper'),
                         ('error', 'card'), ('on-accent', 'accent'), ('ink', 'computed'),
                         ('ink', 'found'), ('edge', 'card'), ('edge', 'paper')):
        low, high = sorted((light[text], light[ground]))
        assert (high + 0.05) / (low + 0.05) >= (3 if text == 'edge' else 4.5), (text, ground)
    expect(page.locator('#tokens')).to_have_css('border-top-color', colours['edge'])


def test_ten_thousand_positions(markup_server, visit):
    page = visit_a_larger_model(markup_server(), visit, 10_000, [9001], (360, 740))
    ring, pages = drawn(page)
    assert page.locator('#lanes small').first.inner_text() == 'layers 0* · K = V · 576.1 kB'
    assert ring['cells'] == [9001 + i if i < 999 else i for i in range(9001)]
    assert pages['cells'] == [*range(10_000), *[None] * 48]
    assert ring['drawn'] < 9001 / 2 and pages['drawn'] < 10_000 / 2  # several to a drawn cell
    for canvas in page.locator('#lanes canvas').all():
        assert canvas.evaluate('node => node.width') <= 360
        assert canvas.evaluate('node => node.height') <= 400
    for moment in ('20', '4', '38'):  # the text scrolls along
        page.locator('#slider').fill(moment)
        drawn(page)
        box = page.locator('#turns').bounding_box()
        top = page.locator('.later').evaluate('node => node.getClientRects()[0].top')
        assert box['y'] - 1 <= top < box['y'] + box['height']  # it scrolls by whole pixels
