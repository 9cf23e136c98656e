"""The page in a browser: how it looks, and who can use it. Needs Chromium, as test_page.py."""

import pytest
from playwright.sync_api import expect

from tests.serving.browser import drawn, send
from tests.serving.conftest import LONGEST, MODEL

pytestmark = pytest.mark.slow
RING = min(slot.capacity(LONGEST) for slot in MODEL.plan.slots)


def factors(page):
    return [float(x) for x in page.locator('#factors data').all_inner_texts()]


def test_factors_of_the_ratio_from_the_first_view(markup_server, visit):
    page = visit(markup_server())
    expect(page.locator('header')).to_contain_text('nanoKV')
    expect(page.locator('.intro')).to_contain_text('Send it the beginning of a text')
    expect(page.locator('#ratio')).to_contain_text(f'after {LONGEST} tokens, the most')
    planned = MODEL.plan.factors(LONGEST, 'float64')
    assert factors(page) == pytest.approx([planned[name] for name in
                                           ('heads', 'window', 'sharing')], rel=0.01)
    assert [len(lane['cells']) for lane in drawn(page)] == [
        slot.capacity(LONGEST) for slot in MODEL.plan.slots]
    send(page, 'ab1', tokens=RING + 6)
    heads, window, sharing = factors(page)
    frame = page.evaluate('nanokv.frame()')
    vanilla = MODEL.plan.vanilla().nbytes(1, frame['length'], 'float64')
    assert heads * window * sharing == pytest.approx(vanilla / frame['nbytes'], rel=0.02)
    page.locator('#slider').fill('2')
    drawn(page)
    expect(page.locator('.later')).to_have_css('visibility', 'hidden')


@pytest.mark.parametrize('how', ['focus', 'tap'])
def test_definitions_by_keys_and_by_a_tap(markup_server, visit, how):
    page = visit(markup_server(), size=(1280, 620), has_touch=how == 'tap')
    after = "node => getComputedStyle(node, '::after').content"
    for term in page.locator('#headline .term, #lanes .term').all():
        getattr(term, how)()
        assert term.get_attribute('aria-description') in term.evaluate(after)
        drawn(page)
        expect(term).to_be_focused()


def test_large_lanes_and_edits_by_keys(markup_server, visit):
    page = visit(markup_server())
    button = page.get_by_role('button', name='Slot 0 large')
    button.press('Enter')
    expect(button).to_have_attribute('aria-pressed', 'true')
    for text in ('ab1', 'in'):
        send(page, text)
    page.mouse.move(0, 0)
    expect(page.locator('.edit').first).to_be_hidden()  # so it is no tab stop before the text box
    page.locator('.edit').last.focus()
    expect(page.locator('.edit').first).to_be_visible()
    page.keyboard.press('Shift+Tab')
    expect(page.locator('.edit').first).to_be_focused()


def test_forced_colours(markup_server, visit):
    page = visit(markup_server(), forced_colors='active')
    for bar in page.locator('#bars i').all():
        expect(bar).to_have_css('border-style', 'solid')
        expect(bar).to_have_css('forced-color-adjust', 'none')


def test_marks_of_age_and_of_the_seam(markup_server, visit):
    """A token is the paler the older it is; a full ring has a seam before what it forgets next."""
    page = visit(markup_server(), size=(1280, 800))
    page.get_by_label('Plain prompt').check()
    ring = page.locator('#lanes section', has_text='(ring)').locator('canvas').first
    seams = []
    for tokens in (1, RING + 20):
        send(page, 'ab1', tokens=tokens)
        seam, alphas = ring.evaluate("""node => {
            const {width, height} = node, copy = new OffscreenCanvas(width, height).getContext('2d')
            copy.drawImage(node, 0, 0)
            const {data} = copy.getImageData(0, 0, width, height)
            const probe = document.body.appendChild(document.createElement('i')), counts = {}
            const rgb = name => {
                probe.style.color = `var(--${name})`
                return getComputedStyle(probe).color.match(/\\d+/g).map(Number)
            }
            const lit = rgb('lit'), accent = rgb('accent')
            const near = (i, colour) => colour.every((x, j) => Math.abs(x - data[i + j]) < 3)
            let seam = 0
            for (let i = 0; i < data.length; i += 4) {
                if (near(i, lit) && data[i + 3] === 255) seam++
                if (near(i, accent)) counts[data[i + 3]] = (counts[data[i + 3]] ?? 0) + 1
            }
            return [seam, Object.keys(counts).filter(alpha => counts[alpha] > 50).map(Number)]
        }""")
        seams.append(seam)
    assert seams[0] == 0 < seams[1]
    for shade in (1, 0.85, 0.5, 0.35):
        assert any(abs(alpha - 255 * shade) < 2 for alpha in alphas), (shade, alphas)
