"""Differences of losses paired by seed: their intervals, and what many of them together show."""
import math
import statistics


def t_outside(t: float, degrees: int) -> float:
    """The probability that Student's t is at least as far from 0 as `t`: for a whole number of
    degrees of freedom a finite sum (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""
    angle, odd = math.atan2(abs(t), degrees ** 0.5), degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


def t_bound(degrees: int, outside: float = 0.05) -> float:
    """The t that Student's t exceeds on either side with the probability `outside`."""
    low, high = 0.0, 1e4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if t_outside(middle, degrees) > outside else (low, middle)
    return high


def mean_sd(values) -> dict:
    """Mean, sample standard deviation (None for a single value), and the values."""
    values = list(values)
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {'mean': statistics.fmean(values), 'sd': sd, 'each': values}


def enough(values: dict | None) -> bool:
    """Whether there are the three seeds that a standard deviation or an interval needs: with two
    its width is mostly chance. values: as returned by mean_sd or paired_difference."""
    return bool(values) and len(values['each']) > 2


def paired_difference(ours: dict, others: dict) -> dict | None:
    """Mean of ours - others over the keys (seeds) in both; half the width of its 95% confidence
    interval (Student's t) and the two-sided p-value of no difference, both None for a single pair.

    Runs with the same seed are trained on the same batches in the same order, so paired differences
    vary less than the losses.
    """
    both = sorted(ours.keys() & others.keys())
    if not both:
        return None
    each = [ours[key] - others[key] for key in both]
    mean, n, half, p = statistics.fmean(each), len(each), None, None
    if n > 1:
        error = statistics.stdev(each) / n ** 0.5
        half = t_bound(n - 1) * error
        p = t_outside(mean / error, n - 1) if error else float(mean == 0)
    return {'mean': mean, 'half_95': half, 'p': p, 'seeds': both, 'each': each}


def holm(p_values: dict, level: float = 0.05) -> set:
    """The keys whose differences stand at this level for all of them together (Holm 1979)."""
    standing = set()
    for k, key in enumerate(sorted(p_values, key=p_values.get)):
        if p_values[key] > level / (len(p_values) - k):
            break
        standing.add(key)
    return standing
