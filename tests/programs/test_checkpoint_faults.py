"""Checkpoints that cannot be written: one clear error, the previous one intact, no files left."""
import contextlib
import os
import signal
import stat

import numpy as np
import pytest
import torch

from common.errors import UserError
from tests.programs.support import Died, contents, kept, no_links, run_train
from model import GPT, GPTConfig
from training.checkpoint.file import link_or_copy, load_checkpoint, load_weights, save_checkpoint

resource = pytest.importorskip('resource')  # not on Windows


@contextlib.contextmanager
def size_limit(n):
    """Limit files of this process to n bytes, as on a full disk. Not a fixture: pytest reports
    before fixtures end, and its report may go to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def written(tmp_path):
    """`written(weights, **changes)` writes a checkpoint and returns its path; `written.model` has
    the weights that it should have."""
    def write(weights, **changes):
        rest = dict(model_args={}, iter_num=0, best_val_loss=1.0, config={}) | changes
        torch.save({'model': weights, **rest}, tmp_path / 'ckpt.pt')
        return tmp_path / 'ckpt.pt'
    write.model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=12,
                                bias=True))
    return write


HEAD, MASK = 'lm_head.weight', 'transformer.h.0.attn.bias'


@pytest.mark.parametrize('changes, message', [
    ({MASK: torch.ones(16)}, MASK),
    ({f'module.{HEAD}': torch.ones(12, 16)}, f'{HEAD} twice, also as module.{HEAD}'),
    ({HEAD: torch.ones(12, 16)}, f'{HEAD}.* differs from its embedding'),
    *(({HEAD: torch.ones(12, 16, dtype=dtype)}, f'{HEAD} is stored as {dtype}: allowed are torch')
      for dtype in (torch.complex64, torch.bool, torch.int64)),
    ({HEAD: torch.ones(12, 16).to_sparse()}, 'sparse')], ids=str)
def test_no_weight_is_dropped_or_replaced(written, changes, message):
    path = written(written.model.state_dict() | changes)
    with pytest.raises(UserError, match=message):
        load_weights(written.model, load_checkpoint(path), path)


def test_masks_are_dropped_and_an_output_layer_may_be_its_embedding(written):
    weights = written.model.state_dict()
    path = written(weights | {MASK: torch.ones(1, 1, 16, 16)})
    assert load_checkpoint(path)['model'].keys() == weights.keys()  # c_attn.bias is a parameter
    embedding = weights.pop(HEAD)
    embedding[0, 0] = torch.nan  # of a run that diverged
    for head in ({HEAD: embedding.clone()}, {}):
        path = written(weights | head)
        load_weights(written.model, load_checkpoint(path), path)


@pytest.mark.parametrize('changes, message', [
    ({'best_val_loss': np.float64(1)}, r'object \(numpy.*scalar\).*best_val_loss.item\(\)$'),
    ({'shards': {'folder': 'shards_a', 'files': {}}},
     '^checkpoint .*ckpt.pt is in shards; commit 461914ad has `python -m training.shards`'),
    *(({'run': run}, 'invalid run') for run in (
        '*/../*', '../' + 'a' * 29, '', 'A' * 32, 'a' * 33, 7, ['a' * 32]))], ids=str)
def test_what_is_not_plain_is_refused(written, changes, message):
    with pytest.raises(UserError, match=message):
        load_checkpoint(written({}, **changes))


def test_a_disk_that_fills_up_ends_the_run_with_what_it_has(tmp_path, at_step, val_losses, capsys):
    """The best is not renamed before the new one is complete. torch's own error message is about
    positions in the file."""
    val_losses[6] = 1.0
    settings = dict(eval_interval=2)
    with contextlib.ExitStack() as stack:
        at_step(7, lambda: stack.enter_context(size_limit(30_000)))  # room for the metrics
        with pytest.raises(UserError) as caught:
            run_train(tmp_path, **settings)
    assert str(caught.value) == (
        f'cannot write checkpoint {tmp_path}/ckpt.pt: [Errno 27] File too large; '
        'that of iteration 6 is kept, go on with --init_from=resume')
    assert kept(tmp_path) == {'ckpt.pt': 6}
    assert contents(tmp_path).keys() == {'ckpt.pt', 'metrics.jsonl'}
    assert run_train(tmp_path, init_from='resume', max_iters=9).rows[-1]['iter'] == 9


def test_two_interrupts_while_writing_leave_the_previous_checkpoint(tmp_path, monkeypatch):
    run = run_train(tmp_path, max_iters=4)
    before = run.path.read_bytes()

    def interrupted(checkpoint, f):
        f.write(b'half a checkpo')
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(torch, 'save', interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_train(tmp_path, init_from='resume', max_iters=9)
    assert signal.getsignal(signal.SIGINT) is handler
    assert run.path.read_bytes() == before
    assert contents(tmp_path).keys() == {'ckpt.pt', 'metrics.jsonl'}


# -- on disk at every moment -----------------------------------------------------------------------

@pytest.mark.parametrize('copied', [False, True], ids=['saved', 'copied'])
def test_a_file_is_on_disk_before_the_rename_and_the_rename_after_it(
        tmp_path, monkeypatch, recorded, interrupt, copied):
    events = []

    def synced(number):
        status = os.fstat(number)
        events.append('folder' if stat.S_ISDIR(status.st_mode) else status.st_size)
    (tmp_path / 'a').write_bytes(bytes(range(256)) * 5000)
    (tmp_path / 'b').write_text('the previous one')
    monkeypatch.setattr(os, 'link', no_links)
    recorded(os, 'fsync', synced)
    recorded(os, 'replace', lambda *names: events.append('rename'))
    if copied:
        interrupt('os.fsync', {1: 'before'}.get, OSError(28, 'No space left on device'))
        with pytest.raises(OSError, match='No space left'):
            link_or_copy(tmp_path / 'a', tmp_path / 'b')
        assert contents(tmp_path)['b'] == b'the previous one'
        assert contents(tmp_path).keys() == {'a', 'b'}
        link_or_copy(tmp_path / 'a', tmp_path / 'b')
        assert contents(tmp_path)['b'] == contents(tmp_path)['a']
        assert not (tmp_path / 'b').samefile(tmp_path / 'a')
    else:
        save_checkpoint(tmp_path / 'b', {'a': 1})
    assert events == [(tmp_path / 'b').stat().st_size, 'rename', 'folder']
    assert contents(tmp_path).keys() == {'a', 'b'}


@pytest.mark.parametrize('at, links', [*((at, True) for at in range(6)), (5, False)])
def test_killed_at_any_rename_there_is_a_checkpoint_to_resume_from(
        tmp_path, monkeypatch, interrupt, val_losses, at, links):
    val_losses[4] = 1.0
    settings = dict(eval_interval=2, max_iters=8)
    run_train(tmp_path, **settings | dict(max_iters=2))
    interrupt('os.replace', {at + 1: 'before'}.get, Died)
    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, 'link', no_links)
        with pytest.raises(Died):
            run_train(tmp_path, **settings, init_from='resume')
    load_checkpoint(tmp_path / 'ckpt.pt')
    run_train(tmp_path, **settings, init_from='resume')
    assert kept(tmp_path) == {'ckpt.pt': 8, 'ckpt_best.pt': 4}


def test_half_written_files_of_a_killed_run_go_with_the_next_save(tmp_path, monkeypatch):
    def no_folders(*_):
        raise PermissionError('a folder')
    monkeypatch.setattr(os, 'open', no_folders)  # as on Windows: the folder is not synced
    for name in ('.ckpt.pt.99.tmp', '.ckpt_best.pt.99.tmp'):
        (tmp_path / name).write_bytes(b'half')
    (tmp_path / '.other.pt.99.tmp').write_bytes(b'not ours')
    save_checkpoint(tmp_path / 'ckpt.pt', {'a': 1})
    for _ in range(2):
        link_or_copy(tmp_path / 'ckpt.pt', tmp_path / 'b')
    assert contents(tmp_path).keys() == {'ckpt.pt', 'b', '.other.pt.99.tmp'}
    assert torch.load(tmp_path / 'b') == {'a': 1} and (tmp_path / 'b').samefile(
        tmp_path / 'ckpt.pt')
