"""Helpers for the tests of data sets."""
import io
import os
import sys
import tarfile
import types

from data.tokenfiles import open_split, read_meta
from data.tokenizer import load_tokenizer

DOCUMENTS = [f'the document number {i}, ' * (1 + i % 5) for i in range(400)]
META = {'vocab_size': 3, 'itos': {0: 'a', 1: 'b', 2: 'c'}, 'stoi': {'a': 0, 'b': 1, 'c': 2}}


class Bomb:
    """Creates a folder when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def contents(folder):
    """{relative path: bytes} of all files but the lock; unfinished preparations have subfolders."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*')
            if path.is_file() and path.name != '.prepare.lock'}


def ids_of(folder, split):
    tokens = open_split(folder, split)
    return tokens.window(0, len(tokens))


def texts_of(folder):
    """The texts of train and val."""
    decode = load_tokenizer(read_meta(folder)).decode
    return decode(ids_of(folder, 'train')), decode(ids_of(folder, 'val'))


def tar_gz(files):
    """The bytes of a .tar.gz of {name: bytes}."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w:gz') as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def fake_datasets(monkeypatch, load_dataset, version='4.0.0', error=None):
    """error: raised if the hub is asked whether it is there."""
    def metadata(url, timeout):
        if error:
            raise error
    hub = types.SimpleNamespace(get_hf_file_metadata=metadata,
                                hf_hub_url=lambda *names, repo_type: '/'.join(names),
                                utils=types.SimpleNamespace(HfHubHTTPError=LookupError))
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    module = types.SimpleNamespace(load_dataset=load_dataset, __version__=version)
    monkeypatch.setitem(sys.modules, 'datasets', module)
