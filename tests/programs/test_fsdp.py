"""train.py with parallel='fsdp': the losses of one process, and checkpoints that any number of processes goes on from."""
import shutil

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import sample
from config.errors import UserError
from tests.programs.support import FULL_STACK, VANILLA, load, metrics, run_train
from tests.programs.test_distributed import SIX_STEPS, assert_same_losses, run, start
from training import checkpoint, shards
from training.checkpoint import load_checkpoint

FSDP = dict(parallel='fsdp')
STACK = dict(FULL_STACK, bias=True)


def assert_same_state(a, b, exact=True):
    one, two = load_checkpoint(a / 'ckpt.pt'), load_checkpoint(b / 'ckpt.pt')
    gap = max((one['model'][name] - x).abs().max().item() for name, x in two['model'].items())
    assert one['model'].keys() == two['model'].keys() and gap <= (0 if exact else 1e-5)


@pytest.fixture(scope='module')
def sharded(tmp_path_factory, data_root):
    """(folder, printed): a run of two processes, for tests that copy it."""
    folder = tmp_path_factory.mktemp('sharded')
    printed = run(data_root, 2, folder / 'out', STACK, **SIX_STEPS, **FSDP)
    return folder / 'out', printed


def assert_same_run(one, several, printed):
    rows = [metrics(folder) for folder in (one, several)]
    assert_same_losses(*rows)
    assert_same_state(one, several, exact=False)
    norms = [[row['grad_norm'] for row in each] for each in rows]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and printed.count('step 0:') == 1


def test_two_processes_have_the_losses_of_one(tmp_path, sharded):
    run_train(tmp_path, STACK, **SIX_STEPS)
    assert_same_run(tmp_path, *sharded)


@pytest.mark.slow
@pytest.mark.parametrize('policy', ['none', 'selective', 'mlp', 'block', 'every:3', 'sqrt', 'offload'])
def test_recomputation_changes_no_loss(tmp_path, data_root, policy):
    settings = SIX_STEPS | dict(recompute=policy, max_iters=19, eval_interval=10, eval_iters=3)
    run_train(tmp_path / 'one', STACK, **settings)
    printed = run(data_root, 4, tmp_path / 'several', STACK, **settings, **FSDP)
    assert_same_run(tmp_path / 'one', tmp_path / 'several', printed)


@pytest.mark.slow
@pytest.mark.parametrize('config, more', [(VANILLA, {}), (STACK, dict(chunked_loss=False, grad_clip=0.0)),
                                          (STACK, dict(optimizer='muon')), (STACK, dict(int8_training=True))],
                         ids=['vanilla', 'unclipped', 'muon', 'int8'])
def test_four_processes_have_the_losses_of_one(tmp_path, data_root, config, more):
    run_train(tmp_path / 'one', config, **SIX_STEPS, **more)
    run(data_root, 4, tmp_path / 'four', config, **SIX_STEPS, **FSDP, **more)
    if more.keys() & {'optimizer', 'int8_training'}:  # Muon rounds to bfloat16 inside: what is all but the same may part
        one, four = ([row['loss'] for row in metrics(tmp_path / name)] for name in ('one', 'four'))
        assert one == pytest.approx(four, abs=1e-3)
    else:
        assert_same_losses(metrics(tmp_path / 'one'), metrics(tmp_path / 'four'))


@pytest.mark.slow
@pytest.mark.parametrize('counts', [(2, 1), (2, 4, 1), (1, 4, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, data_root, counts):
    """Shards of two are read by four and by one; and a whole checkpoint by several."""
    run_train(tmp_path / 'whole', STACK, **SIX_STEPS)
    parts, each = tmp_path / 'parts', 6 // len(counts)
    for k, n in enumerate(counts):
        more = FSDP | dict(init_from='resume') if k else FSDP
        run(data_root, n, parts, STACK, **SIX_STEPS | dict(max_iters=each * (k + 1) - (k == len(counts) - 1)) | more)
        saved = load(parts / 'ckpt.pt')
        assert ('shards' in saved) == (n > 1) and bool(saved['model']) == (n == 1)
        assert len(list(parts.glob('shards_*'))) == len({load(path)['shards']['folder'] for path in parts.glob('ckpt*.pt')
                                                         if 'shards' in load(path)})
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(parts))
    assert_same_state(tmp_path / 'whole', parts, exact=False)


@pytest.fixture
def out(sharded, tmp_path):
    return shutil.copytree(sharded[0], tmp_path / 'out')


def test_it_is_sampled_as_any_other(out, capsys):
    sample.main([f'--out_dir={out}', '--device=cpu', '--num_samples=1', '--max_new_tokens=5', '--start=a'])
    assert 'KV cache' in capsys.readouterr().out


def test_shards_become_one_file_and_back(out, tmp_path, capsys):
    shards.main([str(out / 'ckpt.pt'), str(tmp_path / 'whole' / 'ckpt.pt')])
    shards.main([str(tmp_path / 'whole' / 'ckpt.pt'), str(tmp_path / 'again' / 'ckpt.pt'), '--to=shards'])
    whole, read = load(tmp_path / 'whole' / 'ckpt.pt'), load_checkpoint(tmp_path / 'again' / 'ckpt.pt')
    assert 'shards' not in whole and 'shards' in load(tmp_path / 'again' / 'ckpt.pt')
    assert whole['model'].keys() == read['model'].keys()
    assert all(torch.equal(x, read['model'][name]) for name, x in whole['model'].items())
    for i, state in whole['optimizer']['state'].items():
        assert all(torch.equal(x, read['optimizer']['state'][i][name]) for name, x in state.items())
    assert whole['optimizer']['param_groups'] == read['optimizer']['param_groups']
    with pytest.raises(UserError, match='is there already'):
        shards.main([str(out / 'ckpt.pt'), str(tmp_path / 'whole' / 'ckpt.pt')])


@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize('damage', ['missing', 'short', 'changed', 'exchanged'])
def test_a_damaged_shard_is_named(out, data_root, damage, n):
    saved = load(out / 'ckpt.pt')
    first, second = sorted((out / saved['shards']['folder']).iterdir())
    if damage == 'missing':
        second.unlink()
    elif damage == 'short':
        second.write_bytes(second.read_bytes()[:-8])
    elif damage == 'changed':
        data = second.read_bytes()
        second.write_bytes(b'\xff' * 8 + data[8:])
    else:
        shutil.copy(first, second)
        saved['shards']['files'][second.name] = second.stat().st_size
        torch.save(saved, out / 'ckpt.pt')
    named = str(second if damage in ('missing', 'short') else second.parent) if damage != 'exchanged' else str(out)
    settings = SIX_STEPS | dict(max_iters=8, init_from='resume')
    if n == 2:
        process = start(data_root, n, out, STACK, **settings, **FSDP)
        _, err = process.communicate(timeout=180)
        assert process.returncode and 'error: ' in err and named in err and 'Traceback' not in err.partition('error: ')[0]
        return
    with pytest.raises(UserError) as caught:
        run_train(out, STACK, **settings)
    assert named in str(caught.value) and '\n' not in str(caught.value)


def test_shards_that_a_copy_names_stay(out, tmp_path):
    saved = load(out / 'ckpt.pt')
    folder = out / saved['shards']['folder']
    run = folder.name.removeprefix('shards_').rpartition('_')[0].rpartition('_')[0]
    (out / 'ckpt.pt').rename(out / 'good.pt')
    shutil.copytree(folder, out / f'shards_{run}_0000001_00000000')
    checkpoint.delete_unused_shards(out, run)
    assert [path.name for path in out.glob('shards_*')] == [folder.name]


@pytest.mark.slow
def test_in_bfloat16_it_has_the_losses_of_ddp(tmp_path, data_root):
    settings = SIX_STEPS | dict(dtype='bfloat16')
    for name, more in (('ddp', {}), ('fsdp', FSDP)):
        run(data_root, 2, tmp_path / name, STACK, **settings, **more)
    ddp, fsdp = ([row['loss'] for row in metrics(tmp_path / name)] for name in ('ddp', 'fsdp'))
    assert ddp == pytest.approx(fsdp, abs=3e-3) and len(ddp) == 6


@pytest.mark.parametrize('error', [ZeroDivisionError(), CheckpointException('full', {})])
def test_a_checkpoint_that_cannot_be_written_leaves_no_shards(tmp_path, monkeypatch, error):
    """CheckpointException derives from BaseException."""
    def save(*args, **kwargs):
        (tmp_path / 'part').mkdir()
        raise error
    monkeypatch.setattr(checkpoint.storage()[0], 'save', save)
    with pytest.raises(UserError, match='cannot write checkpoint'):
        checkpoint.write_shards(tmp_path / 'part', {'x': torch.zeros(3)})
    assert not (tmp_path / 'part').exists()


@pytest.mark.parametrize('settings, named', [
    (dict(optimizer='adamw8bit'), 'adamw8bit'), (dict(offload_optimizer=True), 'offload_optimizer'),
    (dict(dtype='float16'), 'float16'), (dict(recompute='auto'), 'auto'), (dict(memory_report=True), 'memory_report')])
def test_what_does_not_go_with_it(settings, named):
    from types import SimpleNamespace

    from training import fsdp
    s = SimpleNamespace(**dict(optimizer='adamw', offload_optimizer=False, recompute='none', memory_report=False) | settings)
    with pytest.raises(UserError, match=named):
        fsdp.check(s, getattr(torch, settings.get('dtype', 'float32')))
