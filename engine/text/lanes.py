"""Draws the KV cache in a terminal while a sample is written: a lane of cells for each slot.

    a ring of 8 positions after 11 tokens,         index  0  1  2  3  4  5  6  7
    the first 4 of them the prompt                 holds  8  9 10  3  4  5  6  7
                                                   lane   ▓  ▓  █  ›  ▓  ▓  ▓  ▓
"""
import contextlib
import sys
import time
from itertools import groupby

from rich.cells import chop_cells
from rich.console import Console
from rich.live import Live
from rich.text import Text

from common.sizes import nice_bytes
from common.terminal import visible
from kv.plan import LOCAL, KVPlan, Slot

PROMPT, GENERATED, NEWEST, NEXT, EMPTY = '░▓█›·'
STYLES = {PROMPT: 'cyan', GENERATED: 'green', NEWEST: 'yellow', NEXT: 'yellow', EMPTY: 'dim'}
LEGEND = f'{PROMPT} prompt  {GENERATED} generated  {NEWEST} newest  {NEXT} next  {EMPTY} empty'
INTERVAL = 0.05        # seconds between frames, at least


def lane(slot: Slot, length: int, n_prompt: int, max_seq_len: int, columns: int) -> str:
    """Return at most `columns` cells in index order. A cell shows the newest of its positions. In a
    ring, NEXT is the cell to be overwritten after it."""
    capacity = slot.capacity(max_seq_len)
    per_cell = -(-capacity // columns)
    positions, cells = slot.positions(length, max_seq_len), []
    for i in range(0, capacity, per_cell):
        newest = max(positions[i:i + per_cell], default=-1)
        cells.append(EMPTY if newest < 0 else NEWEST if newest == length - 1 else
                     PROMPT if newest < n_prompt else GENERATED)
    if slot.kind == LOCAL and length and len(cells) > 1:
        cells[(cells.index(NEWEST) + 1) % len(cells)] = NEXT
    return ''.join(cells)


def frame(plan: KVPlan, max_seq_len: int, kv_dtype: str, length: int, n_prompt: int,
          text: str | None, width: int, height: int) -> Text:
    """Return at most `height` lines of at most `width` columns: the end of the text (None: without
    it), the lanes of a cache of one row that holds `length` tokens, and totals."""
    body, digits = [Text('─' * width, 'dim')], len(f'{max_seq_len:,}')
    for slot in plan.slots:
        layers = ' '.join(f'{i}*' if i == slot.owner else str(i) for i in slot.layers)
        line = Text(f'{slot.index:3} {slot.kind[0].upper()} {layers:12.12} '
                    f'{slot.capacity(length):{digits},}/{slot.capacity(max_seq_len):<{digits},} ')
        columns = max(1, width - len(line))
        for cell, run in groupby(lane(slot, length, n_prompt, max_seq_len, columns)):
            line.append(''.join(run), STYLES[cell])
        body.append(line)
    now, vanilla = (p.nbytes(1, length, kv_dtype) for p in (plan, plan.vanilla()))
    body += [Text(LEGEND, 'dim'), Text(
        f'{nice_bytes(now)} of {nice_bytes(plan.nbytes(1, max_seq_len, kv_dtype))}; vanilla GPT-2: '
        f'{nice_bytes(vanilla)}, {vanilla / max(now, 1):.1f}x', 'bold')]
    if text is not None:
        rows = max(1, height - len(body))
        shown = [piece for line in text.expandtabs().split('\n')[-rows:]
                 for piece in chop_cells(line, width) or ['']][-rows:]
        shown += [''] * (rows - len(shown))  # the lanes stay where they are
        body = [*map(Text, shown), *body]
    for line in body:
        line.truncate(width)
    return Text('\n', no_wrap=True).join(body[-height:])


def watchable() -> bool:
    """Return whether stdout is a terminal in which frames can be drawn."""
    console = Console()
    return (sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
            and not console.options.ascii_only)


@contextlib.contextmanager
def watching(generation, speed: float):
    """Draw the cache of a `generate.Generation` of one prompt. Yields a function to be called with
    the prompt's text and then with the piece of each token, and a clock; at the end, prints the
    entire text. speed: tokens per second at most; 0 = no limit. The clock stands still while it
    waits for that."""
    cache, [n_prompt], console = generation.cache, generation.prompt_lens, Console()
    text, begin, due, waited = '', time.perf_counter(), 0.0, 0.0

    def clock():
        return time.perf_counter() - waited

    def draw(text):
        live.update(frame(cache.plan, cache.max_seq_len, cache.kv_dtype, cache.lengths.item(),
                          n_prompt, text, console.width, console.height - 1), refresh=True)

    def write(piece):
        nonlocal text, due, waited
        text += visible(piece)
        if time.perf_counter() >= due:
            draw(text)
            due = time.perf_counter() + INTERVAL
        if speed:
            early = max(0.0, begin + len(generation.made) / speed - time.perf_counter())
            time.sleep(early)
            waited += early

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print(text, end='', flush=True))  # even if interrupted
        live = stack.enter_context(Live(console=console, auto_refresh=False,
                                        redirect_stderr=sys.stderr.isatty()))
        stack.callback(lambda: draw(None))
        yield write, clock
