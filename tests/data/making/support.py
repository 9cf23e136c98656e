"""Helpers for the tests of dataset preparation."""

import sys
import types

DOCUMENTS = [f'the document number {i}, ' * (1 + i % 5) for i in range(400)]


def contents(folder):
    """{relative path: bytes} of all files but the lock; unfinished preparations have subfolders."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*')
            if path.is_file() and path.name != '.prepare.lock'}


class Rows(list):
    def skip(self, n):
        return Rows(self[n:])


def fake_hub(monkeypatch, load_dataset, version='4.0.0'):
    module = types.SimpleNamespace(load_dataset=load_dataset, __version__=version)
    monkeypatch.setitem(sys.modules, 'datasets', module)
