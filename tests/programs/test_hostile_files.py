"""Files that others made are opened safely: whatever is in them, there is a result or one
UserError, in seconds, and without much memory."""
import json
import multiprocessing
import os
import pickle
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import sample
from common.errors import UserError
from common.gpt_config import GPTConfig, model_args
from configurator import run_program
from data.tokenfiles import read_meta
from data.tokenizer import CharTokenizer
from engine.text.dialogue import Dialogue, Template
from interop.huggingface import from_pretrained
from interop.load import tokenizer_of
from interop.tokenizer_files import tokenizer_in
from kv.models.config import read_config
from model import GPT
from tests.programs.support import flags, meta_of
from training.checkpoint.file import read_file, tokens_id
from training.checkpoint.manager import load_to_resume, peek
from training.checkpoint.load_model import model_of

resource = pytest.importorskip('resource')  # not on Windows
SECONDS, MEMORY = 5, 500 * 2 ** 20
META = meta_of('abcdefgh')
CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=8)
TOKENIZER = CharTokenizer(META['stoi'], META['itos'])
CHECKPOINT = {'model': GPT(CONFIG).state_dict(), 'optimizer': {}, 'model_args': model_args(CONFIG),
              'iter_num': 3, 'best_val_loss': 2.0, 'config': {'dataset': 'none'},
              'tokens': tokens_id(META), 'meta': META, 'run': '0' * 32}
HF_CONFIG = {'model_type': 'nanokv', 'nanokv': model_args(CONFIG),
             'nanokv_source': {'dataset': 'none', 'tokens': ''}}
TOKENIZER_JSON = {'model': {'type': 'WordLevel', 'vocab': META['stoi']},
                  'added_tokens': [{'id': 8, 'content': '<|endoftext|>'}]}
CHAT = {'version': 2, 'turn': '{name}{text}a', 'trimmed': 0,
        'turns': [{'name': 'b', 'text': 'c', 'ids': [1, 2, 0]}]}


def doubled(value, levels: int):
    """`levels` pairs of one object: small as a pickle, of 2**levels items for `hash` and `repr`."""
    for _ in range(levels):
        value = type(value)([value, value])
    return value


def cyclic():
    loop = []
    loop.append(loop)
    return loop


def open_checkpoint(path):
    saved = load_to_resume(path)
    model = model_of(saved, path, dropout=0.0)
    dataset, known = saved['config'].get('dataset', ''), saved.get('tokens', '')
    tokenizer_of(dataset, model.config.vocab_size, known, path.parent, saved.get('meta'))
    peek(path)


def open_folder(path):
    from_pretrained(str(path.parent))
    read_config(str(path.parent))


def open_chat(path):
    Dialogue(TOKENIZER, Template('{name}{text}a')).load(path)


# name of the file -> how it is written, opened, and its good contents
FILES = {
    'ckpt.pt': (lambda path, x: torch.save(x, path), open_checkpoint, CHECKPOINT),
    'meta.pkl': (lambda path, x: path.write_bytes(pickle.dumps(x)),
                 lambda path: read_meta(path.parent), META),
    'tokenizer.json': (lambda path, x: path.write_text(json.dumps(x)),
                       lambda path: tokenizer_in(path.parent, 9), TOKENIZER_JSON),
    'config.json': (lambda path, x: path.write_text(json.dumps(x)), open_folder, HF_CONFIG),
    'chat.json': (lambda path, x: path.write_text(json.dumps(x)), open_chat, CHAT)}
PLAIN = [None, True, '', 'x', '\ud800', '\x1b[2J', 'x' * 100_000, 0, -1, 2 ** 31, 2 ** 63, 10 ** 30,
         100_000, 40_000, 0.5, -0.0, float('nan'), float('inf'), [], {}, [[[]]], {'a': {'b': []}},
         ['x'] * 1000, [-1], [10 ** 30], {'x': -1}, {'x': 0, 'y': 0}]
IN_PICKLES = [doubled([1], 60), doubled((1,), 60), cyclic(), (), {doubled((1,), 3): 1}, {1: 2}]
DELETED = object()


def paths_in(value, path=()) -> list[tuple]:
    """The keys that lead to every field of a document, itself included."""
    if torch.is_tensor(value):
        return [path]
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(found for key, x in inner for found in paths_in(x, (*path, key)))]


def replaced(document, path: tuple, value):
    """A copy of the document with another value at `path`."""
    if not path:
        return value
    copy, key = document.copy(), path[0]
    if value is DELETED and len(path) == 1:
        del copy[key]
    else:
        copy[key] = replaced(document[key], path[1:], value)
    return copy


def outcome(folder: Path, name: str) -> str:
    """'' if the file opens, or the message of its UserError. Any other exception is a failure."""
    began = time.monotonic()
    try:
        FILES[name][1](folder / name)
        message = ''
    except UserError as e:
        message = str(e)
        assert message and len(message) < 2000
    assert time.monotonic() - began < SECONDS
    return message


def limited(call, folder: Path, seconds: float = SECONDS):
    """Return what `call(folder)` returns in a process of its own that may take so many seconds,
    and MEMORY more than it has."""
    def work(pipe):
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            pipe.send(call(folder))
        except BaseException as e:  # also PanicException and MemoryError
            pipe.send(f'FAILED: {type(e).__name__}: {str(e)[:300]} '
                      f'{getattr(e, "__notes__", "")}')
    context = multiprocessing.get_context('fork')
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    arrived = ours.poll(seconds)
    process.kill()
    process.join()
    assert arrived, f'no result within {seconds} s'
    result = ours.recv()
    assert not str(result).startswith('FAILED'), result
    return result


def write(folder: Path, name: str, document) -> None:
    FILES[name][0](folder / name, document)
    if name == 'config.json':
        weights = {k: x for k, x in CHECKPOINT['model'].items() if k != 'lm_head.weight'}
        save_file(weights, folder / 'model.safetensors')


def property_of(name, examples, folder):
    """Any hostile value in any field of the file: a UserError or a result, and no other file."""
    choices = PLAIN + [DELETED] + IN_PICKLES * name.endswith(('.pt', '.pkl'))

    @settings(max_examples=examples, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(paths_in(FILES[name][2])), st.sampled_from(range(len(choices))))
    def check(path, i):
        if choices[i] is DELETED and not path:
            return
        write(folder, name, replaced(FILES[name][2], path, choices[i]))
        files = {each: each.read_bytes() for each in folder.parent.rglob('*') if each.is_file()}
        outcome(folder, name)
        assert {each: each.read_bytes() for each in folder.parent.rglob('*')
                if each.is_file()} == files
    check()


@pytest.mark.parametrize('examples', [25, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', FILES)
def test_any_value_in_any_field(tmp_path, name, examples):
    folder = tmp_path / 'given'
    folder.mkdir()
    write(folder, name, FILES[name][2])
    assert outcome(folder, name) == ''
    limited(lambda folder: property_of(name, examples, folder), folder, seconds=examples)


@pytest.mark.parametrize('name, document, words', [
    ('meta.pkl', {**META, 'dtype': doubled([1], 60)}, 'dtype'),
    ('ckpt.pt', {**CHECKPOINT, 'run': doubled([1], 60)}, 'run'),
    *(('ckpt.pt', replaced(CHECKPOINT, ('model_args', 'n_layer'), n), 'n_layer')
      for n in (9_999, 10 ** 9)),
    ('ckpt.pt', replaced(CHECKPOINT, ('model_args', 'n_embd'), 40_000), 'size mismatch'),
    *(('ckpt.pt', replaced(CHECKPOINT, ('model_args', 'n_embd'), n), 'n_embd')
      for n in (2 ** 30, 2 ** 63)),
    ('config.json', replaced(HF_CONFIG, ('nanokv', 'n_embd'), 2 ** 30), 'n_embd'),
    ('tokenizer.json', replaced(TOKENIZER_JSON, ('model', 'vocab', 'b'), 0), 'not inverse'),
    ('tokenizer.json', replaced(TOKENIZER_JSON, ('model', 'vocab', 'b'), 2 ** 40), 'vocab_size'),
    ('tokenizer.json', replaced(TOKENIZER_JSON, ('model', 'vocab', 'b'), 100), 'ids up to 100'),
    ('config.json', replaced(HF_CONFIG, ('nanokv', 'n_layer'), 9_999), 'n_layer'),
    ('chat.json', replaced(CHAT, ('turns', 0, 'ids'), [-1]), 'other tokens'),
    ('chat.json', replaced(CHAT, ('turns', 0, 'ids'), [float('inf')]), 'infinity'),
], ids=lambda x: None if isinstance(x, dict) else x)
def test_small_files_that_hang_or_exhaust(tmp_path, name, document, words):
    write(tmp_path, name, document)
    assert words in limited(lambda folder: outcome(folder, name), tmp_path)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """In the tensors, the pickle, or the headers of the zip file."""
    path, x = tmp_path / 'a.pt', torch.arange(9.0)
    torch.save({'x': x, 'n': 3}, path)
    data, refused = path.read_bytes(), 0
    bits = [(i, i % 8) for i in range(0, len(data), 3)]
    bits += [(i + 38, 4) for i in range(len(data)) if data[i:i + 4] == b'PK\1\2']  # a directory
    for i, bit in bits:
        path.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1:])
        try:
            saved = read_file(path)
        except Exception:
            refused += 1
            continue
        assert saved.keys() == {'x', 'n'} and saved['n'] == 3 and torch.equal(saved['x'], x), i
    assert refused > len(bits) / 4


@pytest.mark.parametrize('damaged, message', [
    ({}, ''), ({'version': b'4\n'}, 'version in it is not what was written')])
def test_sums_are_compared_if_there_are_any(tmp_path, damaged, message):
    options = torch.serialization
    try:
        options.set_crc32_options(bool(damaged))
        torch.save(CHECKPOINT, tmp_path / 'ckpt.pt')
    finally:
        options.set_crc32_options(True)
    data = (tmp_path / 'ckpt.pt').read_bytes()
    assert data.count(b'3\n') == 1
    for contents in damaged.values():
        (tmp_path / 'ckpt.pt').write_bytes(data.replace(b'3\n', contents))
    got = outcome(tmp_path, 'ckpt.pt')
    assert message in got and bool(message) == bool(got)


@pytest.mark.parametrize('opened, name', [
    *((name, name) for name in FILES), ('config.json', 'model.safetensors')])
def test_a_fifo_is_refused(tmp_path, opened, name):
    write(tmp_path, opened, FILES[opened][2])
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert name in limited(lambda folder: outcome(folder, opened), tmp_path)


@pytest.mark.parametrize('terminal', [True, False])
def test_escapes_of_a_vocabulary_reach_files_but_no_terminal(tmp_path, monkeypatch, capsys,
                                                             terminal):
    """The model draws escape sequences, which would change the title. So may a refusal, which
    names the folder."""
    meta = meta_of('a\x1b]0;\x07\x9b\u202e')
    write(tmp_path, 'ckpt.pt', {**CHECKPOINT, 'meta': meta, 'tokens': tokens_id(meta)})
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: terminal)
    sample.main([str(tmp_path), *flags(dict(device='cpu', start='a', max_new_tokens=60,
                                            temperature=9.0, num_samples=2, report=False))])
    out = capsys.readouterr().out
    assert {'\x1b', '\x9b', '\u202e'} & set(out) == (set() if terminal else {'\x1b', '\x9b',
                                                                           '\u202e'})
    assert terminal == all(escaped in out for escaped in ('\\x1b', '\\x9b', '\\u202e'))
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: terminal)
    with pytest.raises(SystemExit):
        run_program(lambda: sample.main(['--out_dir=\x1b]0;title\x07']))
    assert ('\x1b' in capsys.readouterr().err) != terminal
