"""The page in a browser: the course of a turn and of a conversation. Needs Chromium, as
test_page.py."""
import base64
import itertools
import re

import pytest
from playwright.sync_api import expect

from serving.watch import gemma_shaped
from tests.serving.browser import answering, drawn, number, said, send, start, streamed
from tests.serving.conftest import LONGEST, MODEL

pytestmark = pytest.mark.slow
RING = min(slot.capacity(LONGEST) for slot in MODEL.plan.slots)


def test_one_clock(markup_server, visit, monkeypatch):
    """All times of a turn are the server's; a short reply has a speed."""
    monkeypatch.setattr('serving.worker.VIEW_INTERVAL', 10.0)
    page = visit(markup_server())
    send(page, 'ab1', tokens=5)
    frame = page.evaluate('nanokv.frame()')
    assert 0 < frame['first_token'] < frame['time']
    speed = (frame['length'] - frame['prompt']) / (frame['time'] - frame['first_token'])
    expect(page.locator('#numbers')).to_have_text(
        f"first token after {frame['first_token'] * 1000:.0f} ms · {speed:.1f} tokens/s")
    for i in range(page.evaluate('nanokv.frames')):
        page.locator('#slider').fill(str(i))
        drawn(page)
        frame = page.evaluate('nanokv.frame()')
        assert frame['length'] < frame['prompt'] or frame['time'] >= frame['first_token']


def test_another_model_since_the_last_message(markup_server, visit):
    server = markup_server()
    page = visit(server)
    send(page, 'ab1')
    plan = page.evaluate("fetch('nanokv/plan').then(response => response.json())")
    plan |= dict(model='other', vanilla_position_nbytes=1000)
    for slot in plan['slots']:
        slot['capacity'] += 2
    page.route('**/nanokv/plan', answering(dict(json=plan)))
    send(page, 'in', tokens=12)
    expect(page.locator('#model')).to_have_text('other')
    rings = [lane for lane, slot in zip(drawn(page), plan['slots']) if slot['kind'] == 'local']
    assert page.locator('#lanes canvas').count() == len(plan['slots'])
    assert all(len(lane['cells']) == RING + 2 for lane in rings)
    length = page.evaluate('nanokv.frame().length')
    assert number(page, 'Vanilla GPT-2') == f'{length:.1f} kB'


def test_how_a_reply_ends(markup_server, visit, slow_steps):
    page, note = visit(markup_server()), lambda: page.locator('.note').last
    start(page, 'ab1', tokens=40)
    expect(page.locator('#send')).to_be_enabled()
    expect(note()).to_contain_text('stopped at the limit of tokens')
    start(page, 'b', tokens=20)
    page.locator('#stop').click()
    expect(note()).to_have_text('Stopped by you.')
    page.get_by_label('Chat').check()
    usage = dict(prompt_tokens=5, prompt_tokens_details=dict(cached_tokens=0))
    for text in ('ab', ' \n '):  # the second says nothing, so it is no turn
        page.route('**/chat/completions', answering(streamed(
            said(text, 'stop'), dict(choices=[], usage=usage))))
        send(page, 'a')
        expect(note()).to_contain_text('the model ended it')
        page.unroute('**/chat/completions')
    send(page, 'b')
    expect(page.locator('#error')).to_be_empty()
    assert page.locator('.user').count() == 3  # the plain prompts are apart


def test_the_server_ends(markup_server, visit, slow_steps):
    server = markup_server()
    page = visit(server)
    start(page, 'ab1', tokens=40)  # it must not end before its connection does
    for connection in list(server.server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    expect(page.locator('#error')).to_have_text('The connection to the server failed.')
    expect(page.locator('#note')).to_contain_text('the last state that the server sent')
    start(page, 'b')
    server.server.should_exit = True  # within its grace, the reply is completed
    expect(page.locator('#send')).to_be_enabled()
    server.thread.join(60)
    page.wait_for_timeout(200)
    expect(page.locator('#error')).to_be_empty()
    page.locator('#text').fill('draft')
    page.locator('#send').click()
    expect(page.locator('#error')).to_have_text('The connection to the server failed.')
    expect(page.locator('#text')).to_have_value('draft')
    assert all('net::ERR_' in text for text in page.wrong)  # printed by Chromium itself
    page.wrong.clear()


def test_modes_and_a_reload_keep_the_conversation(markup_server, visit):
    page, asked = visit(markup_server()), []
    page.on('request', lambda request: asked.append(request.post_data_json)
            if request.method == 'POST' else None)
    said = lambda: page.locator('.user span, .assistant').all_inner_texts()
    send(page, 'ab1')
    chat = said()
    page.locator('#text').fill('draft')
    page.get_by_label('Plain prompt').check()
    assert said() == [] and page.locator('#text').input_value() == ''
    send(page, 'a1')
    assert asked[-1]['prompt'] == 'a1'
    plain = said()
    page.reload()
    expect(page.get_by_label('Plain prompt')).to_be_checked()
    expect(page.locator('#tokens')).to_have_value('6')
    assert said() == plain
    page.get_by_label('Chat').check()
    assert said() == chat
    expect(page.locator('#text')).to_have_value('draft')
    page.get_by_role('button', name='New chat').click()
    assert said() == []
    page.locator('#earlier').select_option(label='ab1')
    assert said() == chat and page.locator('#text').input_value() == 'draft'
    send(page, 'b')
    assert [message['content'] for message in asked[-1]['messages']] == [*chat, 'b']


def bars(page):
    """Name -> (bytes that are shown, width of the bar)."""
    return {bar.locator('dt').inner_text(): (bar.locator('dd').inner_text(),
                                             bar.locator('i').bounding_box()['width'])
            for bar in page.locator('#bars > div').all()}


def test_bars_are_the_servers_bytes_at_every_step(markup_server, visit):
    page = visit(markup_server())
    send(page, 'ab1', tokens=RING + 20)
    plan = page.evaluate("fetch('nanokv/plan').then(response => response.json())")
    gemma = gemma_shaped(MODEL.config)
    for i in range(page.evaluate('nanokv.frames')):
        page.locator('#slider').fill(str(i))
        drawn(page)
        frame, shown = page.evaluate('nanokv.frame()'), bars(page)
        expected = {'This model': frame['nbytes'],
                    'Gemma-4-shaped': gemma.nbytes(1, frame['length'], 'float64'),
                    'Vanilla GPT-2': MODEL.plan.vanilla().nbytes(1, frame['length'], 'float64')}
        for name, n in expected.items():
            assert shown[name][0] == (f'{n} B' if n < 1000 else f'{n / 1000:.1f} kB')
            scale = shown['Vanilla GPT-2'][1] / expected['Vanilla GPT-2']
            assert shown[name][1] == pytest.approx(n * scale, abs=1.5)
        assert f"after {frame['length']} tokens" in page.locator('#ratio').inner_text()
        ratio = float(page.locator('#ratio b').inner_text().rstrip('×'))
        assert ratio == pytest.approx(expected['Vanilla GPT-2'] / frame['nbytes'], rel=0.06)
    assert plan['parameters'] == sum(p.numel() for p in MODEL.parameters())


def test_a_word_and_its_cells(markup_server, visit):
    page = visit(markup_server())
    send(page, 'ab1', tokens=RING + 6, plain=True)
    reply, lit = page.locator('.assistant'), page.locator('#turns .lit')
    reply.focus()
    page.keyboard.press('ArrowRight')        # position 3, long gone from the ring
    expect(lit).to_have_attribute('data-at', '3')
    lanes = drawn(page)
    held = [lane['slot'] for lane in lanes if 3 in lane['cells']]
    gone = [lane['slot'] for lane in lanes if 3 not in lane['cells']]
    assert held and gone
    expect(page.locator('#note')).to_have_text(re.compile(
        f"position 3 · .* · still in slot {', '.join(map(str, held))} · "
        f"gone from {', '.join(map(str, gone))}$"))
    ring = page.locator('#lanes canvas').nth(next(
        i for i, lane in enumerate(lanes) if lane['slot'] in gone))
    ring.focus()
    page.keyboard.press('ArrowRight')
    drawn(page)
    cells = next(lane['cells'] for lane in lanes if lane['slot'] in gone)
    expect(lit).to_have_attribute('data-at', str(cells[0]))
    crossed = [int(word.get_attribute('data-at')) for word in page.locator('#turns .gone').all()]
    assert crossed == [p for p in range(3, 3 + RING + 5) if p not in cells]  # the last: not stored
    page.locator('#slider').fill('2')
    drawn(page)
    length = page.evaluate('nanokv.frame().length')
    gone = [int(word.get_attribute('data-at')) for word in page.locator('#turns .gone').all()]
    assert all(position < length for position in gone)
    reply.focus()
    page.keyboard.press('End')
    expect(page.locator('#note')).to_have_text(re.compile('not yet in the cache$'))
    send(page, 'a1', tokens=12)              # the cells of the first reply are gone
    expect(reply.first.locator('[data-at]')).to_have_count(0)
    expect(page.locator('.assistant[tabindex]')).to_have_count(1)
    expect(lit).to_have_count(0)


def test_the_speed_changes_while_a_replay_plays(markup_server, visit, slow_steps):
    """It ends with the cells that the turn ended with."""
    page = visit(markup_server())
    send(page, 'ab1', tokens=RING + 20)
    lanes, play = drawn(page), page.locator('#play')
    play.click()
    expect(page.locator('#moment')).to_have_text(re.compile(' s$'))
    expect(play).to_have_text('Pause')
    assert drawn(page) != lanes
    page.locator('#speed').select_option('4')
    expect(page.locator('#moment')).to_have_text('end', timeout=30_000)
    expect(play).to_have_text('Play')
    assert drawn(page) == lanes


def test_bars_of_a_picture_are_in_the_ratio_of_the_bytes(markup_server, visit, tmp_path):
    page = visit(markup_server())
    send(page, 'ab1', tokens=RING + 20)
    with page.expect_download() as download:
        page.get_by_role('button', name='PNG').click()
    assert download.value.suggested_filename == 'nanokv-cache.png'
    download.value.save_as(tmp_path / 'cache.png')
    picture = base64.b64encode((tmp_path / 'cache.png').read_bytes()).decode()
    runs = page.evaluate("""async url => {  // of one colour, in each row from where bars begin
        const image = Object.assign(new Image(), {src: url})
        await image.decode()
        const {width, height} = image, c = new OffscreenCanvas(width, height).getContext('2d')
        c.drawImage(image, 0, 0)
        const pixels = new Uint32Array(c.getImageData(0, 0, width, height).data.buffer)
        return Array.from({length: height}, (_, y) => {
            const row = pixels.slice(y * width, (y + 1) * width), colour = row[12]
            const end = row.findIndex((each, x) => x > 12 && each !== colour)
            return colour === row[0] ? 0 : end - 12
        })
    }""", 'data:image/png;base64,' + picture)
    groups = [(run, len([*rows])) for run, rows in itertools.groupby(runs)]
    ours, gemma, gpt2 = [run for run, n in groups if run and n >= 10][:3]
    frame = page.evaluate('nanokv.frame()')
    vanilla = MODEL.plan.vanilla().nbytes(1, frame['length'], 'float64')
    shaped = gemma_shaped(MODEL.config).nbytes(1, frame['length'], 'float64')
    assert ours == pytest.approx(gpt2 * frame['nbytes'] / vanilla, abs=1.5)
    assert gemma == pytest.approx(gpt2 * shaped / vanilla, abs=1.5)
    assert gpt2 > 100
