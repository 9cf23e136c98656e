"""Batches: windows from token files, or sequences of a synthetic task made as they are needed."""
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from data.datasets import ensure_dataset
from data.order import make_order
from data.recall.lags import LagTask, read_task
from data.tokenfiles import open_split, read_meta
from training.prefetch import Prefetched

RECALL = 'recall'  # the data set whose batches are made by `data.recall`


class TokenBatches:
    """Windows of `block_size` tokens out of a data set's token files, in shards or not.

    Training windows come in one of the orders of `data.order`, by default as nanoGPT draws them: one `torch.randint` a
    micro-batch. With several processes each of them draws the windows of all and takes every `world_size`-th micro-batch, so
    that what a run trains on does not depend on how many processes share it. `state` is the place in the order from before the
    batch handed out last, which a checkpoint keeps so that a resumed run starts with the same batch.

    Args:
        generator: what training windows are drawn from; None = torch's global CPU generator.
        order, seed: of `data.order`; the seed is that of shuffling.
        vocab_size: ids that the model has; 0 = as many as there are.
    Raises:
        UserError: a missing or damaged token file, or one with too few tokens for a window; from `next`, a token that is not
            in the vocabulary.
    """

    def __init__(self, folder: Path, block_size: int, batch_size: int, device: torch.device, generator=None,
                 rank: int = 0, world_size: int = 1, order: str = 'random', seed: int = 0, vocab_size: int = 0):
        self.block_size, self.batch_size, self.device = block_size, batch_size, device
        self.generator = torch.default_generator if generator is None else generator
        self.rank, self.world_size = rank, world_size
        self.tokens = {}
        for split in ('train', 'val'):
            tokens = open_split(Path(folder), split)
            if len(tokens) <= block_size:
                raise UserError(f'{Path(folder).name}: {split}.bin has {len(tokens)} tokens, more than '
                                f'block_size={block_size} are needed')
            self.tokens[split] = tokens
            for path in tokens.short_files() if rank == 0 else []:
                print(f'Note: token file {str(path)!r} is shorter than others: if it was cut short, prepare '
                      'the data set again')
        self.vocab_size = vocab_size or 2 ** 32
        self.order = make_order(order, len(self.tokens['train']), block_size, self.generator, seed)
        self.state = self.order.state

    def next(self):
        """(x, y), each (batch_size, block_size) int64, of the training split; y is x one token later."""
        self.state = self.order.state
        drawn = [self.order.draw(self.batch_size) for _ in range(self.world_size)]
        return self._windows('train', drawn[self.rank])

    def resume(self, state: torch.Tensor):
        """Go back to a former `state`, and hand out the batch that was drawn from there."""
        self.order.state = state
        return self.next()

    def evaluation(self, split: str, n_batches: int, seed: int):
        """`n_batches` batches of `split`, the same windows at every call with this seed; training's numbers are untouched.
        With several processes each gets every world_size-th of them."""
        generator = torch.Generator().manual_seed(seed)
        high = len(self.tokens[split]) - self.block_size
        for k in range(n_batches):
            offsets = torch.randint(high, (self.batch_size,), generator=generator)
            if k % self.world_size == self.rank:
                yield self._windows(split, offsets)

    def _windows(self, split, offsets):
        tokens = self.tokens[split]
        rows = np.stack([tokens.window(i, self.block_size + 1) for i in offsets.tolist()]).astype(np.int64)
        if rows.max() >= self.vocab_size:
            row, place = np.unravel_index(rows.argmax(), rows.shape)
            path = tokens.file_of(int(offsets[row]) + int(place))
            raise UserError(f'token file {str(path)!r} has token {rows.max()}, and the vocabulary {self.vocab_size}: it is '
                            'damaged, or of another tokenizer')
        rows = torch.from_numpy(rows)
        return on_device((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), self.device)


class TaskBatches:
    """Sequences of a task of `data.recall`, new ones in every batch; targets are -1 where nothing is asked. Otherwise as
    `TokenBatches`: in order, the same for any number of processes, one ahead, gone on with from a former `state`."""

    def __init__(self, task: LagTask, batch_size: int, device: torch.device, generator: torch.Generator,
                 rank: int = 0, world_size: int = 1):
        self.task, self.batch_size, self.device, self.generator = task, batch_size, device, generator
        self.rank, self.world_size = rank, world_size
        self.state = generator.get_state()

    def next(self):
        """(x, y), each (batch_size, block_size) int64."""
        self.state = self.generator.get_state()
        seeds = torch.randint(2 ** 62, (self.world_size,), generator=self.generator)
        return self._made((seeds[self.rank].item(),))

    def resume(self, state: torch.Tensor):
        """Set the generator to a former `state`, and hand out the batch that was drawn from there."""
        self.generator.set_state(state)
        return self.next()

    def evaluation(self, split: str, n_batches: int, seed: int):
        """`n_batches` batches, the same at every call with this seed and split."""
        for k in range(self.rank, n_batches, self.world_size):
            yield self._made((seed, ('train', 'val').index(split), k))

    def _made(self, seeds):
        x, y, _ = self.task.batch(np.random.default_rng(seeds), self.batch_size)
        return on_device((torch.from_numpy(x), torch.from_numpy(y)), self.device)


def on_device(tensors, device):
    """CPU tensors there; for CUDA pinned, so that nobody waits for the copy."""
    if device.type == 'cuda':
        return tuple(a.pin_memory().to(device, non_blocking=True) for a in tensors)
    return tuple(a.to(device) for a in tensors)


def open_meta(s, data_root: Path) -> dict | None:
    """What is known of the settings' data set before its files are opened, as `data.tokenfiles.read_meta`; it is prepared
    if need be."""
    if s.dataset == RECALL:
        return {'vocab_size': read_task(s.recall_task, s.block_size).vocab_size, RECALL: s.recall_task}
    return read_meta(ensure_dataset(s.dataset, data_root))


def open_batches(s, data_root: Path, device: torch.device, generator: torch.Generator, rank: int = 0, world_size: int = 1,
                 vocab_size: int = 0):
    """The settings' batches, for one of `world_size` processes."""
    share = (s.batch_size, device, generator, rank, world_size)
    if s.dataset == RECALL:
        if s.data_order != 'random':
            raise UserError(f"data_order={s.data_order!r} is for token files; dataset={RECALL!r} makes new sequences")
        batches = TaskBatches(read_task(s.recall_task, s.block_size), *share)
    else:
        batches = TokenBatches(data_root / s.dataset, s.block_size, *share, s.data_order,
                               s.seed if s.data_seed < 0 else s.data_seed, vocab_size)
    return Prefetched(batches, s.data_prefetch)
