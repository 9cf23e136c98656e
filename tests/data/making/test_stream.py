"""Streamed datasets: documents in order whatever the number of processes, a split by hash, shards, and resuming."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pyarrow.parquet
import pytest

from config.errors import UserError
from data.datasets import DATA_ROOT, ensure_dataset
from data.making import journal, stream
from data.making.stream import batches, encode_batch, encoded, file_documents, held_out, hub_documents
from data.making.writer import write_dataset
from data.tokenfiles import open_split

DOCUMENTS = [f'the document number {i}, ' * (1 + i % 5) for i in range(400)]


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / 'dump.jsonl'
    path.write_text(''.join(json.dumps({'text': text, 'id': i}) + '\n' for i, text in enumerate(DOCUMENTS)))
    return path


@pytest.fixture
def run(load_prepare, tiny, dump, tmp_path):
    """Prepare from the dump in this process; returns a function from options to the folder's {file: bytes}."""
    def run(*argv, name='openwebtext', source=dump):
        out = tmp_path / 'out'
        given = ['--from', str(source)] if source else []
        load_prepare(name).main([*given, f'--out={out}', '--workers=1', '--val=0.1', *argv])
        return contents(out)
    return run


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != '.prepare.lock'}


def expected(tiny, share=0.1):
    splits = {'train': [], 'val': []}
    for text in DOCUMENTS:
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'big')
        splits['val' if digest / 2**64 < share else 'train'] += tiny.encode_ordinary(text) + [260]
    return splits


def test_documents_in_order_each_with_its_end(run, tiny, tmp_path, capsys):
    files = run('--shard_tokens=3000')
    splits = expected(tiny)
    shards = -(-len(splits['train']) // 3000)
    assert sorted(files) == [f'train_{i:05d}.bin' for i in range(shards)] + ['val.bin'] and shards > 2
    for name, ids in splits.items():
        assert open_split(tmp_path / 'out', name).window(0, len(ids)).tolist() == ids
    captured = capsys.readouterr()
    assert captured.out == f'train has {len(splits["train"]):,} tokens\nval has {len(splits["val"]):,} tokens\n'
    assert 'MB of text' in captured.err and 'tokens/s' in captured.err


def test_max_tokens_is_exact(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(batches, '__defaults__', (500,))
    files = run('--max_tokens=5_000', '--shard_tokens=2_000', name='fineweb_edu')
    assert [len(files[f'train_{i:05d}.bin']) for i in range(3)] == [4000, 4000, 2000]
    assert open_split(tmp_path / 'out', 'train').window(0, 5000).tolist() == expected(tiny)['train'][:5000]
    assert len(files['val.bin']) // 2 < len(expected(tiny)['val'])


def test_processes_keep_the_order_and_read_no_further_than_needed(tiny):
    taken = []

    def source():
        for i in range(12):
            taken.append(i)
            yield [f'document {i}'] * 3

    results = encoded(source(), tiny, 0.1, workers=2)
    first = next(results)
    assert len(taken) == 4, 'two batches a process are on their way, no more'
    found = [first, *results]
    one_by_one = list(encoded(source(), tiny, 0.1, workers=1))
    assert [(r.train.tolist(), r.val.tolist(), r.documents, r.nbytes) for r in found] == [
        (r.train.tolist(), r.val.tolist(), r.documents, r.nbytes) for r in one_by_one]
    assert multiprocessing.active_children() == []


def test_batches_hold_all_documents():
    found = list(batches(iter(DOCUMENTS), 300))
    assert [text for batch in found for text in batch] == DOCUMENTS
    assert all(300 <= sum(map(len, batch)) < 300 + max(map(len, DOCUMENTS)) for batch in found[:-1])
    assert list(batches([])) == [] and len(list(batches([''] * 10, 3))) == 4


def test_the_split_is_a_matter_of_the_text_alone():
    held = [held_out(str(i).encode(), 0.1) for i in range(20_000)]
    assert 0.09 < np.mean(held) < 0.11
    assert all(held_out(str(i).encode(), 0.3) for i in range(20_000) if held[i]), 'a larger share holds out more, not others'


def test_empty_documents_give_no_tokens(tiny):
    tokens = encode_batch(['', 'a', ''], tiny, 1e-9)
    assert tokens.train.tolist() == [97, 260] and tokens.val.size == 0 and tokens.documents == 3 and tokens.nbytes == 1


def interrupt_after(monkeypatch, n, error=KeyboardInterrupt):
    """Make the source of documents end in an exception after n of them."""
    real = stream.file_documents

    def broken(files, skip=0):
        for i, text in enumerate(real(files, skip), skip):
            if i == n:
                raise error
            yield text

    monkeypatch.setattr(stream, 'file_documents', broken)
    return lambda: monkeypatch.setattr(stream, 'file_documents', real)


@pytest.mark.parametrize('n', [70, 399])
@pytest.mark.parametrize('shard_tokens', [700, 3000, 10**6])
def test_interrupted_and_resumed_is_byte_for_byte_the_same(run, monkeypatch, tmp_path, capsys, n, shard_tokens):
    monkeypatch.setattr(batches, '__defaults__', (500,))
    monkeypatch.setattr(stream, 'CHECKPOINT', 1000)
    options = [f'--shard_tokens={shard_tokens}', '--max_tokens=30_000']
    whole = run(*options)
    for path in (tmp_path / 'out').iterdir():
        path.unlink()
    mend = interrupt_after(monkeypatch, n)
    with pytest.raises(KeyboardInterrupt):
        run(*options)
    assert all(name.endswith('.tmp') for name in contents(tmp_path / 'out')) and contents(tmp_path / 'out')
    assert 'the same command goes on' in capsys.readouterr().err
    mend()
    asked = []
    real = stream.file_documents
    monkeypatch.setattr(stream, 'file_documents', lambda files, skip: asked.append(skip) or real(files, skip))
    assert run(*options) == whole
    assert 0 < asked[0] <= n and f'going on after {asked[0]} documents' in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch):
    """Small batches and frequent checkpoints."""
    monkeypatch.setattr(batches, '__defaults__', (500,))
    monkeypatch.setattr(stream, 'CHECKPOINT', 1000)


def interrupted(run, monkeypatch, *options, n=300):
    """Press Ctrl-C at document n."""
    mend = interrupt_after(monkeypatch, n)
    with pytest.raises(KeyboardInterrupt):
        run(*options)
    mend()


@pytest.mark.parametrize('options, words', [
    (['--shard_tokens=4000'], ['shard_tokens=500', 'shard_tokens=4000']), (['--val=0.2'], ['val=0.1', 'val=0.2']),
    (['--from', 'OTHER'], ['dump.jsonl', 'other.jsonl']), (['--max_tokens=900'], ['max_tokens=None', 'max_tokens=900'])])
def test_progress_of_other_settings_is_refused_not_lost(run, small, monkeypatch, tmp_path, dump, options, words):
    (tmp_path / 'other.jsonl').write_bytes(dump.read_bytes())
    options = [option.replace('OTHER', str(tmp_path / 'other.jsonl')) for option in options]
    whole = run('--shard_tokens=500')
    interrupted(run, monkeypatch, '--shard_tokens=500')
    before = contents(tmp_path / 'out')
    assert {name: before[name] for name in whole} == whole, 'the older dataset stays whole'
    with pytest.raises(UserError) as caught:
        run('--shard_tokens=500', *options)
    assert all(word in str(caught.value) for word in [*words, '--restart']) and '\n' not in str(caught.value)
    assert contents(tmp_path / 'out') == before
    with pytest.raises(UserError, match='no file'):
        run('--shard_tokens=500', '--restart', source=tmp_path / 'missing.jsonl')
    assert contents(tmp_path / 'out') == before
    result = run('--shard_tokens=500', *options, '--restart')
    assert not [name for name in result if name.endswith('.tmp')]
    for path in (tmp_path / 'out').iterdir():
        path.unlink()
    assert run('--shard_tokens=500', *options) == result


def test_a_restart_that_finds_no_documents_discards_nothing(run, small, monkeypatch, tmp_path):
    interrupted(run, monkeypatch)
    before = contents(tmp_path / 'out')

    def load_dataset(*args, **kwargs):
        raise ConnectionError('no hub')

    fake_hub(monkeypatch, load_dataset)
    with pytest.raises(UserError, match='no hub'):
        run('--restart', source=None)
    assert contents(tmp_path / 'out') == before


def test_another_writer_refuses_the_progress_too(run, small, monkeypatch, tmp_path):
    interrupted(run, monkeypatch)
    before = contents(tmp_path / 'out')
    with pytest.raises(UserError, match='progress of another preparation'):
        write_dataset(tmp_path / 'out', {'train': np.array([1])}, None)
    assert contents(tmp_path / 'out') == before


@pytest.mark.parametrize('first, second', [(['--max_tokens=6_000'], ['--max_tokens=8_000']), (['--max_tokens=8_000'], []),
                                           ([], ['--max_tokens=8_000'])])
def test_max_tokens_may_change_between_resumes(run, small, monkeypatch, tmp_path, capsys, first, second):
    whole = run(*second)
    for path in (tmp_path / 'out').iterdir():
        path.unlink()
    interrupted(run, monkeypatch, *first, n=80)
    assert run(*second) == whole and 'going on after' in capsys.readouterr().err


@pytest.mark.parametrize('grow', [True, False])
def test_a_file_that_changed_its_size_is_another_source(run, small, monkeypatch, tmp_path, dump, grow):
    interrupted(run, monkeypatch)
    before, text = contents(tmp_path / 'out'), dump.read_text()
    dump.write_text(text + text if grow else text[:len(text) // 2])
    with pytest.raises(UserError, match=f'source=.*{len(text)}.*--restart'):
        run()
    assert contents(tmp_path / 'out') == before


@pytest.mark.parametrize('kill', [False, True])
@pytest.mark.parametrize('name', ['replace', 'unlink'])
def test_interrupted_while_it_is_published(run, small, monkeypatch, tmp_path, capsys, kill, name):
    """Ctrl-C comes too late; after a kill the same command finishes the work without reading a document."""
    options = ['--shard_tokens=2000', '--max_tokens=5_000']
    whole = run(*options)
    shutil.rmtree(tmp_path / 'out')

    class Kill(BaseException):
        pass

    begun = []
    for number in range(1, 20):
        with pytest.MonkeyPatch.context() as patch:
            real, calls = getattr(os, name), []

            def at(path, *args, real=real, calls=calls, number=number):
                if 'publish' in journal.read_state(tmp_path / 'out'):
                    calls.append(path)
                    if len(calls) == number:
                        begun.append(number)
                        raise Kill if kill else KeyboardInterrupt
                return real(path, *args)

            patch.setattr(os, name, at)
            try:
                assert run(*options) == whole
            except KeyboardInterrupt:
                assert not kill and contents(tmp_path / 'out') == whole
            except Kill:
                patch.undo()
                capsys.readouterr()
                with pytest.MonkeyPatch.context() as second:
                    second.setattr(stream, 'write', None)
                    assert run(*options) == whole
                assert 'finished what was interrupted' in capsys.readouterr().err
        shutil.rmtree(tmp_path / 'out')
        if number not in begun:
            break
    assert begun == list(range(1, len(begun) + 1)) and len(begun) >= (len(whole) if name == 'replace' else 1)


def test_published_by_another_command_first_then_its_own(run, small, monkeypatch, tmp_path):
    whole = run('--shard_tokens=4000', '--max_tokens=9_000')
    real = journal.finish

    def broken(folder):
        if journal.read_state(folder):
            raise OSError(5, 'Input/output error')
        return real(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, 'finish', broken)
        with pytest.raises(UserError, match='Input/output error; run the same command again'):
            run('--shard_tokens=4000')
    interrupted(run, monkeypatch, '--shard_tokens=500', n=5)  # without a checkpoint
    everything = contents(tmp_path / 'out')
    assert len(everything) > len(whole) and not [name for name in everything if name.endswith('.tmp')]
    assert run('--shard_tokens=4000') == everything


def test_the_lock_is_held_from_the_first_document_to_the_last(run, monkeypatch, tmp_path):
    seen, real = [], stream.file_documents

    def watch(files, skip):
        for text in real(files, skip):
            with open(tmp_path / 'out' / '.prepare.lock') as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.append('locked')
            yield text

    monkeypatch.setattr(stream, 'file_documents', watch)
    run()
    assert seen == ['locked'] * 400


def edit(state, **changes):
    state.write_text(json.dumps({**json.loads(state.read_text()), **changes}))


@pytest.mark.parametrize('damage', [
    lambda out: (out / '.state.tmp').write_text('{'), lambda out: (out / '.state.tmp').write_text('[]'),
    lambda out: edit(out / '.state.tmp', tokens={'train': 'x'}), lambda out: edit(out / '.state.tmp', documents=None),
    lambda out: (out / '.train_00000.bin.tmp').write_bytes(b'ab'), lambda out: (out / '.val.bin.tmp').unlink()])
def test_damaged_progress_starts_afresh(run, monkeypatch, tmp_path, damage):
    monkeypatch.setattr(batches, '__defaults__', (500,))
    monkeypatch.setattr(stream, 'CHECKPOINT', 1000)
    mend = interrupt_after(monkeypatch, 300)
    with pytest.raises(KeyboardInterrupt):
        run('--shard_tokens=4000')
    mend()
    damage(tmp_path / 'out')
    files = run('--shard_tokens=4000', '--max_tokens=20_000')
    assert not [name for name in files if name.endswith('.tmp')]
    for path in (tmp_path / 'out').iterdir():
        path.unlink()
    assert run('--shard_tokens=4000', '--max_tokens=20_000') == files


def test_without_a_checkpoint_an_interruption_leaves_nothing(run, monkeypatch, tmp_path):
    interrupt_after(monkeypatch, 300)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert contents(tmp_path / 'out') == {}


@pytest.mark.parametrize('name, content, words', [
    ('x.jsonl', '{"text": "a"}\n{"tex": "b"}\n', 'line 2'), ('x.jsonl', '{"text": "a"}\n[1]\n', 'line 2'),
    ('x.jsonl', 'garbage', 'line 1'), ('x.jsonl', '{"text": 5}', 'line 1'), ('x.csv', 'a', r'\.jsonl, \.txt and \.parquet'),
    ('x.jsonl', None, 'no file'), ('x.txt', b'\xff\xfe', 'not UTF-8'), ('x.txt', '', 'none of 0 documents is for train'),
    ('x.txt', 'one\n', 'none of 1 documents is for val'),
])
def test_bad_dumps(run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words) as caught:
        run(source=tmp_path / name)
    assert '\n' not in str(caught.value)
    if (tmp_path / 'out').exists():
        assert contents(tmp_path / 'out') == {} and content is not None and name != 'x.csv'


@pytest.mark.parametrize('option', ['--val=0', '--val=2', '--max_tokens=0', '--shard_tokens=-5', '--workers=0', '--workers=x',
                                    '--max_tokens=1.5', '--sample=x'])
def test_bad_options(run, tmp_path, option):
    with pytest.raises(UserError, match=option.partition('=')[0]):
        run(option)
    assert not (tmp_path / 'out').exists()


def test_documents_of_text_files_are_lines(tmp_path):
    (tmp_path / 'a.txt').write_bytes('\ufeffone\r\n\r\nthrée\u2028x'.encode())
    (tmp_path / 'b.jsonl').write_text('{"text": "four\\nlines"}\n\n{"text": "five"}')
    files = [tmp_path / 'a.txt', tmp_path / 'b.jsonl']
    documents = ['one', '', 'thrée\u2028x', 'four\nlines', 'five']
    assert [list(file_documents(files, skip)) for skip in range(7)] == [documents[skip:] for skip in range(7)]


class Rows(list):
    def skip(self, n):
        return Rows(self[n:])


def fake_hub(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=load_dataset, __version__='4.0.0'))


@pytest.mark.parametrize('name, config, sample', [('openwebtext', None, []), ('fineweb_edu', 'sample-10BT', []),
                                                  ('fineweb_edu', 'CC', ['--sample=CC'])])
def test_the_hub_is_streamed(run, monkeypatch, dump, tmp_path, name, config, sample):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return Rows({'text': text} for text in DOCUMENTS)

    fake_hub(monkeypatch, load_dataset)
    files = run(*sample, name=name, source=None)
    path = {'openwebtext': 'Skylion007/openwebtext', 'fineweb_edu': 'HuggingFaceFW/fineweb-edu'}[name]
    assert calls == [((path, config), {'split': 'train', 'streaming': True})]
    assert run() == files, 'the same documents from a file'


def test_hub_datasets_with_scripts_are_asked_for_as_parquet(monkeypatch):
    def load_dataset(*args, revision=None, **kwargs):
        if revision is None:
            raise RuntimeError('Dataset scripts are no longer supported, but found x.py')
        return Rows([{'text': revision}, {'text': None}, {'text': 'b'}])

    fake_hub(monkeypatch, load_dataset)
    assert list(hub_documents('x/y')) == ['refs/convert/parquet', '', 'b'] and list(hub_documents('x/y', skip=1)) == ['', 'b']


@pytest.mark.parametrize('error, words', [
    (ConnectionError("Couldn't reach\nthe Hub"), "x/y.*hub: ConnectionError: Couldn't reach the Hub"),
    (FileNotFoundError(), 'FileNotFoundError: no reason given'), (KeyError('text'), "no column 'text'")])
def test_hub_that_fails_is_one_line(monkeypatch, error, words):
    def load_dataset(*args, **kwargs):
        raise error

    fake_hub(monkeypatch, load_dataset)
    with pytest.raises(UserError, match=words) as caught:
        list(hub_documents('x/y', 'config'))
    assert '\n' not in str(caught.value)


def test_without_the_package_datasets(monkeypatch, run, tmp_path):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    for source in (None, tmp_path / 'dump.parquet'):
        (tmp_path / 'dump.parquet').write_bytes(b'')
        with pytest.raises(UserError, match="pip install 'datasets>=4'"):
            run(source=source)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('version', ['2.18.0', '3.6.0', '0.0.1.dev0', 'unknown'])
def test_an_old_package_datasets_is_refused(monkeypatch, run, tmp_path, version):
    """Versions before 4 run programs that lie in the hub's repositories, or ask on the terminal whether they may."""
    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=None, __version__=version))
    with pytest.raises(UserError, match=f"{version} is installed.*pip install -U 'datasets>=4'"):
        run(source=None)
    with pytest.raises(UserError, match=version):
        list(hub_documents('x/y'))
    assert not (tmp_path / 'out').exists()


def test_parquet_and_json_through_the_real_package(tmp_path, dump):
    pyarrow.parquet.write_table(pyarrow.table({'text': DOCUMENTS, 'id': range(400)}), tmp_path / 'dump.parquet')
    assert list(hub_documents('json', data_files=str(dump))) == DOCUMENTS
    assert list(file_documents([tmp_path / 'dump.parquet'], 7)) == DOCUMENTS[7:]


def test_training_does_not_start_it(tmp_path):
    for name in ('openwebtext', 'fineweb_edu'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'prepare.py').write_text((DATA_ROOT / name / 'prepare.py').read_text())
        with pytest.raises(UserError, match=f'billion tokens.*python .*/{name}/prepare.py'):
            ensure_dataset(name, tmp_path)


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from data import gpt2_bpe
from data.making import journal, stream
from configurator import run_program
if __name__ == '__main__':
    encoding = gpt2_bpe.encoding_of(open('tiny.tiktoken', 'rb').read())
    stream.gpt2_encoding = lambda: encoding
    stream.CHECKPOINT = 1000
    stream.batches.__defaults__ = (500,)
    real = stream.file_documents
    def slow(files, skip):
        import time
        for i, text in enumerate(real(files, skip)):
            time.sleep(0.01)
            yield text
    stream.file_documents = slow
    args = stream.arguments('', __file__).parse_args(['--from', 'dump.jsonl', '--workers=2', '--val=0.1', '--out=out'])
    run_program(lambda: stream.prepare(args, 'x/y'))
"""


@pytest.mark.parametrize('kill', [False, True])
def test_the_end_of_one_process_ends_all_and_keeps_the_progress(tmp_path, dump, tiny_ranks, kill):
    (tmp_path / 'tiny.tiktoken').write_bytes(tiny_ranks)
    (tmp_path / 'program.py').write_text(PROGRAM.format(root=str(DATA_ROOT.parent)))
    process = subprocess.Popen([sys.executable, 'program.py'], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    state = tmp_path / 'out' / '.state.tmp'
    for _ in range(600):
        if state.exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    if kill:
        process.kill()
        process.communicate(timeout=60)
    else:
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C, as the terminal does it: to the workers too
        err = process.communicate(timeout=60)[1]
        assert process.returncode == 130 and err.rstrip().endswith('interrupted') and 'Traceback' not in err, err
    assert state.exists() and not (tmp_path / 'out' / 'train_00000.bin').exists()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # multiprocessing's own helper ends a moment after its parent
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def test_ctrl_c_while_processes_start_is_no_traceback(tmp_path, dump, tiny_ranks):
    (tmp_path / 'tiny.tiktoken').write_bytes(tiny_ranks)
    slow_start = "import time\nif __name__ != '__main__':\n    open('starting', 'w').close()\n    time.sleep(1)\n"
    (tmp_path / 'program.py').write_text(slow_start + PROGRAM.format(root=str(DATA_ROOT.parent)))
    process = subprocess.Popen([sys.executable, 'program.py'], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    for _ in range(600):
        if (tmp_path / 'starting').exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and err == 'interrupted\n'
