"""Batches: windows from token files, or sequences of a synthetic task made as they are needed."""
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from data.datasets import ensure_dataset
from data.order import RandomOrder, make_order
from data.recall.lags import LagTask, read_task
from data.tokenfiles import open_split, read_meta
from training.prefetch import Prefetched

RECALL = 'recall'  # the data set whose batches are made by `data.recall`


class TokenBatches:
    """Windows of `block_size` tokens from a data set's token files, in shards or not.

    Training windows come in one of the orders of `data.order`, by default as nanoGPT draws them:
    one `torch.randint` a micro-batch. Each process draws the windows of all and takes every
    `world_size`-th micro-batch, so the data do not depend on the number of processes. `state` is
    the position before the batch returned last: a run resumed from it starts with that batch.

    Args:
        generator: draws the training windows; None = torch's global CPU generator.
        order, seed: of `data.order`; the seed is for shuffling.
        vocab_size: of the model; 0 = unlimited.
    Raises:
        UserError: a missing or damaged token file, or one with too few tokens for a window; from
            `next`, a token outside the vocabulary.
    """

    def __init__(self, folder: Path, block_size: int, batch_size: int, device: torch.device,
                 generator=None, rank: int = 0, world_size: int = 1, order: str = 'random',
                 seed: int = 0, vocab_size: int = 0):
        self.block_size, self.batch_size, self.device = block_size, batch_size, device
        self.rank, self.world_size = rank, world_size
        self.tokens = {}
        for split in ('train', 'val'):
            tokens = open_split(Path(folder), split)
            if len(tokens) <= block_size:
                raise UserError(f'{Path(folder).name}: {split}.bin has {len(tokens)} tokens, '
                                f'more than block_size={block_size} are needed')
            self.tokens[split] = tokens
            for path in tokens.short_files() if rank == 0 else []:
                print(f'Note: token file {str(path)!r} is shorter than others: if it was cut '
                      'short, prepare the data set again')
        self.vocab_size = vocab_size or 2 ** 32
        self.order = make_order(order, len(self.tokens['train']), block_size,
                                generator or torch.default_generator, seed)
        self.state = self.order.state

    def next(self):
        """Training (x, y), each (batch_size, block_size) int64; y is x one token later."""
        self.state = self.order.state
        drawn = [self.order.draw(self.batch_size) for _ in range(self.world_size)]
        return self._windows('train', drawn[self.rank])

    def evaluation(self, split: str, n_batches: int, seed: int):
        """`n_batches` batches of `split`, the same at every call with this seed, of which each
        process gets every world_size-th. Training's generator is not used."""
        generator = torch.Generator().manual_seed(seed)
        high = len(self.tokens[split]) - self.block_size
        for k in range(n_batches):
            offsets = torch.randint(high, (self.batch_size,), generator=generator)
            if k % self.world_size == self.rank:
                yield self._windows(split, offsets)

    def _windows(self, split, offsets):
        tokens = self.tokens[split]
        windows = [tokens.window(i, self.block_size + 1) for i in offsets.tolist()]
        rows = np.stack(windows, dtype=np.int64)
        if rows.max() >= self.vocab_size:
            row, place = np.unravel_index(rows.argmax(), rows.shape)
            path = tokens.file_of(int(offsets[row]) + int(place))
            raise UserError(f'token file {str(path)!r} has token {rows.max()}, and the vocabulary '
                            f'{self.vocab_size}: it is damaged, or of another tokenizer')
        rows = torch.from_numpy(rows)
        return on_device((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), self.device)


class TaskBatches:
    """New sequences of a task of `data.recall` in every batch; targets are -1 where no answer is
    due. Otherwise as `TokenBatches`."""

    def __init__(self, task: LagTask, batch_size: int, device: torch.device,
                 generator: torch.Generator, rank: int = 0, world_size: int = 1):
        self.task, self.batch_size, self.device = task, batch_size, device
        self.rank, self.world_size = rank, world_size
        self.order = RandomOrder(2 ** 62, generator)
        self.state = self.order.state

    def next(self):
        """(x, y), each (batch_size, block_size) int64."""
        self.state = self.order.state
        return self._made((self.order.draw(self.world_size)[self.rank].item(),))

    def evaluation(self, split: str, n_batches: int, seed: int):
        """`n_batches` batches, the same at every call with this seed and split."""
        for k in range(self.rank, n_batches, self.world_size):
            yield self._made((seed, ('train', 'val').index(split), k))

    def _made(self, seeds):
        x, y, _ = self.task.batch(np.random.default_rng(seeds), self.batch_size)
        return on_device((torch.from_numpy(x), torch.from_numpy(y)), self.device)


def on_device(tensors, device):
    """Copy CPU tensors to the device; to CUDA without waiting, from pinned memory."""
    if device.type == 'cuda':
        return tuple(a.pin_memory().to(device, non_blocking=True) for a in tensors)
    return tuple(a.to(device) for a in tensors)


def open_meta(s, data_root: Path) -> dict | None:
    """The data set's metadata, as from `data.tokenfiles.read_meta`. Prepares it if need be."""
    if s.dataset == RECALL:
        task = read_task(s.recall_task, s.block_size)
        return {'vocab_size': task.vocab_size, RECALL: s.recall_task}
    return read_meta(ensure_dataset(s.dataset, data_root))


def open_batches(s, data_root: Path, device: torch.device, generator: torch.Generator,
                 rank: int = 0, world_size: int = 1, vocab_size: int = 0):
    """The settings' batches, for one of `world_size` processes."""
    share = (s.batch_size, device, generator, rank, world_size)
    if s.dataset == RECALL:
        if s.data_order != 'random':
            raise UserError(f'data_order={s.data_order!r} is for token files; '
                            f'dataset={RECALL!r} makes new sequences')
        batches = TaskBatches(read_task(s.recall_task, s.block_size), *share)
    else:
        seed = s.seed if s.data_seed < 0 else s.data_seed
        batches = TokenBatches(data_root / s.dataset, s.block_size, *share, s.data_order, seed,
                               vocab_size)
    return Prefetched(batches, s.data_prefetch)
