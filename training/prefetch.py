"""Batches prepared in advance by a thread, so that training steps need not wait for them."""
import atexit
import queue
import threading
import time

import torch


class Prefetched:
    """The batches of `batches` (`training.batches`), prepared up to `depth` ahead by a thread.

    `state` belongs to the last batch returned, however far ahead the thread is. waited: total
    seconds that `next` has waited. depth 0: no thread.
    """

    def __init__(self, batches, depth: int = 2):
        self.batches, self.depth = batches, depth
        self.state, self.waited = batches.state, 0.0
        self._began = self._made = self._thread = self._stop = self._error = None

    @property
    def share(self) -> float | None:
        """Return the fraction of time since the first batch spent waiting; None before it."""
        return self.waited / (time.perf_counter() - self._began) if self._began else None

    def next(self):
        """Return the next batch. An error in making it is raised at each call until `resume`."""
        began = time.perf_counter()
        if self._error is not None:
            raise self._error
        if self.depth:
            if self._thread is None:
                self._made, self._stop = queue.Queue(self.depth), threading.Event()
                self._thread = threading.Thread(target=self._run, args=(self._made, self._stop),
                                                name='batches', daemon=True)
                self._thread.start()
                atexit.register(self.close)  # a thread inside torch at exit aborts the process
            state, batch, self._error = self._made.get()
            if self._error is not None:
                self.close()
                raise self._error
            self.state = state
        else:
            batch = self.batches.next()
            self.state = self.batches.state
        if self._began is None:
            self._began = time.perf_counter()  # waiting for the first batch does not count
        else:
            self.waited += time.perf_counter() - began
        return batch

    def resume(self, state):
        """Go back to an earlier `state`, and return the next batch from there."""
        self.close()
        self._error = None
        self.batches.order.state = state
        batch = self.batches.next()
        self.state = self.batches.state
        return batch

    def evaluation(self, split: str, n_batches: int, seed: int):
        """Like `evaluation` of `batches`; uses no thread."""
        return self.batches.evaluation(split, n_batches, seed)

    def close(self) -> None:
        """End the thread and drop the prepared batches; `resume` restarts it."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._stop.set()
            while self._thread.is_alive():  # it may be waiting on a full queue
                try:
                    self._made.get_nowait()
                except queue.Empty:
                    self._thread.join(0.01)
            self._thread = None

    def _run(self, made, stop):
        try:
            device = self.batches.device
            if device.type == 'cuda':  # a new thread's current device is the first one
                torch.cuda.set_device(device)
            while not stop.is_set():
                batch = self.batches.next()
                made.put((self.batches.state, batch, None))
        except BaseException as e:  # raised by `next`
            made.put((None, None, e))
