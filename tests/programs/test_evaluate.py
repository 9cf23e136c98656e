"""interop.evaluate predicts every token of a text once, and reports bits per byte."""
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from interop import evaluate, export
from model import GPT
from tests.programs.support import ALPHABET, flags, load
from training.checkpoint.file import config_of

TEXT = 'abcdefghij\n ' * 6 + 'abc jihg\nfedcba'


@pytest.fixture
def out(trained):
    return trained['full']


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    (tmp_path / 'text.txt').write_text(TEXT)
    monkeypatch.chdir(tmp_path)


def judged(capsys, out, **settings):
    capsys.readouterr()
    evaluate.main(flags(dict(out_dir=out, device='cpu', text='text.txt', json=True) | settings))
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), lines[-2]


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_each_token_is_predicted_once(n, context, data):
    stride = data.draw(st.integers(1, context))
    predicted = []
    for k, (begin, end, scored) in enumerate(evaluate.windows_of(n, context, stride)):
        assert 0 <= begin < end < n and end - begin <= context and 1 <= scored <= end - begin
        assert k == 0 or end - begin == context and scored <= stride
        predicted += range(end - scored + 1, end + 1)
    assert predicted == list(range(1, n))


@pytest.mark.parametrize('context, stride', [(16, 16), (7, 2), (500, 250)])
def test_by_hand(out, capsys, context, stride):
    """One token at a time, each with the context that it has in the first window predicting it."""
    saved = load(out / 'ckpt.pt')
    model = GPT(config_of(saved, out)).eval()
    model.load_state_dict(saved['model'])
    ids, nats = torch.tensor([ALPHABET.index(c) for c in TEXT]), 0.0
    for begin, end, scored in evaluate.windows_of(len(ids), context, stride):
        with torch.no_grad():
            logits = model(ids[None, begin:end], all_logits=True)[0][0].double().log_softmax(-1)
        nats -= sum(logits[i - begin - 1, ids[i]].item() for i in range(end - scored + 1, end + 1))
    found, line = judged(capsys, out, context=context, stride=stride, batch_size=3)
    assert found['nats_per_token'] == pytest.approx(nats / (len(TEXT) - 1), rel=1e-5)
    assert found['bits_per_byte'] == pytest.approx(nats / math.log(2) / (len(TEXT) - 1), rel=1e-5)
    assert found['tokens'] == found['bytes'] == len(TEXT) - 1
    assert line.startswith(f"{found['bits_per_byte']:.4f} bits per byte")


def test_the_same_loss_of_other_files_and_by_a_cache(out, tmp_path, capsys, data_root):
    plain, _ = judged(capsys, out)
    assert plain['context'] == 16 and plain['stride'] == 8
    for kv_dtype, stored, near in (('auto', 'float32', 1e-5), ('int8', 'int8', 0.02)):
        found, line = judged(capsys, out, kv_dtype=kv_dtype)
        assert found['nats_per_token'] == pytest.approx(plain['nats_per_token'], abs=near)
        assert f'through a cache in {stored}' in line
    export.export(out / 'ckpt.pt', tmp_path / 'hf', data_root=data_root)
    found, _ = judged(capsys, out, init_from=tmp_path / 'hf')
    assert found['nats_per_token'] == pytest.approx(plain['nats_per_token'], rel=1e-5)
    (tmp_path / 'text.txt').write_bytes(b'\xef\xbb\xbf' + TEXT.replace('\n', '\r\n').encode())
    assert judged(capsys, out)[0] == plain


@pytest.mark.parametrize('content, named', [
    (b'a', 'nothing to predict'), (b'', 'nothing to predict'), (b'\xff\xfe', 'UTF-8'),
    (f'{TEXT}\nab\u2014\u2014z'.encode(), "text='text.txt': .* 2 characters .*: '\u2014', 'z'")])
def test_wrong_texts(out, tmp_path, capsys, content, named):
    (tmp_path / 'text.txt').write_bytes(content)
    with pytest.raises(UserError, match=named):
        judged(capsys, out)
