"""The processes of a run started by torchrun; without torchrun, a single process."""
import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from training.device import pick_device

LONG = timedelta(days=7)  # a timeout: the other ranks wait while rank 0 prepares a data set


class Ranks:
    """The rank of this process, and the small collectives that training needs (over gloo).

    A context manager that joins and leaves the process group; one process alone does not use it.
    Only rank 0 prints. Raises UserError if this rank has no such device, or the backend (for
    gradients: 'nccl', 'gloo') does not support it. 'cuda' is the local rank's GPU.
    """

    def __init__(self, backend: str = 'gloo', device: str = 'auto', backend_given: bool = False):
        self.world_size = env_int('WORLD_SIZE', 1)
        self.rank = env_int('RANK', 0) if self.world_size > 1 else 0
        self.main = self.rank == 0  # writes files and prints
        self.device, self.backend, self.control = pick_device(device), backend, None
        if self.world_size == 1:
            return
        if self.device.type == 'mps':
            raise UserError(f'device={device!r}: several processes cannot share MPS; '
                            'use --device=cpu')
        if self.device.type == 'cuda':
            local, n = env_int('LOCAL_RANK', 0), torch.cuda.device_count()
            if local >= n:
                raise UserError(f'LOCAL_RANK={local}, but there are {n} CUDA devices: '
                                'start at most that many processes a node (--nproc_per_node)')
            self.device = torch.device('cuda', local)
            torch.cuda.set_device(self.device)
        elif backend == 'nccl':
            if backend_given:
                raise UserError("backend='nccl' needs CUDA, but the device is "
                                f'{str(self.device)!r}: use --backend=gloo')
            self.backend = 'gloo'

    def __enter__(self):
        if self.world_size == 1:
            return self
        if not dist.is_available():
            raise UserError('this torch was built without torch.distributed: '
                            'start train.py with python, not torchrun')
        if not self.main:
            sys.stdout = open(os.devnull, 'w')
        try:
            device = self.device if self.backend == 'nccl' else None
            dist.init_process_group(self.backend, device_id=device, **self._store())
        except (ValueError, RuntimeError) as e:
            reason = ' '.join(str(e).split())[:200]
            raise UserError(f'the {self.world_size} processes (WORLD_SIZE) cannot be joined: '
                            f'{reason}; start them with torchrun, which sets MASTER_ADDR, '
                            'MASTER_PORT and the ranks') from e
        self.control = dist.new_group(backend='gloo', timeout=LONG)
        return self

    def _store(self):
        """Arguments of `init_process_group`: the store; {} = torchrun's own. On a restart that has
        the addresses of the previous processes (pytorch #135712), so it gets a prefix, if there is
        one node: restart counts of several may differ, see docs/training.md."""
        restarts = env_int('TORCHELASTIC_RESTART_COUNT', 0)
        one_node = env_int('LOCAL_WORLD_SIZE', self.world_size) == self.world_size
        shared = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
        if not (restarts and one_node and shared):
            return {}
        store = dist.TCPStore(os.environ['MASTER_ADDR'], env_int('MASTER_PORT', 0),
                              self.world_size, is_master=False)
        return {'store': dist.PrefixStore(f'restart {restarts}', store), 'rank': self.rank,
                'world_size': self.world_size}

    def __exit__(self, kind, *_):
        # after an error others may be in a collective: do not wait, torchrun terminates them
        if self.world_size > 1 and kind is None:
            dist.barrier(group=self.control)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def main_first(self):
        """Run the body on rank 0 while the others wait, then on the others."""
        if not self.main:
            dist.barrier(group=self.control)
        yield
        if self.world_size > 1 and self.main:
            dist.barrier(group=self.control)

    def any(self, flag) -> bool:
        """Return whether `flag` is true on any rank."""
        return bool(self.sum([float(bool(flag))])[0])

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums over the ranks, in float64."""
        if self.world_size == 1:
            return values
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals, group=self.control)
        return totals.tolist()

    def gather(self, value) -> list:
        """Return the values of all ranks, in order."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values


def launch_id() -> str:
    """Return the id of this torchrun launch, the same after a restart; '' if it has none."""
    name = os.environ.get('TORCHELASTIC_RUN_ID', '')
    return '' if name == 'none' else name


def env_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f'environment variable {name}={text!r}: must be a whole number, '
                        'as torchrun sets it') from None
