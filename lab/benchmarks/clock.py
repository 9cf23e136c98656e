"""Interleaved timing (A B C, A B C, ...), so that a slowdown of the machine affects every side."""
import statistics
import time

from data.progress import tracked
from training.device import synchronize

now = time.perf_counter  # seconds


def seconds(device, work) -> float:
    """The time until the device has done the work of `work()`."""
    synchronize(device)
    start = now()
    work()
    synchronize(device)
    return now() - start


def alternate(sides: dict, rounds: int, title: str, inputs=None) -> dict[str, list]:
    """Return name -> results of `rounds` calls of each side, after one discarded warm-up round.

    sides: name -> callable without arguments, or of the round's element of `inputs`, which has
    1 + rounds; every round calls all of them in this order. title: label of the progress bar.
    """
    results = {name: [] for name in sides}
    for k in tracked(range(1 + rounds), title):
        for name, run in sides.items():
            result = run(inputs[k]) if inputs else run()
            if k:
                results[name].append(result)
    return results


def summary(values) -> dict:
    """Median, minimum and maximum, and the values themselves in the order of measurement."""
    values = [float(x) for x in values]
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values),
            'each': values}


def paired(a, b) -> dict:
    """Summary of a[r] / b[r] by round: the two medians may come from different rounds."""
    return summary(x / y for x, y in zip(a, b, strict=True))


def faster(sides: dict, base: str = 'ours') -> dict:
    """Return name -> how many times its tokens per second `base` makes, for every other side."""
    rates = {name: side['tokens_per_second']['each'] for name, side in sides.items()}
    return {name: paired(rates[base], each) for name, each in rates.items() if name != base}


def metrics(times, time_key: str, tokens: int, scale: int = 1000) -> dict:
    """The times (seconds) under `time_key`, in ms by default, and the rate for `tokens` a round."""
    return {time_key: summary(scale * x for x in times),
            'tokens_per_second': summary(tokens / x for x in times)}
