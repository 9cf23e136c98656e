"""parallel='fsdp': the same losses as one process; checkpoints for any number of processes."""
import shutil

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from config.errors import UserError
from tests.helpers.mechanisms import CHANGES
from tests.programs.support import FULL_STACK, VANILLA, load, metrics, run_sample, run_train
from tests.programs.test_distributed import SHORT_STACK, SIX_STEPS, assert_same_losses, run
from training import checkpoint, shards
from training.checkpoint import load_checkpoint

FSDP = dict(parallel='fsdp')
STACK = dict(SHORT_STACK, bias=True)
NEAR = dict(atol=1e-5, rtol=0)


def weights_of(folder):
    return load_checkpoint(folder / 'ckpt.pt')['model']


@pytest.fixture(scope='module')
def sharded(tmp_path_factory, data_root):
    """(folder, output) of a run with two processes. Read-only: tests copy it."""
    folder = tmp_path_factory.mktemp('sharded')
    printed = run(data_root, 2, folder / 'out', STACK, **SIX_STEPS, **FSDP)
    return folder / 'out', printed


def test_two_processes_have_the_losses_of_one(tmp_path, sharded):
    run_train(tmp_path, STACK, **SIX_STEPS)
    folder, printed = sharded
    one, two = metrics(tmp_path), metrics(folder)
    assert_same_losses(one, two)
    torch.testing.assert_close(weights_of(folder), weights_of(tmp_path), **NEAR)
    norms = [row['grad_norm'] for row in one]
    assert norms == pytest.approx([row['grad_norm'] for row in two], rel=1e-4)
    assert printed.count('step 0:') == 1


@pytest.mark.slow
@pytest.mark.parametrize('config, more', [
    (VANILLA, {}), (STACK, dict(chunked_loss=False, grad_clip=0.0)),
    (STACK, dict(optimizer='muon')), (STACK, dict(dtype='bfloat16')),
    (FULL_STACK | CHANGES['many'], dict(optimizer='muon')),
    *((STACK, dict(recompute=policy)) for policy in (
        'selective', 'mlp', 'block', 'every:3', 'sqrt', 'offload'))], ids=str)
def test_four_processes_have_the_losses_of_one(tmp_path, data_root, config, more):
    run_train(tmp_path / 'one', config, **SIX_STEPS | more)
    run(data_root, 4, tmp_path / 'four', config, **SIX_STEPS | FSDP | more)
    one, four = (metrics(tmp_path / name) for name in ('one', 'four'))
    if more.keys() & {'optimizer', 'dtype'}:
        # these round, so a small difference can grow
        expected = [pytest.approx(row['loss'], abs=1e-3) for row in one]
        assert [row['loss'] for row in four] == expected and len(one) == 6
    else:
        assert_same_losses(one, four)


@pytest.mark.slow
@pytest.mark.parametrize('counts', [(2, 4, 1), (1, 4, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, data_root, counts):
    """Shards of two processes are read by four and by one; a full checkpoint by several."""
    run_train(tmp_path / 'whole', STACK, **SIX_STEPS)
    parts, each = tmp_path / 'parts', 6 // len(counts)
    for k, n in enumerate(counts):
        max_iters = 5 if k == len(counts) - 1 else each * (k + 1)
        more = FSDP | dict(max_iters=max_iters, init_from='resume' if k else 'scratch')
        run(data_root, n, parts, STACK, **SIX_STEPS | more)
        saved = load(parts / 'ckpt.pt')
        assert ('shards' in saved) == (n > 1) and bool(saved['model']) == (n == 1)
        used = [load(path).get('shards') for path in parts.glob('ckpt*.pt')]
        assert {path.name for path in parts.glob('shards_*')} == {
            each['folder'] for each in used if each}
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(parts))
    torch.testing.assert_close(weights_of(parts), weights_of(tmp_path / 'whole'), **NEAR)


@pytest.fixture
def out(sharded, tmp_path):
    return shutil.copytree(sharded[0], tmp_path / 'out')


def test_shards_become_one_file_and_back(out, tmp_path, capsys):
    whole_path, again_path = tmp_path / 'whole' / 'ckpt.pt', tmp_path / 'again' / 'ckpt.pt'
    shards.main([str(out / 'ckpt.pt'), str(whole_path)])
    shards.main([str(whole_path), str(again_path), '--to=shards'])
    whole, read = load(whole_path), load_checkpoint(again_path)
    assert 'shards' not in whole and 'shards' in load(again_path)
    for part in ('model', 'optimizer'):
        torch.testing.assert_close(whole[part], read[part], rtol=0, atol=0)
    assert 'KV cache' in run_sample(capsys, out_dir=out)
    with pytest.raises(UserError, match='is there already'):
        shards.main([str(out / 'ckpt.pt'), str(whole_path)])


@pytest.mark.parametrize('damage', ['missing', 'short', 'changed', 'exchanged'])
def test_a_damaged_shard_is_named(out, damage):
    saved = load(out / 'ckpt.pt')
    first, second = sorted((out / saved['shards']['folder']).iterdir())
    named = second
    if damage == 'missing':
        second.unlink()
    elif damage == 'short':
        second.write_bytes(second.read_bytes()[:-8])
    elif damage == 'changed':
        second.write_bytes(b'\xff' * 8 + second.read_bytes()[8:])
        named = second.parent
    else:
        shutil.copy(first, second)
        saved['shards']['files'][second.name] = second.stat().st_size
        torch.save(saved, out / 'ckpt.pt')
        named = out
    with pytest.raises(UserError) as caught:
        run_train(out, STACK, **SIX_STEPS | dict(max_iters=8, init_from='resume'))
    assert str(named) in str(caught.value) and '\n' not in str(caught.value)


def test_shards_that_a_copy_names_stay(out, tmp_path):
    saved = load(out / 'ckpt.pt')
    folder = out / saved['shards']['folder']
    run = folder.name.removeprefix('shards_').rpartition('_')[0].rpartition('_')[0]
    (out / 'ckpt.pt').rename(out / 'good.pt')
    shutil.copytree(folder, out / f'shards_{run}_0000001_00000000')
    checkpoint.delete_unused_shards(out, run)
    assert [path.name for path in out.glob('shards_*')] == [folder.name]


@pytest.mark.parametrize('error', [ZeroDivisionError(), CheckpointException('full', {})])
def test_a_checkpoint_that_cannot_be_written_leaves_no_shards(tmp_path, monkeypatch, error):
    """CheckpointException derives from BaseException."""
    def save(*args, **kwargs):
        (tmp_path / 'part').mkdir()
        raise error
    monkeypatch.setattr('torch.distributed.checkpoint.save', save)
    with pytest.raises(UserError, match='cannot write checkpoint'):
        checkpoint.write_shards(tmp_path / 'part', {'x': torch.zeros(3)}, {'state': {}})
    assert not (tmp_path / 'part').exists()


@pytest.mark.parametrize('name, value', dict(
    dtype='float16', recompute='auto', memory_report=True).items())
def test_settings_that_exclude_it(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}={value!r}.* not go with *parallel='fsdp'"):
        run_train(tmp_path, parallel='fsdp', **{name: value})
