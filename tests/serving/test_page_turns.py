"""The page in a browser: the course of a turn and of a conversation. Needs Chromium, as
test_page.py."""
import pytest
from playwright.sync_api import expect

from tests.serving.browser import answering, drawn, number, said, send, start, streamed
from tests.serving.conftest import LONGEST, MODEL

pytestmark = pytest.mark.slow
RING = min(slot.capacity(LONGEST) for slot in MODEL.plan.slots)


def test_one_clock(markup_server, visit, monkeypatch):
    """All times of a turn are the server's; a short reply has a speed."""
    monkeypatch.setattr('serving.worker.VIEW_INTERVAL', 10.0)
    page = visit(markup_server())
    send(page, 'ab1', tokens=5)
    assert float(number(page, 'Generation')) > 0
    frame = page.evaluate('nanokv.frame()')
    assert 0 < frame['first_token'] < frame['time']
    assert number(page, 'First token') == f"{frame['first_token'] * 1000:.0f} ms"
    for i in range(page.evaluate('nanokv.frames')):
        page.locator('#slider').fill(str(i))
        drawn(page)
        frame = page.evaluate('nanokv.frame()')
        assert (frame['time'] >= frame['first_token']) or frame['length'] < frame['prompt']


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
    expect(page.locator('#memory')).to_contain_text('0 B in use by 0 of 3 rows')
    start(page, 'ab1')
    expect(page.locator('#memory')).to_contain_text('B in use by 1 of 3 rows')
    expect(page.locator('#send')).to_be_enabled()
    expect(note()).to_contain_text('it reached the limit of tokens')
    expect(page.locator('#memory')).to_contain_text('0 B in use by 0 of 3 rows')
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
    assert page.locator('.user').count() == 5


def test_the_server_ends(markup_server, visit, slow_steps):
    server = markup_server()
    page = visit(server)
    page.get_by_label('Tokens').fill('40')  # it must not end before its connection does
    start(page, 'ab1')
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
    send(page, 'ab1')
    page.get_by_label('Plain prompt').check()
    send(page, 'a1')
    assert asked[-1]['prompt'] == 'a1'
    page.get_by_label('Chat').check()
    page.locator('#text').fill('draft')
    turns = page.locator('.user span, .assistant').all_inner_texts()
    assert len(turns) == 4
    page.reload()
    assert page.locator('.user span, .assistant').all_inner_texts() == turns
    expect(page.locator('#text')).to_have_value('draft')
    expect(page.locator('#tokens')).to_have_value('6')
    send(page, 'b')
    chat = [message['content'] for message in asked[-1]['messages']]
    assert chat == ['ab1', turns[1], 'b']  # without the plain prompt
    page.get_by_role('button', name='Edit').nth(1).click()
    expect(page.get_by_label('Plain prompt')).to_be_checked()
