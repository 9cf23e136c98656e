"""Ctrl-C and SIGTERM as a request to stop after the current step, so that nothing is lost."""
import signal


class StopRequest:
    """Context manager; true once Ctrl-C or SIGTERM came. A second Ctrl-C interrupts at once, as usual."""

    def __init__(self):
        self.name = None
        self._previous = {}

    def __bool__(self):
        return self.name is not None

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        if self.name is not None:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
