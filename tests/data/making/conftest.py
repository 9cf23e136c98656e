"""Streamed datasets from a dump of 400 documents."""

import json

import pytest

from tests.data.support import DOCUMENTS, contents


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / 'dump.jsonl'
    path.write_text(''.join(json.dumps({'text': text, 'id': i}) + '\n'
                            for i, text in enumerate(DOCUMENTS)))
    return path


@pytest.fixture
def run(load_prepare, tiny, dump, tmp_path):
    """Return a function that prepares the dataset with given options: {file: bytes}."""
    def run(*argv, name='openwebtext', source=dump):
        out = tmp_path / 'out'
        given = ['--from', str(source)] if source else []
        load_prepare(name).main([*given, f'--out={out}', '--workers=1', '--val=0.1', *argv])
        return contents(out)
    return run
