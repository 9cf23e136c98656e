"""Batches of windows from token files."""
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from data.tokenfiles import open_split


class TokenBatches:
    """Random windows of `block_size` tokens out of a data set's token files, in shards or not.

    Training windows are drawn as nanoGPT draws them: one `torch.randint` a micro-batch, in order. With several processes
    each of them draws the windows of all and takes every `world_size`-th micro-batch, so that what a run trains on does
    not depend on how many processes share it. Batches are fetched one ahead: `state` is the generator's state from before
    the one handed out last, which a checkpoint keeps so that a resumed run starts with the same batch.

    Args:
        generator: what training windows are drawn from; None = torch's global CPU generator.
    Raises:
        UserError: a missing or damaged token file, or one with too few tokens for a window.
    """

    def __init__(self, folder: Path, block_size: int, batch_size: int, device: torch.device, generator=None,
                 rank: int = 0, world_size: int = 1):
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
        self.state = self.generator.get_state()

    def next(self):
        """(x, y), each (batch_size, block_size) int64, of the training split; y is x one token later."""
        self.state = self.generator.get_state()
        high = len(self.tokens['train']) - self.block_size
        drawn = [torch.randint(high, (self.batch_size,), generator=self.generator) for _ in range(self.world_size)]
        return self._windows('train', drawn[self.rank])

    def resume(self, state: torch.Tensor):
        """Set the generator to a former `state`, and hand out the batch that was drawn from there."""
        self.generator.set_state(state)
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
        rows = torch.from_numpy(np.stack([tokens.window(i, self.block_size + 1) for i in offsets.tolist()]).astype(np.int64))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.device.type == 'cuda':  # pinned, so that the copy overlaps with compute
            return tuple(a.pin_memory().to(self.device, non_blocking=True) for a in (x, y))
        return x.to(self.device), y.to(self.device)
