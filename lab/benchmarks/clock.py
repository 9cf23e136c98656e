"""Two sides and more, timed in turns: A B C, A B C, ... so that what slows the machine down slows all of them."""
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.progress import track

from training.device import synchronize

now = time.perf_counter  # seconds


class Stopwatch:
    """Seconds that a device works on what is done inside of `with`: by CUDA events there, else by the clock."""

    def __init__(self, device):
        self.device, self.seconds = device, None

    def __enter__(self):
        synchronize(self.device)
        self.start = self._stamp()
        return self

    def __exit__(self, *_):
        end = self._stamp()
        synchronize(self.device)
        self.seconds = self.start.elapsed_time(end) / 1000 if self.device.type == 'cuda' else now() - self.start

    def _stamp(self):
        if self.device.type != 'cuda':
            return now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def alternate(sides: dict, rounds: int, title: str) -> dict[str, list]:
    """name -> what each side's call gave in each of `rounds` rounds; the round before them, to warm up, is not kept.

    sides: name -> callable without arguments, called in this order in every round.
    title: names the measurement on stderr, where that is a terminal.
    """
    found = {name: [] for name in sides}
    for k in track(range(1 + rounds), title, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        for name, run in sides.items():
            result = run()
            if k:
                found[name].append(result)
    return found


def summary(values) -> dict:
    """Median, min and max, and the values themselves, in the order in which they were measured."""
    values = [float(x) for x in values]
    return {'median': statistics.median(values), 'min': min(values), 'max': max(values), 'each': values}


def paired(a, b) -> dict:
    """Of a[r] / b[r], round by round: not the ratio of two medians, which may stem from different rounds."""
    return summary(x / y for x, y in zip(a, b, strict=True))
