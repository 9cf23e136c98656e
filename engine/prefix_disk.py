"""The prefix cache on disk, which survives a restart: one safetensors file per block.

    FOLDER/FINGERPRINT/KEY.safetensors     page, local, state: uint8; metadata: tokens, key of the
                                           parent ("before"), n_local, hash of it all

The fingerprint identifies weights, plan and dtypes. A file that is damaged or has tokens other than
those requested counts as missing. Processes may share a folder; each counts the files it knows.
"""
import contextlib
import hashlib
import os
import time
import uuid
import warnings
from pathlib import Path

import torch

from config.errors import UserError
from kv.parts import parts_of

VERSION = 4
ABANDONED = 3600.0  # age in seconds at which temporary files are deleted


def fingerprint(model, kv_dtype: str, page_size: int) -> str:
    """64 hex digits that identify model, plan, dtype and page size. Reads all weights."""
    digest = hashlib.sha256(repr((VERSION, model.plan, model.config, kv_dtype, page_size)).encode())
    for name, x in sorted(model.state_dict().items()):
        for part in parts_of(x):
            part = part.detach().cpu().contiguous()
            digest.update(repr((name, part.dtype, tuple(part.shape))).encode())
            digest.update(part.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class DiskTier:
    """The files of one fingerprint in a folder.

    budget: bytes above which the least recently used files are deleted. nbytes: size of all files.
    Raises UserError if the safetensors package is missing or the folder cannot be created.
    """

    def __init__(self, folder, fingerprint: str, budget: int):
        try:
            import safetensors.torch
        except ImportError as e:
            raise UserError('keeping prefixes on disk needs the safetensors package: '
                            "pip install -e '.[hf]'") from e
        self.files, self.fingerprint, self.budget = safetensors.torch, fingerprint, budget
        self.folder = Path(folder) / fingerprint[:32]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob('*.tmp'):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink(missing_ok=True)
            found = sorted((path.stat().st_mtime_ns, path.name, path.stat().st_size)
                           for path in self.folder.glob('*.safetensors'))
        except OSError as e:
            raise UserError(f'{self.folder} cannot be used: {e}') from e
        self._sizes = {name: size for _, name, size in found}  # least recently used first
        self.nbytes = sum(self._sizes.values())
        self._warned, self._latest = False, 0

    def write(self, block, page: torch.Tensor | None) -> None:
        """Write a block and the bytes of its page. Warn the first time that this fails."""
        path = self._path(block.key)
        has_state = block.state is not None
        complete = block.saved >= block.n_local and block.saved_state >= has_state
        if complete and path.name in self._sizes:
            return self.touch([block.key])
        about = self._identity(block.parent.key, block.tokens) | {'n_local': str(block.n_local)}
        tensors = {'page': page, 'local': block.local, 'state': block.state}
        tensors = {name: x for name, x in tensors.items() if x is not None}
        temporary = path.with_suffix(f'.{uuid.uuid4().hex}.tmp')
        try:
            if any(x.is_pinned() for x in tensors.values()):
                torch.cuda.synchronize()  # copies to the host may be pending
            self.files.save_file(tensors, temporary, about | {'hash': _hash(about, tensors)})
            size = temporary.stat().st_size
            self._stamp(temporary)
            os.replace(temporary, path)
        except Exception as e:  # OSError, or one from safetensors
            if not self._warned:
                warnings.warn(f'{path} cannot be written, so its prefix is not stored: {e}',
                              stacklevel=2)
            self._warned = True
            _unlink(temporary)
            return
        block.saved, block.saved_state = block.n_local, has_state
        self._drop(path.name)
        self._sizes[path.name] = size
        self.nbytes += size
        while self.nbytes > self.budget:
            self._delete(next(iter(self._sizes)))

    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as used, the last key most recently."""
        for path in map(self._path, keys):
            if path.name in self._sizes:
                self._sizes[path.name] = self._sizes.pop(path.name)
                with contextlib.suppress(OSError):  # another process may have deleted it
                    self._stamp(path)

    def _identity(self, before, tokens) -> dict:
        return {'fingerprint': self.fingerprint, 'tokens': tokens.hex(), 'before': before.hex()}

    def _stamp(self, path):
        """Set a modification time after all earlier ones: the file system's clock is too coarse."""
        self._latest = max(self._latest + 1, time.time_ns())
        os.utime(path, ns=(self._latest, self._latest))

    def delete(self, key: bytes) -> None:
        """Delete the file of a block, if there is one."""
        self._delete(self._path(key).name)

    def read(self, key: bytes, before: bytes, tokens: bytes) -> tuple[dict, int] | None:
        """Return ({'page': .., 'local': .., 'state': ..}, n_local) of the block with these tokens
        after the block with key `before`; None if there is none. Tensors may be absent."""
        path = self._path(key)
        if path.name not in self._sizes:
            return None
        try:
            with self._open(path) as file:
                about = file.metadata() or {}
                if not self._identity(before, tokens).items() <= about.items():
                    return None
                # clone, since each would map its file, and a process may have only 65,530 mappings
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            if about.pop('hash', '') != _hash(about, tensors):
                raise ValueError('hash mismatch')
            return tensors, int(about['n_local'])
        except Exception as e:  # a damaged file may raise anything
            warnings.warn(f'{path} cannot be read and counts as missing: {type(e).__name__}: {e}',
                          stacklevel=2)
            self._drop(path.name)
            return None

    def _open(self, path):
        from safetensors import safe_open
        return safe_open(path, 'pt')

    def _path(self, key: bytes) -> Path:
        return self.folder / f'{key.hex()}.safetensors'

    def _drop(self, name):
        self.nbytes -= self._sizes.pop(name, 0)

    def _delete(self, name):
        self._drop(name)
        _unlink(self.folder / name)


def _hash(about: dict, tensors: dict) -> str:
    digest = hashlib.blake2b(repr(sorted(about.items())).encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(x.numpy().data)
    return digest.hexdigest()


def _unlink(path):
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
