"""The page in a browser: what it keeps of conversations, and what it says of a turn. Needs
Chromium, as test_page.py."""
import json

import pytest
from playwright.sync_api import expect

from tests.serving.browser import answering, edit, enter, send
from tests.serving.conftest import eventually

pytestmark = pytest.mark.slow


def texts(page):
    return page.locator('.user span, .assistant').all_inner_texts()


@pytest.mark.parametrize('fails', [False, True])
def test_an_edit_loses_neither_later_turns_nor_a_draft(markup_server, visit, fails):
    page = visit(markup_server())
    for text in ('ab1', 'in', 'a1'):
        send(page, text)
    before = texts(page)
    page.locator('#text').fill('draft')
    edit(page, 1)
    expect(page.locator('#text')).to_have_value('in')
    assert texts(page) == before
    if fails:
        page.route('**/chat/completions', answering(dict(status=503, json={})))
        page.locator('#text').press('Enter')
        expect(page.locator('#error')).to_have_text('HTTP 503')
        expect(page.locator('#text')).to_have_value('in')
        assert '503' in page.wrong.pop() and texts(page) == before
        page.unroute('**/chat/completions')
    page.get_by_role('button', name='Cancel edit').click()
    expect(page.locator('#text')).to_have_value('draft')
    edit(page, 1)
    enter(page, 'ie')
    expect(page.locator('#send')).to_be_enabled()
    expect(page.locator('#text')).to_have_value('draft')
    assert texts(page)[:3] == [*before[:2], 'ie'] and len(texts(page)) == 4


def test_a_draft_survives_a_message_that_fails(markup_server, visit, held):
    page = visit(markup_server())
    enter(page, 'ab1')
    expect(page.locator('#text')).to_have_value('')
    page.locator('#text').fill('draft')
    page.locator('#stop').click()
    expect(page.locator('#text')).to_have_value('ab1\ndraft')


def test_a_browser_that_dies_keeps_the_conversation(markup_server, visit, held):
    """What was sent at once, and of a reply what came a few seconds ago."""
    page = visit(markup_server())
    page.evaluate('onpagehide = document.onvisibilitychange = null')
    page.locator('#temperature').fill('0')  # a sampled reply may be empty
    enter(page, 'ab1')
    stored = lambda: [turn['content'] for text in page.evaluate('Object.values(localStorage)')
                      for turn in json.loads(text).get('said', ())]
    eventually(lambda: stored() == ['ab1', ''])
    held.release(8)
    eventually(lambda: stored()[1])
    after = page.context.new_page()
    after.goto(page.url)
    after.locator('#earlier').select_option(label='ab1')
    assert texts(after)[0] == 'ab1' and stored()[1].startswith(texts(after)[1])


def test_two_tabs_and_new_chats_keep_all(markup_server, visit):
    page = visit(markup_server())
    send(page, 'ab1')
    for text in ('in', 'a1'):
        page.get_by_role('button', name='New chat').click()
        send(page, text)
    other = page.context.new_page()
    other.goto(page.url)
    assert texts(other) == []
    other.locator('#earlier').select_option(label='a1')  # it is open in the first tab, too
    send(other, 'b')
    send(page, 'n')
    both = [texts(page), texts(other)]
    for tab in (page, other):
        tab.reload()
    assert [texts(page), texts(other)] == both
    assert sorted(page.locator('#earlier option').all_inner_texts()[1:]) == ['a1', 'ab1', 'in']
    page.locator('#earlier').select_option(label='ab1')
    assert texts(page)[0] == 'ab1'


def test_a_full_storage_drops_the_oldest(markup_server, visit):
    page = visit(markup_server())
    page.evaluate("""() => {
        const old = {mode: 'chat', said: [], text: 'x'.repeat(10)}
        for (let i = 0; i < 40; i++)
            localStorage.setItem('nanokv-' + i, JSON.stringify({...old, text: 'x' + i, at: i}))
        localStorage.setItem('other', 'x'.repeat(5_200_000))
    }""")
    send(page, 'ab1')
    names = page.evaluate("Object.keys(localStorage).filter(key => key.startsWith('nanokv-'))")
    assert len(names) == 30 and 'nanokv-39' in names and 'nanokv-10' not in names
    page.evaluate("""() => {
        const room = 5 * 2 ** 20 - JSON.stringify(localStorage).length
        for (let n = 2 ** 20; n >= 1; n /= 2)
            try { for (;;) localStorage.other += 'x'.repeat(n) } catch {}
    }""")
    send(page, 'in')
    names = page.evaluate("Object.keys(localStorage).filter(key => key.startsWith('nanokv-'))")
    assert 1 <= len(names) < 30 and 'nanokv-39' in names
    expect(page.locator('#error')).to_be_empty()
    page.reload()
    assert texts(page)[::2] == ['ab1', 'in']


def test_it_says_that_a_request_waits(markup_server, visit, held):
    page, status = visit(markup_server()), lambda: page.get_by_role('status').first
    expect(status()).to_be_empty()
    enter(page, 'ab1' * 12)
    expect(status()).to_have_text('Sent. The request waits for the server.')
    held.release(1)
    expect(status()).to_have_text('The model reads the prompt.')
    held.set()
    expect(page.locator('#send')).to_be_enabled()
    expect(status()).to_be_empty()


def test_without_a_mouse(markup_server, visit):
    """The text box is two keys away."""
    page = visit(markup_server())
    for text in ('ab1', 'in'):
        send(page, text)
    page.reload()
    page.keyboard.press('Tab')
    page.keyboard.press('Enter')
    expect(page.locator('#text')).to_be_focused()
    assert float(page.locator('#stop').evaluate('node => getComputedStyle(node).opacity')) < 0.6
