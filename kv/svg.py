"""A drawing of a KV plan as SVG. No torch here.

A row per layer, from the first to the last. Each slot is an upright line from the layer that
computes its K and V (a full dot) to the last layer that reads them (hollow dots). The owner's row
has a bar whose length is the positions held. Below: the bytes of all slots, and of vanilla GPT-2.
"""
from kv.plan import GLOBAL, KVPlan, Slot

MARGIN, PITCH = 8, 26
TOP = 120  # y of the first row
BOX, LANE, BAR = 48, 12, 200  # widths of a layer's box, of a slot's lane, of the longest bar
FONT = 12
CHARACTER = 0.61 * FONT  # at least the width of a character in common monospaced fonts

STYLE = """text {{ font: {font}px ui-monospace, monospace; fill: {ink}; white-space: pre }}
.dim {{ fill: {dim} }}
.strong {{ font-weight: 600 }}
.on {{ fill: {on}; font-weight: 600 }}
.global {{ fill: {blue}; stroke: {blue} }}
.local {{ fill: {pale}; stroke: {blue} }}
.vanilla {{ fill: {rule}; stroke: {thin} }}
.owner {{ fill: {blue}; stroke: {blue} }}
.reader {{ fill: {page}; stroke: {thin} }}
.rule {{ stroke: {rule} }}
"""
LIGHT = dict(ink='#1f2328', dim='#59636e', on='#ffffff', blue='#0b57b8', pale='#dceafb',
             rule='#d1d9e0', thin='#77818c', page='#ffffff')
DARK = dict(ink='#e6edf3', dim='#9aa4af', on='#0d1117', blue='#6cb0ff', pale='#14305a',
            rule='#3d444d', thin='#828c97', page='#0d1117')


def plan_svg(plan: KVPlan, max_seq_len: int, kv_dtype: str) -> str:
    """Return the SVG for one sequence of `max_seq_len` tokens, with a light and a dark scheme."""
    head, table, ratio = texts(plan, max_seq_len, kv_dtype)
    lanes = lanes_of(plan.slots)
    first_lane = MARGIN + BOX + 20
    bars = first_lane + LANE * max(lanes) + 20
    text_x = bars + BAR + 16
    bottom = TOP + PITCH * len(plan.layers)
    elements = [text(MARGIN, 24 + 20 * i, line, 'strong' if i == 0 else 'dim')
                for i, line in enumerate(head)]
    elements.append(text(bars, TOP - 8, f'held of T = {max_seq_len:,}', 'dim'))

    for slot, lane in zip(plan.slots, lanes):
        x, y = first_lane + LANE * lane, TOP + PITCH * (slot.owner + 0.5)
        last = TOP + PITCH * (slot.layers[-1] + 0.5)
        held = max(2, BAR * slot.capacity(max_seq_len) / max_seq_len)
        elements += [line_to(x, y, x, last, 'reader'), line_to(bars, y, bars + BAR, y, 'rule'),
                     bar(bars, y, held, slot.kind), text(text_x, y + 4, table[slot.index])]

    for layer in plan.layers:
        x, y = first_lane + LANE * lanes[layer.slot], TOP + PITCH * (layer.index + 0.5)
        role, end = ('owner', bars) if layer.owns else ('reader', x)
        elements += [line_to(MARGIN + BOX, y, end, y, role),
                     f'<circle cx="{x:g}" cy="{y:g}" r="4" class="{role}"/>',
                     bar(MARGIN, y, BOX, layer.kind, height=20),
                     text(MARGIN + 8, y + 4, f'{layer.kind[0].upper()}{layer.index:4}',
                          'on' if layer.kind == GLOBAL else '')]

    share = plan.nbytes(1, max_seq_len, kv_dtype) / plan.vanilla().nbytes(1, max_seq_len, kv_dtype)
    for i, (length, kind) in enumerate(((share, GLOBAL), (1, 'vanilla'))):
        y = bottom + 20 + PITCH * i
        elements += [bar(bars, y, max(2, BAR * length), kind), text(text_x, y + 4, table[i - 2])]
    elements.append(text(MARGIN, bottom + 84, ratio, 'strong'))

    width = MARGIN + max([text_x + CHARACTER * len(table[0])]
                         + [MARGIN + CHARACTER * len(line) for line in (*head, ratio)])
    dark = f'@media (prefers-color-scheme: dark) {{\n{STYLE.format(font=FONT, **DARK)}}}'
    return '\n'.join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 96}" '
        f'viewBox="0 0 {width:.0f} {bottom + 96}" role="img">', f'<title>{head[0]}</title>',
        f'<style>\n{STYLE.format(font=FONT, **LIGHT)}{dark}\n</style>', *elements, '</svg>\n'])


def texts(plan: KVPlan, max_seq_len: int, kv_dtype: str) -> tuple[list[str], list[str], str]:
    """The lines above, words and bytes of each slot, all and vanilla GPT-2, the line below."""
    ours, vanilla = (p.nbytes(1, max_seq_len, kv_dtype) for p in (plan, plan.vanilla()))
    kinds = {slot.kind: f'{slot.kind[0].upper()}: {slot.kind}, sees '
             + (f'the last {plan.windows} tokens' if slot.window else 'all tokens')
             for slot in plan.slots}
    head = [f'KV cache of {len(plan.layers)} layers and {max_seq_len:,} tokens',
            f'query heads {plan.n_head}, K/V heads {plan.heads_of_kv}, head width {plan.head_dim}, '
            f'{kv_dtype}, one sequence',
            '   '.join([*kinds.values(), '\N{BLACK CIRCLE} computes K and V',
                        '\N{WHITE CIRCLE} reads them'])]

    rows = [(slot_text(slot, max_seq_len), slot.nbytes(1, max_seq_len, kv_dtype))
            for slot in plan.slots]
    rows += [(f'all slots: {len(plan.slots)}', ours),
             (f'vanilla GPT-2, K/V heads: {plan.n_head}', vanilla)]
    widest = max(len(words) for words, _ in rows)
    table = [f'{words:<{widest}} {nbytes:>14,} bytes' for words, nbytes in rows]

    f = plan.factors(max_seq_len, kv_dtype)
    ratio = (f"K/V heads {f['heads']:.3g} \N{MULTIPLICATION SIGN} windows {f['window']:.3g} "
             f"\N{MULTIPLICATION SIGN} sharing {f['sharing']:.3g} = {vanilla / ours:,.1f} times "
             f'smaller than vanilla GPT-2 in {kv_dtype}')
    return head, table, ratio


def slot_text(slot: Slot, max_seq_len: int) -> str:
    """What a slot holds: 'slot 2, global: 1,024 tokens'; what it stores unless K and V."""
    form = ', K = V' if slot.tied else ''
    if slot.latent:
        form = f', latent of {slot.head_dim}'
    return f'slot {slot.index}, {slot.kind}: {slot.capacity(max_seq_len):,} tokens{form}'


def lanes_of(slots: tuple[Slot, ...]) -> list[int]:
    """The lane of each slot. Slots whose rows overlap have different lanes."""
    lanes, ends = [], []  # ends: lane -> the last row that is taken
    for slot in slots:
        lane = next((k for k, end in enumerate(ends) if end < slot.owner), len(ends))
        ends[lane:lane + 1] = [slot.layers[-1]]
        lanes.append(lane)
    return lanes


def bar(x: float, y: float, width: float, kind: str, height: int = 10) -> str:
    """A rectangle around the height y: of global layers with corners, others rounded."""
    radius = 0 if kind == GLOBAL else 5
    return (f'<rect x="{x:g}" y="{y - height / 2:g}" width="{width:g}" height="{height}" '
            f'rx="{radius}" class="{kind}"/>')


def line_to(x: float, y: float, x2: float, y2: float, cls: str) -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" class="{cls}"/>'


def text(x: float, y: float, words: str, cls: str = '') -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{cls}">{words}</text>'
