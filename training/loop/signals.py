"""Ctrl-C and SIGTERM as a request to stop after the current step, so that nothing is lost."""
import signal
import time


class StopRequest:
    """A context manager that is true after Ctrl-C or SIGTERM. A second one interrupts immediately.

    repeats: seconds in which more signals count as the same request: torchrun forwards Ctrl-C to
    processes that may already have received it from the terminal.
    """

    def __init__(self, repeats: float = 0.0):
        self.name, self.repeats = None, repeats

    def __bool__(self):
        return self.name is not None

    def __enter__(self):
        self._previous = {number: signal.signal(number, self._handle)
                          for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        if self.name is None:
            self.name, self.since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self.since >= self.repeats:
            raise KeyboardInterrupt
