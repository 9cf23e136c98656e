"""The Markdown page of lab/scripts/quantization.py, made from its JSON files: tables, and what follows from them."""
import statistics

from config.errors import UserError
from lab.scripts.kv_formats import Format, bytes_per_position

LIMIT = 0.01  # nats: what a format that is offered may cost
GAIN = 1.5    # and how many times smaller than int8 it must be
SAME = ('dataset', 'B', 'T', 'W', 'steps', 'dtype', 'windows', 'tokens', 'torch', 'hardware')  # of all runs on one page
WORDS = {'plain': 'trained without rounding', 'qat': "kv_quant_train='int8'",
         'head64': '2 heads of 64 (`--n_head=2`), without rounding'}
POSITIONS = (1, 4, 16, 64, 128)


def page(rows: list[dict]) -> str:
    """Raises UserError where runs were not measured alike."""
    order = list(WORDS)
    rows = sorted(rows, key=lambda r: (order.index(r['run']), r['seed']))
    for r in rows:
        for key in SAME:
            if r[key] != rows[0][key]:
                raise UserError(f"{name(r)} has {key}={r[key]}, {name(rows[0])} {rows[0][key]}: they do not belong on one page")
    parts = [head(rows), caches(rows), greedy(rows), training(rows), scales(rows), int4(rows)]
    return '\n'.join(line for part in parts for line in [*part, '']).rstrip() + '\n'


def name(r: dict) -> str:
    return f"{r['run']}-seed{r['seed']}"


def of(rows, *runs) -> list[dict]:
    return [r for r in rows if r['run'] in runs]


def markdown(columns: list[str], lines) -> list[str]:
    rows = [columns, ['---'] * len(columns), *lines]
    return ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows]


def nats(change: float, se: float | None = None) -> str:
    return f'{change:+.5f}' + ('' if se is None else f' ± {se:.5f}')


def verdict(change: float) -> str:
    return f"{change:+.5f}, {'within' if abs(change) <= LIMIT else '**over**'} {LIMIT}"


# -- what holds for a figure over several runs ----------------------------------------------------------------------------

def int8_change(rows) -> float:
    """The largest change of loss, up or down, through an int8 cache among `rows`."""
    return max((r['caches']['int8']['change'] for r in rows), key=abs)


def over_seeds(rows, form: str) -> dict:
    """A format over the seeds of one kind of run: mean and worst change, largest standard error, mean errors, bytes."""
    some = [r['formats'][form] for r in rows]
    return {'change': statistics.mean(x['change'] for x in some), 'worst': max((x['change'] for x in some), key=abs),
            'se': max(x['se'] for x in some), 'k_error': statistics.mean(x['k_error'] for x in some),
            'v_error': statistics.mean(x['v_error'] for x in some), 'bytes': some[0]['bytes_per_position']}


def within(x: dict) -> bool:
    """Whether the worst seed of a format (from `over_seeds`) is within LIMIT by two standard errors."""
    return abs(x['worst']) + 2 * x['se'] <= LIMIT


def both_int4(rows) -> dict[str, dict]:
    """The formats with K and V both in int4, over the seeds of `rows`, smallest first, at equal bytes the better first."""
    forms = [form for form in rows[0]['formats'] if form.startswith('int4') and 'only' not in form]
    return dict(sorted(((form, over_seeds(rows, form)) for form in forms), key=lambda item: (item[1]['bytes'],
                                                                                             abs(item[1]['worst']))))


# -- the parts ------------------------------------------------------------------------------------------------------------

def head(rows) -> list[str]:
    one = rows[0]
    kinds = '; '.join(f'`{run}`: {words}' for run, words in WORDS.items() if of(rows, run))
    lines = ['# What a smaller dtype of the cache costs', '',
             f"config/train_mqa_local.py on {one['dataset']} (characters), {one['steps']} steps of B={one['B']} x "
             f"T={one['T']}, W={one['W']}, n_kv_head={one['n_kv_head']}, head_dim {one['head_dim']}. Runs: {kinds}. Losses in "
             f"nats per character over {one['windows']} windows of {one['T']}, spread over the validation split "
             f"({one['tokens']:,} tokens, batches of {one['eval_B']}); ± is the standard error of the paired differences over "
             f"windows. Weights and arithmetic {one['dtype']}, {one['hardware']}, torch {one['torch']}. Made by "
             '`python lab/scripts/quantization.py`.', '', '**Findings**', '']
    without = of(rows, 'plain', 'head64')
    if without:
        lines.append(f'- int8, trained without rounding: largest change of loss {verdict(int8_change(without))}.')
    if of(rows, 'qat'):
        lines.append(f"- int8, trained with rounding: largest change {verdict(int8_change(of(rows, 'qat')))}.")
    lines += training_finding(rows)
    for finding in (scale_finding, int4_finding):
        lines += [finding(of(rows, run)) for run in ('plain', 'head64') if of(rows, run)]
    lines.append('- These models are small and briefly trained. Larger ones are known to grow outlier channels, in K above '
                 'all: what is said here of int4 need not hold for them.')
    return lines


def as_trained(rows) -> dict[int, float]:
    """seed -> how much higher the loss of a model trained (and judged) with rounding is than that of one without."""
    plain = {r['seed']: r['caches']['float32']['loss'] for r in of(rows, 'plain')}
    return {r['seed']: r['rounded_forward_loss'] - plain[r['seed']] for r in of(rows, 'qat') if r['seed'] in plain}


def training_finding(rows) -> list[str]:
    changes = as_trained(rows)
    if not changes:
        return []
    return [f"- Training with rounding changes the loss by {', '.join(map(nats, changes.values()))} "
            f"(seeds {', '.join(map(str, changes))}; for how far apart seeds lie anyway see "
            f"`results/ablate_shakespeare`). Whether it costs anything {len(changes)} seeds do not settle; what it could gain "
            f"is what int8 costs those trained without: {nats(int8_change(of(rows, 'plain')))} at most."]


def scale_finding(rows) -> str:
    """Why fp16, in errors: changes of loss are too small to tell these formats apart."""
    exact, fp16 = over_seeds(rows, 'int8, fp32 scales'), over_seeds(rows, 'int8')

    def more(form):
        x = over_seeds(rows, form)
        return ' and '.join(f'{x[part] / exact[part] - 1:+.1%}' for part in ('k_error', 'v_error'))
    late = [more(f'int8, {dtype} scales rounded late') for dtype in ('fp16', 'bf16')]
    return (f"- int8 scales, head_dim {rows[0]['head_dim']}: against fp32 scales ({exact['bytes']:g} bytes a position) the "
            f"errors of K and V grow by {more('int8')} with fp16 ({fp16['bytes']:g} bytes), {more('int8, bf16 scales')} with "
            f"bf16; rounded late, by {late[0]} with fp16, {late[1]} with bf16; with one scale "
            f"a tensor by {more('int8, one fp32 scale a tensor')}.")


def int4_finding(rows) -> str:
    """What the smallest int4 format that is within LIMIT saves, and what those that are smaller still would cost."""
    D, Hkv, forms = rows[0]['head_dim'], rows[0]['n_kv_head'], both_int4(rows)
    int8 = bytes_per_position(Format(), Format(), Hkv, D)

    def said(form):
        x = forms[form]
        return (f"{form.removeprefix('int4 ')}: {nats(x['worst'], x['se'])}, {x['bytes']:g} bytes a position "
                f"({int8 / x['bytes']:.2f}x smaller than int8)")
    good = next((form for form, x in forms.items() if within(x)), None)
    smaller = list(forms)[:list(forms).index(good)] if good else list(forms)
    worth = 'worth offering' if good and int8 / forms[good]['bytes'] >= GAIN else 'not worth offering'
    begin = f'- int4, head_dim {D}, K and V both (worst seed of {len(rows)}): {worth}; '
    found = f'within {LIMIT} by two standard errors is {said(good)}' if good else f'no format is within {LIMIT}'
    return begin + found + (f"; not so are {'; '.join(map(said, smaller))}." if smaller else '.')


def caches(rows) -> list[str]:
    lines = []
    for r in rows:
        c = r['caches']
        lines.append([r['run'], r['seed'], f"{c['float32']['loss']:.4f}",
                      *(nats(c[kind]['change'], c[kind]['se']) for kind in ('float16', 'bfloat16', 'int8')),
                      *(f"{c[kind]['top1']:.2%}" for kind in ('bfloat16', 'int8')),
                      ' / '.join(f"{c[kind]['kv_bytes']:,}" for kind in ('float32', 'bfloat16', 'int8'))])
    one = rows[0]
    return ['## Loss through the cache', '',
            f"A prompt of {one['first']} tokens, then appended {one['chunk']} at a time. Changes against the float32 cache, "
            'whose loss is that of the plain forward pass (largest difference of a window '
            f"{max(r['forward_minus_cache']['largest'] for r in rows):.1e}). None rounds in the forward pass, "
            'also not `qat`. Same top token: of all positions, given the true text so far.', '',
            *markdown(['run', 'seed', 'float32', 'float16', 'bfloat16', 'int8', 'same top token, bfloat16', 'int8',
                       'KV bytes at T: float32 / bfloat16 / int8'], lines)]


def greedy(rows) -> list[str]:
    one, lines = rows[0], []
    positions = [n for n in POSITIONS if n <= one['new_tokens']]
    for run in WORDS:
        some = of(rows, run)
        for kind in some[0]['greedy'] if some else []:
            x = [r['greedy'][kind] for r in some]
            lines.append([run, kind, f"{statistics.mean(y['equal'] for y in x):.1%}",
                          f"{statistics.mean(y['common_prefix'] for y in x):.1f}",
                          *(f"{statistics.mean(y['equal_at'][n - 1] for y in x):.0%}, "
                            f"{statistics.mean(y['equal_up_to'][n - 1] for y in x):.0%}" for n in positions)])
    return ['## Greedy texts', '',
            f"{one['prompts']} prompts of {one['prompt_tokens']} validation tokens, {one['new_tokens']} tokens each, against "
            'the float32 cache; means over seeds. After its first other token a text goes its own way, so this says how often '
            'there is a near tie rather than how good a text is: the top token above is the better measure. `float32, in '
            'chunks` differs only in the order of its sums. By position: tokens equal there, texts equal up to there.', '',
            *markdown(['run', 'cache', 'tokens equal', f"equal start (of {one['new_tokens']})",
                       *(f'at {n}' for n in positions)], lines)]


def training(rows) -> list[str]:
    lines, plain = [], {r['seed']: r for r in of(rows, 'plain')}
    for r in of(rows, 'qat'):
        other, loss = plain.get(r['seed']), r['rounded_forward_loss']
        int8 = r['caches']['int8']['loss']
        lines.append([r['seed'], f"{other['caches']['float32']['loss']:.4f}" if other else '-', f'{loss:.4f}',
                      nats(loss - other['caches']['float32']['loss']) if other else '-', f'{int8:.4f}',
                      nats(int8 - other['caches']['int8']['loss']) if other else '-',
                      f"{-r['rounded_forward_minus_int8']['mean']:+.1e} ({r['rounded_forward_minus_int8']['largest']:.1e})"])
    return ['## Trained with rounding', '',
            "`kv_quant_train='int8'` against the same seed without. Its forward pass rounds K and V as an int8 cache does, so "
            'that serving in int8 is what was trained: the last column is the mean difference (and the largest of a window).',
            '', *markdown(['seed', 'plain, float32', 'qat, as trained', 'difference', 'qat, int8 cache',
                           'against plain, int8 cache', 'int8 cache - as trained'], lines)] if lines else []


def scales(rows) -> list[str]:
    lines = []
    for run in ('plain', 'head64'):
        some = of(rows, run)
        for form in [form for form in some[0]['formats'] if form.startswith('int8')] if some else []:
            x = over_seeds(some, form)
            lines.append([some[0]['head_dim'], form, nats(x['change'], x['se']), f"{x['k_error']:.3%}", f"{x['v_error']:.3%}",
                          f"{x['bytes']:g}"])
    return ['## Which scales for int8', '',
            'Means over seeds (± the largest of one seed). Errors: root mean square of what rounding changed, relative to that '
            "of K or V. Bytes per position of one cache (a slot of the plan). `int8` is the cache's format: one fp16 scale per "
            'position and KV head, rounded before the values are divided by it; `rounded late` only after. One scale a tensor '
            'is taken over all positions of a batch at once, which a real cache could not know; it would have to guess.', '',
            *markdown(['head_dim', 'format', 'change of loss', 'error of K', 'error of V', 'bytes'], lines)] if lines else []


def int4(rows) -> list[str]:
    lines = []
    for run in ('plain', 'head64', 'qat'):
        some = of(rows, run)
        if not some:
            continue
        int8 = bytes_per_position(Format(), Format(), some[0]['n_kv_head'], some[0]['head_dim'])
        for form in [form for form in some[0]['formats'] if form.startswith('int4')]:
            x = over_seeds(some, form)
            lines.append([run, some[0]['head_dim'], form, nats(x['change'], x['se']), nats(x['worst']), f"{x['k_error']:.2%}",
                          f"{x['v_error']:.2%}", f"{x['bytes']:g}", f"{int8 / x['bytes']:.2f}x"])
    return ['## int4 in groups', '',
            'fp16 scales (and, asymmetric, an fp16 zero point) per group. `K only`, `V only`: the other one in int8.', '',
            *markdown(['run', 'head_dim', 'format', 'change of loss', 'worst seed', 'error of K', 'error of V', 'bytes',
                       'smaller than int8'], lines), '',
            f"GPT-2 124M's shape with one KV head (head_dim 64), bytes per position of one cache: {shape_124m()}."]


def shape_124m() -> str:
    """Bytes for head_dim 64, by arithmetic."""
    int8 = bytes_per_position(Format(), Format(), 1, 64)
    words = [f'int8 {int8:g}']
    for group in (16, 32, 64):
        for asymmetric in (False, True):
            f = Format(bits=4, group=group, asymmetric=asymmetric)
            n = bytes_per_position(f, f, 1, 64)
            words.append(f"int4 {'asymmetric' if asymmetric else 'symmetric'} in groups of {group} {n:g} ({int8 / n:.2f}x)")
    return ', '.join(words)
