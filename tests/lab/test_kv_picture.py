"""The picture of KV bytes over context: it has the documents' numbers and becomes a file."""
import pytest

from config.errors import UserError
from lab import kv_picture


def test_bytes_are_those_of_the_documents_and_the_picture_is_written(tmp_path):
    for context, tied, int8 in ((1024, 72.0, 139.6), (8192, 128.0, 248.2)):
        found = {name: each[kv_picture.CONTEXTS.index(context)]
                 for name, each in kv_picture.kv_bytes().items()}
        assert found['vanilla GPT-2'] == 12 * 2 * 768 * 2 * context == 12 * found['+ MQA']
        assert round(found['vanilla GPT-2'] / found['+ global KV tied'], 1) == tied
        assert round(found['vanilla GPT-2'] / found['+ int8 KV'], 1) == int8
    kv_picture.main(tmp_path / 'kv.png')
    assert (tmp_path / 'kv.png').read_bytes().startswith(b'\x89PNG')
    with pytest.raises(UserError, match='x.png cannot be written'):
        kv_picture.main(tmp_path / 'none' / 'x.png')
