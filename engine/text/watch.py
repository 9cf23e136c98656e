"""Draws the KV cache in a terminal while a sample is written: a lane of cells for each slot.

    a ring of 8 positions after 11 tokens,         index  0  1  2  3  4  5  6  7
    the first 4 of them the prompt                 holds  8  9 10  3  4  5  6  7
                                                   lane   ▓  ▓  █  ›  ▓  ▓  ▓  ▓
"""
import contextlib
import sys
import textwrap
import time
from itertools import groupby

from rich.cells import chop_cells
from rich.console import Console
from rich.live import Live
from rich.text import Text

from config.sizes import nice_bytes
from config.terminal import visible
from kv.plan import LOCAL, KVPlan, Slot

PROMPT, GENERATED, NEWEST, NEXT, EMPTY = '░▓█›·'
STYLES = {PROMPT: 'cyan', GENERATED: 'green', NEWEST: 'yellow', NEXT: 'yellow', EMPTY: 'dim'}
LEGEND = (f'{PROMPT} prompt  {GENERATED} generated  {NEWEST} newest  {NEXT} next write  '
          f'{EMPTY} empty  * computes K, V')
HEADER = ('slot', '', 'layers', 'bytes', 'positions')
NARROW = 60            # columns: below, labels leave out the number of positions
TEXT_LINES = 3         # the sample gets at least so many
INTERVAL = 0.05        # seconds between frames, at least
SHARE = 0.1            # of the time may be spent on drawing
SOON = 8               # tokens after the prompt until the next event is told
LONGEST = 80           # characters of a caption


def lane(slot: Slot, length: int, n_prompt: int, max_seq_len: int, columns: int) -> tuple[str, int]:
    """Return at most `columns` cells in index order, and the number of positions in each.

    A cell shows the newest position in it. In a ring, NEXT is the cell to be overwritten after it.
    """
    capacity = slot.capacity(max_seq_len)
    per_cell = -(-capacity // columns)
    positions, cells = slot.positions(length, max_seq_len), []
    for i in range(0, capacity, per_cell):
        newest = max(positions[i:i + per_cell], default=-1)
        cells.append(EMPTY if newest < 0 else NEWEST if newest == length - 1 else
                     PROMPT if newest < n_prompt else GENERATED)
    if slot.kind == LOCAL and length and len(cells) > 1:
        cells[(cells.index(NEWEST) + 1) % len(cells)] = NEXT
    return ''.join(cells), per_cell


def labels(plan: KVPlan, max_seq_len: int, kv_dtype: str, length: int, narrow: bool) -> list[str]:
    """Return the header and a label per slot, all of one width that does not depend on `length`."""
    rows = [HEADER]
    for slot in plan.slots:
        layers = ' '.join(f'{i}*' if i == slot.owner else str(i) for i in slot.layers)
        layers = layers if len(layers) <= 20 else layers[:19] + '…'
        held, capacity = slot.capacity(length), f'{slot.capacity(max_seq_len):,}'
        kind = slot.kind[0].upper() + (' latent' if slot.latent else ' K=V' * slot.tied)
        size = f'{nice_bytes(slot.nbytes(1, held, kv_dtype)):>7}'
        rows.append((str(slot.index), kind, layers, size, f'{held:{len(capacity)},}/{capacity}'))
    columns = list(zip(*rows))[:4 if narrow else 5]
    padded = [[f'{field:{align}{max(map(len, column))}}' for field in column]
              for column, align in zip(columns, '><<>>')]
    return [('  ', ' ')[narrow].join(row) for row in zip(*padded)]


def frame(plan: KVPlan, max_seq_len: int, kv_dtype: str, length: int, n_prompt: int,
          text: str | None, speed: float, width: int, height: int, recomputes=False) -> Text:
    """Return at most `height` lines of at most `width` columns: the end of the text, the lanes of
    a cache of one row that holds `length` tokens, and totals. No text: only lanes and totals.

    speed: tokens per second. recomputes: the text is past block_size (`generate.Generation`).
    """
    tall = 4 * len(plan.slots) <= height  # then lanes have lines of their own
    header, *names = labels(plan, max_seq_len, kv_dtype, length, width < NARROW)
    columns = max(1, width if tall else width - len(header) - len(f'  {max_seq_len:,}/cell '))
    foot = [Text(line, 'dim') for line in textwrap.wrap(LEGEND, width)]
    foot += [Text(line, 'bold') for line in textwrap.wrap(
        totals(plan, max_seq_len, kv_dtype, length, speed, recomputes), width)]
    room = max(1, height - len(foot) - 2 - TEXT_LINES)
    n_said = -(-LONGEST // width)  # whatever is said, the lanes stay where they are
    if room >= len(names) * (1 + tall) + n_said:
        said = textwrap.wrap(caption(plan, max_seq_len, length, n_prompt), width)
        foot = [Text(line, 'yellow') for line in (said + [''] * n_said)[:n_said]] + foot
        room -= n_said
    n = len(names) if tall or len(names) <= room else room - 1
    body = [Text(header, 'dim')]
    for slot, name in zip(plan.slots[:n], names):
        cells, per_cell = lane(slot, length, n_prompt, max_seq_len, columns)
        name += '  ' + f'{per_cell:,}/cell' * (per_cell > 1)
        line = Text(name + '\n' if tall else f'{name:{width - columns}}')
        for cell, run in groupby(cells):
            line.append(''.join(run), STYLES[cell])
        body += line.split()
    if n < len(names):
        body.append(Text(f'and {len(names) - n} more slots', 'dim'))
    body += foot
    if text is not None:
        rows = max(1, height - len(body) - 1)
        shown = last_lines(text, width, rows)
        shown += [''] * (rows - len(shown))  # the lanes stay where they are
        body = [*map(Text, shown), Text('─' * width, 'dim'), *body]
    for line in body:
        line.truncate(width)
    return Text('\n', no_wrap=True).join(body[-height:])


def caption(plan: KVPlan, max_seq_len: int, length: int, n_prompt: int) -> str:
    """Return a sentence about what happened last, as the page of serve.py has them."""
    events = {n_prompt: 'The prompt was read at once. Its keys and values are stored.'}
    shared = next((slot for slot in plan.slots if len(slot.layers) > 1), None)
    if shared:
        events[n_prompt + SOON] = (f'Layer {shared.layers[-1]} reads what layer {shared.owner} '
                                   'stored. It stores nothing itself.')
    rings = [slot for slot in plan.slots if slot.capacity(max_seq_len) < max_seq_len]
    for window in sorted({slot.window for slot in rings}):
        which = [str(slot.index) for slot in rings if slot.window == window]
        where = f'{len(which)} slots' if len(which) > 5 else f"slot {', '.join(which)}"
        full = window if window > n_prompt else n_prompt + 2 * SOON
        events[full] = f'Ring full: each new token overwrites the oldest one in {where}.'
    return events[max(n for n in events if n <= length)] if length >= n_prompt else ''


def totals(plan, max_seq_len, kv_dtype, length, speed, recomputes) -> str:
    held = sum(slot.capacity(length) for slot in plan.slots)
    now, vanilla = (p.nbytes(1, length, kv_dtype) for p in (plan, plan.vanilla()))
    return (f'{held:,} entries: {nice_bytes(now)} of '
            f'{nice_bytes(plan.nbytes(1, max_seq_len, kv_dtype))}; vanilla GPT-2: '
            f'{nice_bytes(vanilla)}' + f', {vanilla / max(now, 1):.1f}x' * (length > 0)
            + f'; {speed:,.0f} tokens/s' + '; past block_size: recomputed' * recomputes)


def last_lines(text: str, width: int, n: int) -> list[str]:
    """Return the last n lines of `text`, wrapped as in a terminal, control characters escaped."""
    lines = []
    for line in text.split('\n')[-n:]:
        visible = ''.join(c if c.isprintable() else repr(c)[1:-1] for c in line.expandtabs())
        lines += chop_cells(visible, width) or ['']
    return lines[-n:]


def watchable() -> bool:
    """Return whether stdout is a terminal in which frames can be drawn."""
    console = Console()
    return (sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
            and not console.options.ascii_only)


@contextlib.contextmanager
def watching(generation, speed: float):
    """Draw the cache of a `generate.Generation` of one prompt. Yields a function to be called with
    the prompt's text and then with the piece of each token, and a clock; at the end, prints the
    entire text.

    speed: tokens per second at most; 0 = no limit. The clock stands still while it waits for that.
    """
    cache, [n_prompt], console = generation.cache, generation.prompt_lens, Console()
    text, begin, due, waited = '', time.perf_counter(), 0.0, 0.0

    def clock():
        return time.perf_counter() - waited

    def draw(text):
        length, n = cache.lengths.item(), len(generation.made)
        width, height = console.size
        live.update(frame(cache.plan, cache.max_seq_len, cache.kv_dtype, length, n_prompt, text,
                          n / max(clock() - begin, 1e-9), width, height - 1,
                          recomputes=n > 0 and n_prompt + n - 1 > length), refresh=True)

    def write(piece):
        nonlocal text, due, waited
        text += piece
        began = time.perf_counter()
        if began >= due:
            draw(text)
            now = time.perf_counter()
            due = now + max(INTERVAL, (now - began) / SHARE)
        if speed:
            early = begin + len(generation.made) / speed - time.perf_counter()
            time.sleep(max(0.0, early))
            waited += max(0.0, early)

    try:
        with Live(console=console, auto_refresh=False,
                  redirect_stderr=sys.stderr.isatty()) as live:
            try:
                yield write, clock
            finally:
                draw(None)
    finally:  # even if interrupted
        print(visible(text), end='', flush=True)
