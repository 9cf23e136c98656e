"""A drawing of a KV plan as SVG. No torch here.

A row per layer, from the first to the last. A slot stands in the row of the layer that computes its
K and V, as a bar whose length is the positions held; thin lines lead from it to the layers that
only read it. Below: the bytes of all slots, and of vanilla GPT-2.
"""
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from kv.plan import GLOBAL, LOCAL, KVPlan, Slot

MARGIN, GAP = 8, 16
WIDTH = 900
BOX = 48  # width of a layer's box
TOP = 112  # y of the first row
EM = 0.62  # average width of a character: an upper bound for common fonts
TIMES = '\N{MULTIPLICATION SIGN}'

STYLE = """text {{ font-family: system-ui, sans-serif; fill: {ink} }}
.dim {{ fill: {dim} }}
.strong {{ font-weight: 600 }}
.global {{ fill: {blue}; stroke: {blue} }}
.local {{ fill: {pale}; stroke: {blue} }}
.on {{ fill: {on}; font-weight: 600 }}
.vanilla {{ fill: {rule}; stroke: {thin} }}
.rule {{ stroke: {rule} }}
.owner {{ fill: none; stroke: {blue}; stroke-width: 2 }}
.reader {{ fill: none; stroke: {thin} }}
.owner-tip {{ fill: {blue} }}
.reader-tip {{ fill: {thin} }}
"""
LIGHT = dict(ink='#1f2328', dim='#59636e', on='#ffffff', blue='#0b57b8', pale='#dceafb',
             rule='#d1d9e0', thin='#77818c')
DARK = dict(ink='#e6edf3', dim='#9aa4af', on='#0d1117', blue='#6cb0ff', pale='#14305a',
            rule='#3d444d', thin='#828c97')


def plan_svg(plan: KVPlan, max_seq_len: int, kv_dtype: str) -> str:
    """Return the SVG for one sequence of `max_seq_len` tokens, with a light and a dark scheme.

    It is 900 pixels wide, or wider if its numbers are very long: widths of text are estimated.

    Raises:
        UserError: if kv_dtype is unknown.
    """
    says = Texts(plan, max_seq_len, kv_dtype)
    grid = _grid(plan, says)
    body = [*_head(says, grid), *_rows(plan, grid)]
    for slot, texts in zip(plan.slots, says.slots):
        body += _slot(slot, texts, slot.capacity(max_seq_len) / max_seq_len, grid)
    body += _totals(says, grid, len(plan.layers))
    dark = f'@media (prefers-color-scheme: dark) {{\n{STYLE.format(**DARK)}}}\n'
    size = {'width': f'{grid.width:g}', 'height': f'{grid.y(len(plan.layers)) + 96:g}'}
    return _tag('svg', '\n' + '\n'.join([
        _tag('title', escape(says.title), id='title'), _tag('desc', escape(says.desc), id='desc'),
        _tag('style', '\n' + STYLE.format(**LIGHT) + dark), *body]) + '\n',
        xmlns='http://www.w3.org/2000/svg', **size, viewBox=f"0 0 {size['width']} {size['height']}",
        role='img', aria_labelledby='title desc') + '\n'


class Texts:
    """What the drawing says: `slots` has (what it holds, its layers, its bytes) of each slot,
    `totals` (name, slots, bytes) of the plan and of vanilla GPT-2."""

    def __init__(self, plan, max_seq_len, kv_dtype):
        def size(nbytes):
            return f'{nbytes(1, max_seq_len, kv_dtype):,} bytes'
        n, heads = len(plan.layers), _many(plan.n_kv_head, 'K/V head')
        window = max(layer.window for layer in plan.layers)
        vanilla, f = plan.vanilla(), plan.factors(max_seq_len, kv_dtype)
        ratio = vanilla.nbytes(1, max_seq_len, kv_dtype) / plan.nbytes(1, max_seq_len, kv_dtype)
        self.length = f'T = {max_seq_len:,}'
        self.slots = [(slot_text(slot, max_seq_len), layers_text(slot),
                       f'{slot.nbytes(1, max_seq_len, kv_dtype):,}')
                      for slot in plan.slots]
        self.totals = [
            ('all slots', f"{_many(len(plan.slots), 'slot')}, {heads}", size(plan.nbytes)),
            ('vanilla GPT-2', f"{_many(n, 'slot')} of {_many(max_seq_len, 'token')}, "
             f"{_many(plan.n_head, 'K/V head')}", size(vanilla.nbytes))]
        self.share = 1 / ratio
        self.title = f"KV cache of {_many(n, 'layer')} and {_many(max_seq_len, 'token')}"
        latents = {slot.head_dim for slot in plan.slots if slot.latent}
        self.subtitle = (f"{_many(plan.n_head, 'query head')}, {heads} of {plan.head_dim}, "
                         + ''.join(f'latents of {n}, ' for n in latents)
                         + f'{kv_dtype}, one sequence')
        legend = {LOCAL: f"local: sees the last {_many(window, 'token')}",
                  GLOBAL: 'global: sees all tokens', 'owner': "computes a slot's K and V",
                  'reader': 'only reads them'}
        drawn = {*(slot.kind for slot in plan.slots), 'owner'}
        drawn |= {'reader'} if n > len(plan.slots) else set()
        self.legend = {name: text for name, text in legend.items() if name in drawn}
        verdict = f' = {ratio:,.1f} times smaller than' if ratio > 1 else ': as large as'
        self.ratio = (f"K/V heads {f['heads']:.3g} {TIMES} windows {f['window']:.3g} {TIMES} "
                      f"sharing {f['sharing']:.3g}{verdict} vanilla GPT-2 in {kv_dtype}")
        self.desc = '; '.join([*(', '.join(each) + ' bytes' for each in self.slots),
                               *map(', '.join, self.totals), self.ratio]) + (
            '. A star marks the layer that computes K and V; the others read them.')


def slot_text(slot: Slot, max_seq_len: int) -> str:
    """What a slot holds: 'slot 2, global: all 1,024 tokens'; what it stores unless K and V."""
    held = slot.capacity(max_seq_len)
    beyond = f' (W = {slot.window:,})' if slot.window > max_seq_len else ''
    return (f"slot {slot.index}, {slot.kind}: {'all' if held == max_seq_len else 'the last'} "
            f"{_many(held, 'token')}{beyond}" + ', ' * slot.tied + form_text(slot))


def form_text(slot: Slot) -> str:
    """'K = V' or 'latent of 128' for a slot that stores one tensor; otherwise ''."""
    return f'latent of {slot.head_dim}' if slot.latent else 'K = V' * slot.tied


def layers_text(slot: Slot, longest: int = 24) -> str:
    """A slot's layers, the owner starred: 'layers 5* 11'. Long lists are cut, and counted."""
    names = [f'{slot.owner}*', *map(str, slot.layers[1:])]
    text = f"layer{'s' * (len(names) > 1)} {' '.join(names)}"
    for shown in range(len(names) - 2, 0, -1):
        if len(text) <= longest:
            break
        text = f"{len(names)} layers: {' '.join(names[:shown])} ... {names[-1]}"
    return text


@dataclass(frozen=True)
class Grid:
    """Where everything is, in pixels."""
    pitch: int      # height of a row
    font: int       # size of the text in rows
    lanes: dict     # slot -> x of the vertical line to its readers, for slots that have any
    bars: float     # x of the bars
    full: float     # length of the longest bar
    columns: tuple  # x of what slots hold, of their layers, and of the end of their bytes
    width: float

    def y(self, row: float) -> float:
        """The y of a row's upper edge; y(i + 0.5) is its centre."""
        return TOP + self.pitch * row


def _grid(plan, says) -> Grid:
    pitch = max(16, min(26, 720 // len(plan.layers)))
    font = 12 if pitch >= 20 else 10
    lane_of = _lanes(plan.slots)
    step = max(3, min(12, 144 // (1 + max(lane_of.values(), default=0))))
    lanes = {slot: MARGIN + BOX + 18 + step * lane for slot, lane in lane_of.items()}
    names, counts, totals = zip(*says.totals)
    bars = max(MARGIN + _wide(names, 12) + GAP, max(lanes.values(), default=0) + 26)
    held, layers, sizes = zip(*says.slots)
    layers = max(_wide(layers, font), _wide(['* computes K, V'], 11))
    sizes = max(_wide(sizes, font), _wide(['bytes'], 11))
    held = max(_wide(held, font), _wide(counts, 12) + _wide(totals, 12) - layers - sizes - GAP)
    others = bars + held + layers + sizes + 3 * GAP + MARGIN
    axis = _wide(['positions held'], 11) + GAP + _wide([says.length], 11)
    width = max(WIDTH, others + axis, 2 * MARGIN + _wide([says.title], 16),
                2 * MARGIN + max(_wide([says.subtitle, says.ratio], 12), _legend_x(says)[-1]))
    full = width - others
    second = bars + full + GAP
    return Grid(pitch, font, lanes, bars, full, (second, second + held + GAP, width - MARGIN),
                width)


def _lanes(slots) -> dict[int, int]:
    """Slot -> number of its lane. Slots whose rows overlap have different lanes; the shortest are
    next to the layers."""
    lanes, taken = {}, []  # taken: lane -> its rows
    for slot in sorted(slots, key=lambda s: (s.layers[-1] - s.owner, s.owner)):
        rows = set(range(slot.owner, slot.layers[-1] + 1))
        if len(rows) == 1:
            continue
        lane = next((i for i, others in enumerate(taken) if not others & rows), len(taken))
        if lane == len(taken):
            taken.append(set())
        taken[lane] |= rows
        lanes[slot.index] = lane
    return lanes


def _legend_x(says) -> list[float]:
    """The x of each entry of the legend, and of their end."""
    xs = [MARGIN]
    for text in says.legend.values():
        xs.append(xs[-1] + 34 + _wide([text], 11) + 12)
    return xs


def _head(says, grid):
    yield _text(MARGIN, 20, says.title, 16, 'strong')
    yield _text(MARGIN, 42, says.subtitle, 12, 'dim')
    for x, (name, text) in zip(_legend_x(says), says.legend.items()):
        if name in (LOCAL, GLOBAL):
            yield _box(name, x, 57, 24, 16)
            yield _inside(name, x + 12, 65, name[0].upper(), 11)
        else:
            yield _tag('path', d=f'M{x:g} 65h24', cls=name)
            yield _tip(name, x + (26 if name == 'owner' else -2), 65)
        yield _text(x + 32, 69, text, 11)
    held, layers, end = grid.columns
    for x, text, anchor in ((MARGIN, 'layer', ''), (grid.bars, 'positions held', ''),
                            (grid.bars + grid.full, says.length, 'end'),
                            (held, 'KV slot', ''), (layers, '* computes K, V', ''),
                            (end, 'bytes', 'end')):
        yield _text(x, TOP - 10, text, 11, 'dim', anchor)


def _rows(plan, grid):
    """The layers, and the line of each to its slot."""
    right = MARGIN + BOX
    for layer in plan.layers:
        y, half = grid.y(layer.index + 0.5), grid.pitch / 2 - 2
        if layer.owns:
            line = [_tag('path', d=f'M{right} {y:g}H{grid.bars - 4:g}', cls='owner'),
                    _tip('owner', grid.bars - 1, y)]
        else:
            slot = plan.slots[layer.slot]  # its last reader draws the line up to the owner
            up = f'V{grid.y(slot.owner + 0.5):g}' if layer.index == slot.layers[-1] else ''
            side = f'M{right + 4} {y:g}H{grid.lanes[slot.index] - 4:g}q4 0 4 -4'
            line = [_tag('path', d=side + up, cls='reader'), _tip('reader', right + 1, y)]
        yield _tag('g', ''.join(line), id=f'layer-{layer.index}-slot-{layer.slot}')
        yield _tag('g', ''.join([
            _box(layer.kind, MARGIN, y - half, BOX, 2 * half),
            _inside(layer.kind, MARGIN + 23, y, layer.index, grid.font, 'end'),
            _inside(layer.kind, MARGIN + 34, y, layer.kind[0].upper(), grid.font)]),
            id=f'layer-{layer.index}')


def _slot(slot, texts, share, grid):
    """The bar of a slot, the rest of its T positions as a line, and its texts."""
    y, length = grid.y(slot.owner + 0.5), max(2, grid.full * share)
    held, layers, end = grid.columns
    below = y + grid.font * 0.35
    if slot.index in grid.lanes:  # where its readers' lines end
        yield _tag('circle', cx=f'{grid.lanes[slot.index]:g}', cy=f'{y:g}', r=3, cls='owner-tip')
    yield _tag('g', ''.join([
        _tag('path', d=f'M{grid.bars:g} {y:g}h{grid.full:g}', cls='rule'),
        _box(slot.kind, grid.bars, y - 5, length, 10),
        _text(held, below, texts[0], grid.font), _text(layers, below, texts[1], grid.font),
        _text(end, below, texts[2], grid.font, anchor='end')]), id=f'slot-{slot.index}')


def _totals(says, grid, n_layer):
    """The bytes of the plan and of vanilla GPT-2, as bars of one scale, and their ratio."""
    top = grid.y(n_layer) + 8
    yield _tag('path', d=f'M{MARGIN} {top:g}H{grid.width - MARGIN:g}', cls='rule')
    for i, ((name, text, size), share) in enumerate(zip(says.totals, (says.share, 1))):
        y = top + 18 + 24 * i
        yield _text(MARGIN, y + 4, name, 12)
        yield _box('vanilla' if i else GLOBAL, grid.bars, y - 5, max(2, grid.full * share), 10)
        yield _text(grid.columns[0], y + 4, text, 12)
        yield _text(grid.columns[2], y + 4, size, 12, anchor='end')
    yield _text(MARGIN, top + 74, says.ratio, 12, 'strong')


def _box(kind, x, y, width, height):
    """Local: rounded and pale; global: solid, with corners."""
    radius = min(width, height) / 2 if kind == LOCAL else 0
    return _tag('rect', x=f'{x:g}', y=f'{y:g}', width=f'{width:g}', height=f'{height:g}',
                rx=f'{radius:g}', cls=kind)


def _inside(kind, x, y, text, size, anchor='middle'):
    return _text(x, y + size * 0.35, text, size, 'on' if kind == GLOBAL else '', anchor)


def _tip(name, x, y):
    """An arrowhead that ends at x: to the right for an owner, to the left for a reader."""
    back, half = (-8, 4.5) if name == 'owner' else (6, 3)
    return _tag('path', d=f'M{x:g} {y:g}l{back} {-half}v{2 * half:g}z', cls=f'{name}-tip')


def _text(x, y, text, size, cls='', anchor=''):
    return _tag('text', escape(str(text)), x=f'{x:g}', y=f'{y:g}', font_size=size, cls=cls,
                text_anchor=anchor)


def _tag(name, inside='', **attributes):
    """An element; attributes that are '' are left out, and `cls` is 'class'."""
    given = ''.join(f' {"class" if key == "cls" else key.replace("_", "-")}={quoteattr(str(value))}'
                    for key, value in attributes.items() if value != '')
    return f'<{name}{given}>{inside}</{name}>' if inside else f'<{name}{given}/>'


def _many(n, noun):
    return f"{n:,} {noun}{'s' * (n != 1)}"


def _wide(texts, size):
    return max(map(len, texts)) * EM * size
