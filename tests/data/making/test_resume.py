"""Streamed datasets that are interrupted, killed, resumed, or resumed with other settings."""

import json
import shutil

import numpy as np
import pytest

from config.errors import UserError
from data.making import stream
from data.making.writer import TokenWriter, write_dataset
from tests.data.support import contents, fake_hub, ids_of


def interrupt(run, *options, n=300):
    """Press Ctrl-C at document n."""
    real = stream.file_documents

    def broken(files, skip=0):
        for i, text in enumerate(real(files, skip), skip):
            if i == n:
                raise KeyboardInterrupt
            yield text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, 'file_documents', broken)
        with pytest.raises(KeyboardInterrupt):
            run(*options)


@pytest.fixture
def whole(run, small, tmp_path):
    """Return a function that prepares a dataset without interruption: its files, then removed."""
    def whole(*options):
        files = run(*options)
        shutil.rmtree(tmp_path / 'out')
        return files
    return whole


@pytest.mark.parametrize('n, shard_tokens', [(70, 700), (399, 10**6)])
def test_interrupted_and_resumed_is_byte_for_byte_the_same(run, whole, monkeypatch, tmp_path,
                                                           capsys, n, shard_tokens):
    options = [f'--shard_tokens={shard_tokens}', '--max_tokens=30_000']
    expected = whole(*options)
    interrupt(run, *options, n=n)
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['.new.tmp']
    assert 'the same command goes on' in capsys.readouterr().err
    with open(tmp_path / 'out' / '.new.tmp' / 'val.bin', 'ab') as file:
        file.write(b'a batch without a checkpoint')
    (tmp_path / 'out' / '.new.tmp' / 'train_00099.bin').write_bytes(b'a shard without a checkpoint')
    asked, real = [], stream.file_documents
    monkeypatch.setattr(stream, 'file_documents',
                        lambda files, skip: asked.append(skip) or real(files, skip))
    assert run(*options) == expected
    assert 0 < asked[0] <= n and f'going on after {asked[0]} documents' in capsys.readouterr().err


def test_progress_of_other_settings_is_refused_not_lost(run, small, monkeypatch, tmp_path, dump):
    other = tmp_path / 'other.jsonl'
    other.write_bytes(dump.read_bytes())
    older = run('--shard_tokens=500')
    interrupt(run, '--shard_tokens=500')
    before = contents(tmp_path / 'out')
    assert {name: before[name] for name in older} == older, 'the older dataset stays whole'

    def load_dataset(*args, **kwargs):
        raise ConnectionError('no hub')

    fake_hub(monkeypatch, load_dataset)
    for options, words in [
            (['--shard_tokens=4000'], 'shard_tokens=500.*shard_tokens=4000.*--restart'),
            (['--val=0.2'], 'val=0.1.*val=0.2.*--restart'),
            (['--from', str(other)], 'dump.jsonl.*other.jsonl.*--restart'),
            (['--max_tokens=900'], 'max_tokens=None.*max_tokens=900.*--restart'),
            (['--restart', '--from', str(tmp_path / 'missing.jsonl')], 'no file')]:
        with pytest.raises(UserError, match=words) as caught:
            run('--shard_tokens=500', *options)
        assert '\n' not in str(caught.value) and contents(tmp_path / 'out') == before
    with pytest.raises(UserError, match='no hub'):  # --restart finds no documents
        run('--restart', source=None)
    with pytest.raises(UserError, match='progress of another preparation'):
        write_dataset(tmp_path / 'out', {'train': np.array([1])}, None)
    dump.write_text(dump.read_text() * 2)  # a file with a different size is a different source
    with pytest.raises(UserError, match='source=.*--restart'):
        run('--shard_tokens=500')
    assert contents(tmp_path / 'out') == before
    result = run('--shard_tokens=4000', '--restart')
    assert not (tmp_path / 'out' / '.new.tmp').exists()
    shutil.rmtree(tmp_path / 'out')
    assert run('--shard_tokens=4000') == result


@pytest.mark.parametrize('first, second', [
    (['--max_tokens=6_000'], ['--max_tokens=8_000']), (['--max_tokens=8_000'], [])])
def test_max_tokens_may_change_between_resumes(run, whole, capsys, first, second):
    expected = whole(*second)
    interrupt(run, *first, n=80)
    interrupt(run, *first, n=90)
    assert run(*second) == expected and 'going on after' in capsys.readouterr().err


def edit(new, **changes):
    path = new / 'progress.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize('damage', [
    lambda new: (new / 'val.bin').unlink(),
    *[lambda new, text=text: (new / 'progress.json').write_text(text)
      for text in ('', '[' * 100_000, '[1]', '{"key": {}, "files": {}}')],
    *[lambda new, changes=changes: edit(new, **changes) for changes in (
        {'files': {'val.bin': 'x'}}, {'files': {'val.bin': -2}},
        {'files': {'../../victim.bin': 0}}, {'files': ['val.bin']}, {'key': []},
        {'documents': -1}, {'documents': 1e3}, {'complete': 1},
        {'complete': True, 'files': {}})]])
def test_damaged_progress_starts_afresh(tmp_path, capsys, damage):
    out, new = tmp_path / 'out', tmp_path / 'out' / '.new.tmp'
    with pytest.raises(KeyboardInterrupt), TokenWriter(out, key={'val': 1}) as writer:
        writer.add('train', np.array([1, 2, 3]))
        writer.add('val', np.array([4]))
        writer.checkpoint(3)
        raise KeyboardInterrupt
    (tmp_path / 'victim.bin').write_text('precious')
    damage(new)
    with TokenWriter(out, key={'val': 1}) as writer:
        assert (writer.documents, writer.tokens, list(new.iterdir())) == (0, {}, [])
        writer.add('train', np.array([5]))
    assert contents(out).keys() == {'train.bin', 'checksums.json'}
    assert ids_of(out, 'train').tolist() == [5]
    assert (tmp_path / 'victim.bin').read_text() == 'precious'
    err = capsys.readouterr().err
    assert 'is damaged: starting afresh' in err and err.count('\n') == 1


def test_without_a_checkpoint_an_interruption_leaves_nothing(run, tmp_path):
    interrupt(run)
    assert not (tmp_path / 'out').exists()


def test_a_file_of_a_preparation_that_is_a_link_is_not_truncated(run, small, tmp_path):
    interrupt(run)
    part = tmp_path / 'out' / '.new.tmp' / 'val.bin'
    victim = part.rename(tmp_path / 'victim')
    with open(victim, 'ab') as file:
        file.write(b'precious')
    part.symlink_to(victim)
    with pytest.raises(UserError, match='val.bin is a link: delete it'):
        run()
    assert victim.read_bytes().endswith(b'precious')
