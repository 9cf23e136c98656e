"""Streamed datasets that are interrupted, killed, resumed, or resumed with other settings."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from config.errors import UserError
from data.datasets import DATA_ROOT
from data.making import journal, stream
from data.making.stream import batches
from data.making.writer import write_dataset
from tests.data.making.support import contents, fake_hub


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
    assert not (tmp_path / 'out').exists()


PROGRAM = """
import signal, sys
sys.path.insert(0, {root!r})
from data import gpt2_bpe
from data.making import journal, stream
from configurator import run_program
if __name__ == '__main__':
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored, as after `nohup`
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
