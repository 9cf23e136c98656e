"""What tests of the page do in a browser, and answers to give it in place of the server's."""
import json
import re

MARKUP = '<img src=x onerror=go()>'
ALPHABET = ''.join(sorted({*MARKUP, *'<script>', *'ab1:\n'}))  # 23 tokens, as the model has


def answering(answer):
    return lambda route: route.fulfill(**answer)


def enter(page, text):
    page.locator('#text').fill(text)
    page.locator('#text').press('Enter')


def send(page, text, tokens=6, plain=False):
    from playwright.sync_api import expect
    if plain:
        page.get_by_label('Plain prompt').check()
    page.locator('#tokens').fill(str(tokens))
    page.locator('#temperature').fill('0')
    enter(page, text)
    expect(page.locator('#text')).to_have_value('')
    expect(page.locator('#send')).to_be_enabled()
    drawn(page)


def drawn(page):
    """The lanes once all that happened is drawn."""
    return page.evaluate('''() => new Promise(done => requestAnimationFrame(() =>
        requestAnimationFrame(() => done(nanokv.lanes()))))''')


def edit(page, number):
    page.locator('.user').nth(number).hover()
    page.locator('.edit').nth(number).click()


def start(page, text, tokens=12):
    """Send it as a plain prompt, and wait until some of the reply is there."""
    from playwright.sync_api import expect
    page.get_by_label('Plain prompt').check()
    page.locator('#tokens').fill(str(tokens))
    page.locator('#text').fill(text)
    page.locator('#send').click()
    expect(page.locator('.assistant').last).to_have_text(re.compile('..'))


def streamed(*documents):
    """The answer that streams these documents. A cache event has no `choices`."""
    lines = ['event: cache\n' * ('choices' not in d) + f'data: {json.dumps(d)}\n\n'
             for d in documents]
    return dict(body=''.join(lines) + 'data: [DONE]\n\n')


def said(text, reason=None):
    return dict(choices=[dict(delta=dict(content=text), finish_reason=reason)])


def number(page, name):
    return page.locator('#bars div', has_text=name).locator('dd').text_content()
