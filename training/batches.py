"""Batches of windows from token files."""
from pathlib import Path

import numpy as np
import torch

from config.errors import UserError
from data.tokenfiles import open_tokens


class TokenBatches:
    """Random windows of `block_size` tokens out of `train.bin` and `val.bin`.

    Training windows are drawn from torch's global CPU generator, as in nanoGPT, and one batch ahead: `offsets` are those
    of the batch that was handed out last, which a checkpoint keeps so that a resumed run starts with the same batch.
    """

    def __init__(self, folder: Path, block_size: int, batch_size: int, device: torch.device):
        self.block_size, self.batch_size, self.device = block_size, batch_size, device
        self.tokens = {}
        for split in ('train', 'val'):
            tokens = open_tokens(Path(folder) / f'{split}.bin')
            if len(tokens) <= block_size:
                raise UserError(f'{Path(folder).name}/{split}.bin has {len(tokens)} tokens: more than '
                                f'block_size={block_size} are needed')
            self.tokens[split] = tokens
        self.offsets = None

    def next(self):
        """(x, y), each (batch_size, block_size) int64, of the training split; y is x one token later."""
        high = len(self.tokens['train']) - self.block_size
        return self.at(torch.randint(high, (self.batch_size,)))

    def at(self, offsets: torch.Tensor):
        """The training batch whose windows start at `offsets` (B,)."""
        if int(offsets.max()) >= len(self.tokens['train']) - self.block_size or int(offsets.min()) < 0:
            raise UserError('the data set is shorter than the one this checkpoint was trained on')
        self.offsets = offsets
        return self._windows('train', offsets)

    def evaluation(self, split: str, n_batches: int, seed: int):
        """`n_batches` batches of `split`, the same windows at every call with this seed; training's numbers are untouched."""
        generator = torch.Generator().manual_seed(seed)
        high = len(self.tokens[split]) - self.block_size
        for _ in range(n_batches):
            yield self._windows(split, torch.randint(high, (self.batch_size,), generator=generator))

    def _windows(self, split, offsets):
        tokens = self.tokens[split]
        rows = torch.from_numpy(np.stack([tokens[i:i + self.block_size + 1] for i in offsets.tolist()]).astype(np.int64))
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.device.type == 'cuda':  # pinned, so that the copy overlaps with compute
            return tuple(a.pin_memory().to(self.device, non_blocking=True) for a in (x, y))
        return x.to(self.device), y.to(self.device)
