"""Batches prepared in advance by a thread, so that training steps need not wait for them."""
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch


class Prefetched:
    """The batches of `batches` (`training.batches`), prepared up to `depth` ahead by a thread.

    `state` belongs to the last batch returned, however far ahead the thread is. waited: total
    seconds that `next` has waited. depth 0: no thread. `evaluation` uses none.
    """

    def __init__(self, batches, depth: int = 2):
        self.batches, self.depth = batches, depth
        self.evaluation = batches.evaluation
        self.state, self.waited = batches.state, 0.0
        self._began = self._thread = None
        self._ahead = deque()  # futures of (state, batch)

    @property
    def share(self) -> float | None:
        """Return the fraction of time since the first batch spent waiting; None before it."""
        return self.waited / (time.perf_counter() - self._began) if self._began else None

    def next(self):
        """Return the next batch. An error in making it is raised at each call until `resume`."""
        began = time.perf_counter()
        if self.depth:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, 'batches', self._begin_thread)
            while len(self._ahead) <= self.depth:
                self._ahead.append(self._thread.submit(self._make))
            self.state, batch = self._ahead[0].result()
            self._ahead.popleft()
        else:
            self.state, batch = self._make()
        if self._began is None:
            self._began = time.perf_counter()  # waiting for the first batch does not count
        else:
            self.waited += time.perf_counter() - began
        return batch

    def resume(self, state):
        """Go back to an earlier `state`, and return the next batch from there."""
        self.close()
        self.batches.order.state = state
        self.state, batch = self._make()
        return batch

    def close(self) -> None:
        """End the thread and drop the prepared batches; `resume` restarts it."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()

    def _make(self):
        batch = self.batches.next()
        return self.batches.state, batch

    def _begin_thread(self):
        device = self.batches.device  # a thread's current one is the first
        if device.type == 'cuda' and device.index:
            torch.cuda.set_device(device)
