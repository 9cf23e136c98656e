"""What the tests of streamed datasets share."""

import sys
import types

DOCUMENTS = [f'the document number {i}, ' * (1 + i % 5) for i in range(400)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != '.prepare.lock'}


class Rows(list):
    def skip(self, n):
        return Rows(self[n:])


def fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=load_dataset, __version__='4.0.0'))
