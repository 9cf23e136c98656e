"""How numbers are written in the tables and sentences of a ladder's report."""
from lab.ablation.stats import enough

MISSING = '-'
INTERVAL = ("±: 95% confidence interval of the paired difference "
            "(Student's t, n-1 degrees of freedom); with fewer than three seeds (n), the "
            'difference of each')


def label(row: dict) -> str:
    """The row's name; for a side row also the row it is based on and its own max_iters."""
    if not row['side']:
        return row['name']
    changes = row['changes']
    steps = f"; {changes['max_iters']:,} iterations" if 'max_iters' in changes else ''
    return f"{row['name']} (from {row['above']}{steps})"


def plus_minus(difference: dict | None, form: str = '.4f', scale: float = 1) -> str:
    """'+0.0123 ±0.0045': a paired difference and its 95% confidence interval. With fewer than three
    pairs, the differences themselves, '+0.0123, +0.0150 (n=2)': with one degree of freedom the
    width of the interval is mostly chance."""
    def signed(x):
        text = format(scale * x, '+z' + form)
        return text if float(text) else text.lstrip('+')
    if not difference:
        return MISSING
    each = difference['each']
    if not enough(difference):
        return f"{', '.join(map(signed, each))} (n={len(each)})"
    return f"{signed(difference['mean'])} ±{format(scale * difference['half_95'], form)}"


def mean_sd(values: dict | None, form: str = '.4f', scale: float = 1) -> str:
    """'1.7718 (0.0029)': mean and, with three values or more, standard deviation."""
    if not values:
        return MISSING
    text = format(scale * values['mean'], form)
    return f"{text} ({format(scale * values['sd'], form)})" if enough(values) else text


def smaller(row: dict) -> str:
    return f"{row['kv']['smaller']:.1f}x"


def listed(values) -> str:
    """Each value once with its count, in order: '64 (x4), 32'; None is 'never'."""
    shown = ['never' if value is None else str(value) for value in values]
    counts = {value: shown.count(value) for value in shown}
    return ', '.join(f'{value} (x{n})' if n > 1 else value for value, n in counts.items()) or '-'
