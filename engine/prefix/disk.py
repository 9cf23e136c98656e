"""The prefix cache on disk, which survives a restart: one safetensors file per block.

    FOLDER/FINGERPRINT/KEY.safetensors     page, local, state: uint8; metadata: tokens, key of the
                                           parent ("before"), n_local, hash of it all

The fingerprint identifies weights, plan and dtypes. A file that is damaged or has tokens other than
those requested counts as missing. Processes may share a folder; each counts the files it knows.
Files contain tokens of prompts: only their owner can read them.
"""
import contextlib
import hashlib
import os
import re
import stat
import time
import uuid
import warnings
from dataclasses import fields
from pathlib import Path

import torch

from config.errors import UserError
from config.files import is_ours, make_private, private_folder
from kv.plan import LOCAL

VERSION = 4
FIELDS = 28  # of GPTConfig, before those that are left out at their default
PARTS = 'page', 'local', 'state'
ABANDONED = 3600.0  # age in seconds at which temporary files are deleted
FINGERPRINT, FILE = re.compile('[0-9a-f]{32}'), re.compile(r'[0-9a-f]*\.safetensors')


def fingerprint(model, kv_dtype: str, page_size: int, max_seq_len: int = 0) -> str:
    """64 hex digits that identify model, plan, dtype and page size. Reads all weights."""
    known = VERSION, model.plan, model.config, kv_dtype, page_size
    rings = [slot for slot in model.plan.slots if slot.kind == LOCAL]
    if len({slot.window for slot in rings}) > 1:  # whole rings are stored
        known += tuple(slot.capacity(max_seq_len) for slot in rings)
    # files of versions without these fields stay valid; a new one comes before the last
    later = ["window_pattern='', kv_head_pattern='', ", 'kv_stride=1, ', r', stride=1(?=[,)])', *(
        re.escape(f'{f.name}={f.default!r}, ') for f in fields(model.config)[FIELDS:-1])]
    known = re.sub('|'.join(later), '', repr(known))
    digest = hashlib.sha256(known.encode())
    for name, x in sorted(model.state_dict().items()):
        x = x.detach().cpu().contiguous()
        digest.update(repr((name, x.dtype, tuple(x.shape))).encode())
        digest.update(x.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class DiskTier:
    """The files of one fingerprint in a folder.

    budget: bytes above which the least recently used files of the folder are deleted, whatever
    their fingerprint. nbytes: size of all files in it.
    Raises UserError if the safetensors package is missing, or the folder cannot be created, is a
    link, or belongs to another user.
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
            _make_private(Path(folder).resolve())
            private_folder(self.folder)
            found = sorted(_files(Path(folder)))
        except OSError as e:
            raise UserError(f'{self.folder} cannot be used: {e}') from e
        self._sizes = {path: size for _, path, size in found}  # least recently used first
        self.nbytes = sum(self._sizes.values())
        self._warned, self._latest = False, 0
        self._make_room()

    def write(self, block, page: torch.Tensor | None) -> None:
        """Write a block and the bytes of its page. Warn the first time that this fails."""
        path = self._path(block.key)
        has_state = block.state is not None
        complete = block.saved >= block.n_local and block.saved_state >= has_state
        if complete and path in self._sizes:
            return self.touch([block.key])
        about = self._identity(block) | {'n_local': str(block.n_local)}
        parts = zip(PARTS, (page, block.local, block.state))
        tensors = {name: x for name, x in parts if x is not None}
        temporary = path.with_suffix(f'.{uuid.uuid4().hex}.tmp')
        try:
            if any(x.is_pinned() for x in tensors.values()):
                torch.cuda.synchronize()  # copies to the host may be pending
            temporary.touch(0o600, exist_ok=False)  # save_file would let others read it
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
        self._drop(path)
        self._sizes[path] = size
        self.nbytes += size
        self._make_room()

    def _make_room(self):
        while self._sizes and self.nbytes > self.budget:
            self._delete(next(iter(self._sizes)))

    def touch(self, keys: list[bytes]) -> None:
        """Mark blocks as used, the last key most recently."""
        for path in map(self._path, keys):
            if path in self._sizes:
                self._sizes[path] = self._sizes.pop(path)
                with contextlib.suppress(OSError):  # another process may have deleted it
                    self._stamp(path)

    def _identity(self, block) -> dict:
        return {'fingerprint': self.fingerprint, 'tokens': block.tokens.hex(),
                'before': block.parent.key.hex()}

    def _stamp(self, path):
        """Set a modification time after all earlier ones: the file system's clock is too coarse."""
        self._latest = max(self._latest + 1, time.time_ns())
        os.utime(path, ns=(self._latest, self._latest))

    def delete(self, key: bytes) -> None:
        """Delete the file of a block, if there is one."""
        self._delete(self._path(key))

    def read(self, block) -> tuple | None:
        """Return (page, local, state, n_local) of a block; None if there is none. Each of the first
        three is a tensor or None."""
        from safetensors import safe_open
        path = self._path(block.key)
        if path not in self._sizes:
            return None
        try:
            with safe_open(path, 'pt') as file:
                about = file.metadata() or {}
                if not self._identity(block).items() <= about.items():
                    return None
                # clone, since each would map its file, and a process may have only 65,530 mappings
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
            if about.pop('hash', '') != _hash(about, tensors):
                raise ValueError('hash mismatch')
            return *map(tensors.get, PARTS), int(about['n_local'])
        except Exception as e:  # a damaged file may raise anything
            warnings.warn(f'{path} cannot be read and counts as missing: {type(e).__name__}: {e}',
                          stacklevel=2)
            self._drop(path)
            return None

    def _path(self, key: bytes) -> Path:
        return self.folder / f'{key.hex()}.safetensors'

    def _drop(self, path):
        self.nbytes -= self._sizes.pop(path, 0)

    def _delete(self, path):
        self._drop(path)
        _unlink(path)


def _make_private(top: Path) -> None:
    """Create the folder of all fingerprints for this user alone. One that exists is restricted only
    if nothing else is in it and it is not shared: it may be a folder such as /tmp."""
    if top.exists():
        about = top.stat()
        has_others = not all(FINGERPRINT.fullmatch(each.name) for each in top.iterdir())
        if has_others or about.st_mode & stat.S_ISVTX or not is_ours(about):
            return
    private_folder(top)


def _files(top: Path):
    """Yield (time of the last use, path, size) of the files of all fingerprints, which become
    private. Delete what interrupted writes left."""
    for folder in top.iterdir():
        if not FINGERPRINT.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):  # a link, or of another user: not ours to delete
            private_folder(folder)
            for path in folder.iterdir():
                about = path.lstat()
                if not stat.S_ISREG(about.st_mode):
                    continue
                if path.suffix == '.tmp' and time.time() - about.st_mtime > ABANDONED:
                    _unlink(path)
                elif FILE.fullmatch(path.name):
                    make_private(path)
                    yield about.st_mtime_ns, path, about.st_size


def _hash(about: dict, tensors: dict) -> str:
    digest = hashlib.blake2b(repr(sorted(about.items())).encode(), digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(x.numpy().data)
    return digest.hexdigest()


def _unlink(path):
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
