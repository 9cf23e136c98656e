"""The processes that torchrun started for one run; without torchrun there is one."""
import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from config.errors import UserError
from config.folder_lock import process_start
from training.device import pick_device

LONG = timedelta(days=7)  # others wait while rank 0 prepares a data set


class Ranks:
    """This process's place among all of them, and the few things that they must agree on.

    A context manager: joins the process group and leaves it. With one process every method is trivial and nothing of
    torch.distributed is touched. Only rank 0 prints.

    Args:
        backend: of gradients, 'nccl' (CUDA) or 'gloo' (CPU); the control messages below always go by gloo.
        device: as in `pick_device`; with several processes any CUDA device means that of this process's local rank.
    Raises:
        UserError: no such device for this rank, or a backend that cannot serve it.
    """

    def __init__(self, backend: str = 'gloo', device: str = 'auto', backend_given: bool = False):
        self.rank, self.local_rank, self.world_size = (_env(name, default) for name, default in
                                                       (('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1)))
        if not 0 <= self.rank < self.world_size:
            raise UserError(f'RANK={self.rank} and WORLD_SIZE={self.world_size} in the environment: ranks are numbered from 0 '
                            'to WORLD_SIZE - 1, as torchrun sets them')
        self.device = pick_device(device) if self.world_size == 1 else self._own_device(device)
        self.backend = backend
        if self.world_size > 1 and backend == 'nccl' and self.device.type != 'cuda':
            if backend_given:
                raise UserError(f"backend='nccl' needs CUDA, but the device is {str(self.device)!r}: use --backend=gloo")
            self.backend = 'gloo'
        self.control = None

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def _own_device(self, name):
        device = pick_device(name)
        if device.type == 'mps':
            raise UserError(f'device={name!r}: several processes cannot share MPS; use --device=cpu')
        if device.type == 'cuda':
            if self.local_rank >= torch.cuda.device_count():
                raise UserError(f'LOCAL_RANK={self.local_rank}, but there are {torch.cuda.device_count()} CUDA devices: '
                                'start at most that many processes a node (--nproc_per_node)')
            device = torch.device('cuda', self.local_rank)
            torch.cuda.set_device(device)
        return device

    def __enter__(self):
        if self.world_size > 1:
            if not dist.is_available():
                raise UserError('this torch was built without torch.distributed: start train.py with python, not torchrun')
            if not self.main:
                sys.stdout = open(os.devnull, 'w')
            try:
                device = self.device if self.backend == 'nccl' else None
                dist.init_process_group(self.backend, device_id=device, **self._store())
            except (ValueError, RuntimeError) as e:
                reason = ' '.join(str(e).split())[:200]
                raise UserError(f'the {self.world_size} processes (WORLD_SIZE) cannot be joined: {reason}; start them with '
                                'torchrun, which sets MASTER_ADDR, MASTER_PORT and the ranks') from e
            self.control = dist.new_group(backend='gloo', timeout=LONG)
        return self

    def _store(self):
        """Where the processes find each other, for `init_process_group`; {} = as torchrun says.

        A restarted launch on one node gets the store of the former processes, with their addresses still in it (pytorch
        #135712): there the new ones meet under a name of their own. Nodes do not count restarts alike, see docs/training.md.
        """
        restarts = _env('TORCHELASTIC_RESTART_COUNT', 0)
        alone = _env('LOCAL_WORLD_SIZE', self.world_size) == self.world_size
        if not (restarts and alone and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'):
            return {}
        store = dist.TCPStore(os.environ['MASTER_ADDR'], _env('MASTER_PORT', 0), self.world_size, is_master=False)
        return {'store': dist.PrefixStore(f'restart {restarts}', store), 'rank': self.rank, 'world_size': self.world_size}

    def __exit__(self, kind, *_):
        # after an error the others may be in the midst of a collective: leave without waiting, torchrun ends them
        if self.world_size > 1 and kind is None:
            dist.barrier(group=self.control)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def main_first(self):
        """Rank 0 goes through the body while the others wait, then they do: for what must be made once."""
        if self.world_size > 1 and not self.main:
            dist.barrier(group=self.control)
        yield
        if self.world_size > 1 and self.main:
            dist.barrier(group=self.control)

    def any(self, flag) -> bool:
        """Whether it is true on any rank."""
        return bool(self.sum([float(bool(flag))])[0])

    def sum(self, values: list[float]) -> list[float]:
        """Sums over the ranks, in float64."""
        if self.world_size == 1:
            return values
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self.control)
        return totals.tolist()

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.world_size == 1:
            return value
        held = torch.tensor([value])
        dist.all_reduce(held, op=dist.ReduceOp.MIN, group=self.control)
        return int(held)

    def from_last(self, value: float) -> float:
        """The value of the last rank, on all ranks."""
        if self.world_size == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(held, src=self.world_size - 1, group=self.control)
        return held.item()

    def from_first(self, value):
        """The value of rank 0, on all ranks."""
        if self.world_size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.control)
        return held[0]

    def gather(self, value) -> list:
        """The values of all ranks in their order, on rank 0; an empty list on the others."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.main else None
        dist.gather_object(value, values, dst=0, group=self.control)
        return values or []


def launch_id() -> str:
    """What tells one start of torchrun from another, and not one of its restarts from the next; '' without torchrun."""
    run = os.environ.get('TORCHELASTIC_RUN_ID', '')
    return f'none, agent {process_start(os.getppid())}' if run == 'none' else run  # where no --rdzv-id was given


def go_on_after_restart(s, ranks: Ranks, holds) -> None:
    """Where torchrun has started the processes again, because one died or joined (--max-restarts): make the settings those of
    a run that goes on from ckpt.pt, if this launch has saved one.

    holds: path -> the `launch_id` in a checkpoint, '' where there is none.
    """
    path = Path(s.out_dir) / 'ckpt.pt'
    if ranks.from_first(launch_id() != '' and holds(path) == launch_id()):
        print(f'{path} was saved by this launch ({launch_id()}), so this is a restart: going on from it')
        s.init_from, s.resume_from = 'resume', path.name


def _env(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f'environment variable {name}={text!r}: must be a whole number, as torchrun sets it') from None
