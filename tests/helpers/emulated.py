"""Extensions compiled for another processor and run in an emulator, in place of the real ones: the
memory that a call names is copied there, and back."""
import ctypes
import gc
import shutil
import struct
import subprocess
from pathlib import Path

import torch

import extension
from engine import native

COMPILER, EMULATOR = 'aarch64-linux-gnu-g++', 'qemu-aarch64'
AVAILABLE = bool(shutil.which(COMPILER) and shutil.which(EMULATOR))
BASE = 1 << 36  # where the memory lies there


class Emulated:
    """A library of this source's functions of these names; flags say for which ARM processor."""

    tiles = False

    def __init__(self, folder: Path, source: Path, names: list[str], flags: list[str]):
        self.names, program = names, folder / 'program'
        general = [flag for flag in extension.FLAGS if flag not in ('-shared', '-march=native')]
        subprocess.run([COMPILER, *general, *flags, '-static', f'-I{extension.HERE}',
                        f'-DEXTENSION="{source}"', f'-DBASE={BASE}',
                        '-DFUNCTIONS=' + ','.join(f'(Function){name}' for name in names),
                        str(Path(__file__).with_suffix('.cpp')), '-o', str(program)], check=True)
        self.process = subprocess.Popen([EMULATOR, str(program)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        gc.freeze()  # so that there are fewer objects to look through

    def close(self):
        gc.unfreeze()
        self.process.communicate()

    def __getattr__(self, name):
        if name not in self.names:
            raise AttributeError(name)
        return lambda *args: self._call(self.names.index(name), args)

    def _call(self, function, args):
        memory = Memory()
        words = [0] * 8
        for i, arg in enumerate(args):
            words[i] = memory.word(arg)
        size = -(-len(memory.bytes) // 4096) * 4096
        self.process.stdin.write(struct.pack('<10q', size, function, *words)
                                 + bytes(memory.bytes).ljust(size, b'\0'))
        self.process.stdin.flush()
        found = self.process.stdout.read(size)
        assert len(found) == size, 'the emulated program failed'
        memory.take_back(found)


class Memory:
    """Copies of what a call's arguments point to: whole storages of tensors, and structs."""

    def __init__(self):
        self.bytes, self.copied = bytearray(), {}  # copied: address here -> (offset there, size)
        tensors = (x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))
        self.storages = {s.data_ptr(): s.nbytes() for x in tensors
                         if x.layout == torch.strided and x.device.type == 'cpu'
                         for s in [x.untyped_storage()] if s.data_ptr()}

    def word(self, arg) -> int:
        """An argument as the emulated function gets it."""
        if hasattr(arg, '_obj'):  # of ctypes.byref
            return self._append(bytes(self._relocated(arg._obj)))
        if isinstance(arg, ctypes.c_void_p):
            return self._pointer(arg.value) if arg.value else 0
        return getattr(arg, 'value', arg)

    def take_back(self, found: bytes) -> None:
        for address, (offset, size) in self.copied.items():
            ctypes.memmove(address, found[offset:offset + size], size)

    def _append(self, data: bytes) -> int:
        self.bytes += b'\0' * (-len(self.bytes) % 64)
        self.bytes += data
        return BASE + len(self.bytes) - len(data)

    def _copy(self, address: int, size: int) -> int:
        if address not in self.copied:
            there = self._append(ctypes.string_at(address, size))
            self.copied[address] = there - BASE, size
        return BASE + self.copied[address][0]

    def _pointer(self, address: int) -> int:
        [(start, size)] = [(start, size) for start, size in self.storages.items()
                           if start <= address < start + size]
        return self._copy(start, size) + address - start

    def _relocated(self, s):
        """A copy of a struct whose pointers are those of the memory there."""
        copy = type(s).from_buffer_copy(s)
        for name, kind in s._fields_:
            value = getattr(s, name)
            if kind is ctypes.c_void_p and value:
                setattr(copy, name, self._of_field(s, name, value))
            elif isinstance(value, ctypes.Structure):
                setattr(copy, name, self._relocated(value))
        return copy

    def _of_field(self, s, name, value):
        if name in ('layers', 'slots') and isinstance(s, native.Model):
            kind, n = (native.Layer, s.n_layer) if name == 'layers' else (native.Slot, s.n_slot)
            items = (kind * n).from_address(value)
            return self._append(b''.join(bytes(self._relocated(item)) for item in items))
        if isinstance(s, native.Step) and name != 'logits':  # NumPy arrays
            words = {'wanted': s.n_wanted, 'table': s.m * s.table_width / 2}.get(name, s.m)
            return self._copy(value, int(8 * words)) if words else 0
        return self._pointer(value)
