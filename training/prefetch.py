"""Batches that a thread makes ahead, so that a step finds its own ready."""
import atexit
import queue
import threading
import time


class Prefetched:
    """The same batches in the same order as those of `batches` (`training.batches`), made `depth` ahead by a thread.

    `state` belongs to the batch handed out last, however far ahead the thread is. waited: seconds that `next` has waited in
    all. depth 0: no thread, and all that making them takes is waited for.
    """

    def __init__(self, batches, depth: int = 2):
        self.batches, self.depth, self.state, self.waited, self._began = batches, depth, batches.state, 0.0, None
        self._made, self._thread, self._stop, self._error = None, None, None, None

    @property
    def generator(self):
        """What the batches are drawn from; to be set before the first is."""
        return self.batches.generator

    @property
    def share(self) -> float | None:
        """Of the time since the first batch: what was waited. None before there is any."""
        return self.waited / (time.perf_counter() - self._began) if self._began else None

    def next(self):
        """The next batch. Raises what making it raised; again, until `resume` has gone back."""
        began = time.perf_counter()
        if self._error is not None:
            raise self._error
        if self.depth:
            if self._thread is None:
                self._start()
            state, batch, self._error = self._made.get()
            if self._error is not None:
                self.close()
                raise self._error
            self.state = state
        else:
            batch = self.batches.next()
            self.state = self.batches.state
        if self._began is None:
            self._began = time.perf_counter()  # the first one counts for no step
        else:
            self.waited += time.perf_counter() - began
        return batch

    def resume(self, state):
        """Go back to a former `state`, and hand out the batch that was drawn from there."""
        self.close()
        self._error = None
        batch = self.batches.resume(state)
        self.state = self.batches.state
        return batch

    def evaluation(self, split: str, n_batches: int, seed: int):
        """Those of `batches`, made as they are needed."""
        return self.batches.evaluation(split, n_batches, seed)

    def close(self) -> None:
        """The thread ends; what it has made ahead is dropped. `next` begins behind that, so go back with `resume`."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._stop.set()
            while self._thread.is_alive():  # it may stand before a full queue
                try:
                    self._made.get_nowait()
                except queue.Empty:
                    self._thread.join(0.01)
            self._thread = None

    def _start(self):
        self._made, self._stop = queue.Queue(self.depth), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._made, self._stop), name='batches', daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread within torch when the interpreter goes aborts the process

    def _run(self, made, stop):
        while not stop.is_set():
            try:
                batch = self.batches.next()
                made.put((self.batches.state, batch, None))
            except BaseException as e:  # the one who asks for it is told
                made.put((None, None, e))
                return
