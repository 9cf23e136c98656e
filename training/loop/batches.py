"""Batches: windows from token files, or sequences of a synthetic task generated on demand. A
thread prepares them in advance."""
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from data.datasets import ensure_dataset
from data.order import RandomOrder, make_order
from data.recall.tasks import IGNORE, task_of
from data.tokenfiles import open_split, read_meta
from data.tokenizer import bytes_per_token
from training.checkpoint.file import tokens_id


class TokenBatches:
    """Windows of `block_size` tokens from a data set's token files, in an order of `data.order`.

    Each process draws the windows of all processes and uses every `world_size`-th micro-batch, so
    the data do not depend on the number of processes. `state` is the position before the last batch
    returned: a run resumed from it starts with that batch. Raises UserError if a token file is
    missing, damaged or shorter than a window; in `next`, if a token is outside the vocabulary.

    generator: None = torch's global CPU generator. seed: for shuffling. vocab_size: the model's;
    0 = that of meta.pkl, or unlimited without one.
    """

    def __init__(self, folder: Path, block_size: int, batch_size: int, device: torch.device,
                 generator=None, rank: int = 0, world_size: int = 1, order: str = 'random',
                 seed: int = 0, vocab_size: int = 0):
        self.block_size, self.batch_size, self.device = block_size, batch_size, device
        self.rank, self.world_size = rank, world_size
        self.tokens = {}
        for split in ('train', 'val'):
            tokens = open_split(Path(folder), split, vocab_size)
            if len(tokens) <= block_size:
                raise UserError(f'{Path(folder).name}: {split}.bin has {len(tokens)} tokens, '
                                f'more than block_size={block_size} are needed')
            self.tokens[split] = tokens
        self.order = make_order(order, len(self.tokens['train']), block_size,
                                generator or torch.default_generator, seed)
        self.state = self.order.state

    def next(self):
        """Return training (x, y), each (batch_size, block_size) int64; y is x one token later."""
        self.state = self.order.state
        drawn = [self.order.draw(self.batch_size) for _ in range(self.world_size)]
        return self._windows('train', drawn[self.rank])

    def evaluation(self, split: str, n_batches: int, seed: int):
        """Yield this process's share of `n_batches` batches of `split`, the same for every call
        with this seed. The training generator is not used."""
        generator = torch.Generator().manual_seed(seed)
        high = len(self.tokens[split]) - self.block_size
        for k in range(n_batches):
            offsets = torch.randint(high, (self.batch_size,), generator=generator)
            if k % self.world_size == self.rank:
                yield self._windows(split, offsets)

    def _windows(self, split, offsets):
        tokens = self.tokens[split]
        windows = [tokens.window(i, self.block_size + 1) for i in offsets.tolist()]
        rows = torch.from_numpy(np.stack(windows, dtype=np.int64))
        return on_device((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), self.device)


class TaskBatches:
    """Like `TokenBatches`, but sequences of a `data.recall` task: new ones in every batch, or from
    a fixed set that `seed` determines. Targets are -1 where no answer is expected."""

    def __init__(self, task, batch_size: int, device: torch.device, generator: torch.Generator,
                 rank: int = 0, world_size: int = 1, seed: int = 0):
        self.task, self.batch_size, self.device = task, batch_size, device
        self.rank, self.world_size = rank, world_size
        self.fixed = None
        if task.sequences:
            x, y, _ = task.batch(np.random.default_rng(seed), task.sequences)
            self.fixed = torch.from_numpy(x), torch.from_numpy(y)
        self.order = RandomOrder(task.sequences or 2 ** 62, generator)
        self.state = self.order.state

    def next(self):
        self.state = self.order.state
        if self.fixed is None:
            return self._made((self.order.draw(self.world_size)[self.rank].item(),))
        rows = [self.order.draw(self.batch_size) for _ in range(self.world_size)][self.rank]
        return on_device(tuple(a[rows] for a in self.fixed), self.device)

    def evaluation(self, split: str, n_batches: int, seed: int):
        """Yield this process's share of `n_batches` new batches, fixed by seed and split. Only
        answers are targets."""
        for k in range(self.rank, n_batches, self.world_size):
            yield self._made((seed, ('train', 'val').index(split), k), only_answers=True)

    def _made(self, seeds, only_answers=False):
        x, y, distance = self.task.batch(np.random.default_rng(seeds), self.batch_size)
        if only_answers:
            y[distance == 0] = IGNORE
        return on_device((torch.from_numpy(x), torch.from_numpy(y)), self.device)


class Prefetched:
    """The batches of `batches` (as the classes above), prepared up to `depth` ahead by a thread.

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


def on_device(tensors, device):
    """Copy CPU tensors to the device; to CUDA asynchronously, from pinned memory."""
    if device.type == 'cuda':
        return tuple(a.pin_memory().to(device, non_blocking=True) for a in tensors)
    return tuple(a.to(device) for a in tensors)


def open_meta(s, data_root: Path) -> dict | None:
    """Return the data set's metadata, as `read_meta` does, preparing the data set if necessary."""
    task = task_of(s)
    if task:
        return {'vocab_size': task.vocab_size, s.dataset: getattr(s, f'{s.dataset}_task')}
    return read_meta(ensure_dataset(s.dataset, data_root))


class DataSet:
    """The data set of a run's settings, prepared if necessary.

    Attributes:
        task: a `data.recall` task, or None for token files in `folder`.
        vocab_size, source: its own alphabet's (0: it has none), and what that was read from.
        tokens: its `tokens_id`, which a checkpoint stores.
        alphabet: its meta.pkl for the checkpoint, which a copy may be without; or None.
        bytes_per_token: of text; 0 if there is no text.
    """

    def __init__(self, s, data_root: Path):
        self.name, self.folder, self.task = s.dataset, data_root / s.dataset, task_of(s)
        meta = open_meta(s, data_root) or {}
        self.vocab_size, self.tokens = meta.get('vocab_size', 0), tokens_id(meta)
        self.alphabet = meta if 'stoi' in meta else None
        self.source, self.bytes_per_token = f'of {self.name}_task', 0.0
        if self.task is None:
            self.source = f'inside data/{self.name}/meta.pkl'
            self.bytes_per_token = bytes_per_token(meta, open_split(self.folder, 'val'))

    def batches(self, s, config: GPTConfig, ranks) -> Prefetched:
        """Open the batches for one of the `Ranks`, in windows of the model's block_size."""
        generator = torch.Generator()
        if s.data_seed >= 0:
            generator.manual_seed(s.data_seed)
        else:  # the state of nanoGPT's generator before its first batch
            generator.set_state(torch.get_rng_state())
        share = s.batch_size, ranks.device, generator, ranks.rank, ranks.world_size
        seed = s.seed if s.data_seed < 0 else s.data_seed
        if self.task is None:
            batches = TokenBatches(self.folder, config.block_size, *share, s.data_order, seed,
                                   config.vocab_size)
        elif s.data_order == 'random':
            batches = TaskBatches(self.task, *share, seed)
        else:
            raise UserError(f'data_order={s.data_order!r} is for token files; '
                            f'dataset={self.name!r} makes its sequences')
        return Prefetched(batches, s.data_prefetch)
