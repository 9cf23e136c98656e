"""train.py on several processes: the same losses as on one with that batch, one set of files; with
parallel='fsdp', too, whose checkpoints are for any number of processes."""
import os
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

import train
from common.errors import UserError
from tests.helpers.mechanisms import CHANGES
from tests.programs.support import (
    FULL_STACK, VANILLA, flags, load, losses, metrics, run_train, start_program)
from training.checkpoint.manager import peek
from training.device import multiplies_bfloat16
from training.loop.resume import resumed_after_restart
from training.parallel.distributed import Ranks

SIX_STEPS = dict(gradient_accumulation_steps=4, max_iters=5, eval_interval=3, eval_iters=3)
if multiplies_bfloat16():  # 'auto' would be bfloat16, whose rounding depends on the batch size
    SIX_STEPS['dtype'] = 'float32'
BAD_LOSS = '''
import train
plain = train.Run.step
def step(run):
    if run.ranks.rank != 1 or run.iter_num not in (1, 3, 4):
        return plain(run)
    calls = []
    def poison(model, given, out):
        calls.append(1)
        return (out[0], out[1] + float("nan")) if len(calls) == 1 else out
    hook = run.model.register_forward_hook(poison)
    try:
        return plain(run)
    finally:
        hook.remove()
train.Run.step = step
'''  # on one rank, in its first micro-batch only; the gradients stay finite
SMALL_CHUNKS = "import training.step.loss; training.step.loss.CHUNK_BYTES = {'cpu': 4 * 12 * 9}\n"
SHORT_STACK = dict(FULL_STACK, n_layer=4, layer_pattern='LLG', kv_share='AAB')
KILL = '''
import os, signal, train
plain = train.Run.step
def step(run):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and (run.ranks.rank, run.iter_num) == (1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(run)
train.Run.step = step
'''
started = []


@pytest.fixture(autouse=True)
def _leave_nothing_running():
    yield
    while started:
        process = started.pop()
        if process.poll() is None:  # after a failed test: torchrun ends its processes
            process.terminate()
            process.communicate(timeout=60)


def start(data_root, n, out_dir, config=VANILLA, before='', **overrides):
    """Start train.py on `n` processes or with torchrun options `n`. before: code to run first."""
    options = ['--standalone', f'--nproc_per_node={n}'] if isinstance(n, int) else n
    settings = dict(config, out_dir=out_dir) | overrides
    started.append(start_program('train', *flags(settings), data_root=data_root, before=before,
                                 torchrun=options if n != 1 else ()))
    return started[-1]


def run(*args, **overrides):
    process = start(*args, **overrides)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    return out


def assert_same_losses(a, b):
    assert [row['iter'] for row in a] == [row['iter'] for row in b]
    for name in ('loss', 'train_loss', 'val_loss'):
        pairs = [(x[name], y[name]) for x, y in zip(a, b) if name in x]
        assert pairs and max(abs(x - y) for x, y in pairs) < 1e-5


@pytest.mark.parametrize('config', [
    pytest.param(VANILLA, marks=pytest.mark.slow, id='vanilla'),
    pytest.param(dict(SHORT_STACK, recompute='selective'), id='short stack, recomputed'),
    pytest.param(dict(FULL_STACK, recompute='block'), marks=pytest.mark.slow, id='blocks'),
    # without rounding: a value between two steps of int8 may go either way
    pytest.param(FULL_STACK | CHANGES['many'] | dict(kv_quant_train=''), marks=pytest.mark.slow,
                 id='many mechanisms'),
    pytest.param(dict(SHORT_STACK, n_kv_head=0, plans='n_kv_head=1;window_size=2'),
                 marks=pytest.mark.slow, id='plans')])
def test_two_processes_have_the_losses_of_one(tmp_path, data_root, config):
    """With recomputation and a chunked loss, against one process without either."""
    plain = dict(config, chunked_loss=False, recompute='none')
    run_train(tmp_path / 'one', plain, **SIX_STEPS)
    out = run(data_root, 2, tmp_path / 'two', config, **SIX_STEPS, before=SMALL_CHUNKS)
    rows = [metrics(tmp_path / name) for name in ('one', 'two')]
    assert_same_losses(*rows)
    norms = [[row['grad_norm'] for row in each] for each in rows]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    one, two = (load(tmp_path / name / 'ckpt.pt') for name in ('one', 'two'))
    assert max((one['model'][name] - x).abs().max() for name, x in two['model'].items()) < 1e-5
    assert torch.equal(one['data_rng'], two['data_rng']) and len(two['rng']) == 2
    for line in ('step 0:', 'iter 0:', 'tokens per iteration will be: 256'):
        assert out.count(line) == 1  # rank 1 is silent
    run_train(tmp_path / 'two', plain, init_from='resume', **SIX_STEPS | dict(max_iters=7))
    run_train(tmp_path / 'one', plain, init_from='resume', **SIX_STEPS | dict(max_iters=7))
    assert_same_losses(*(metrics(tmp_path / name) for name in ('one', 'two')))


@pytest.mark.slow
def test_a_bad_loss_on_one_of_two_processes_is_skipped_by_both(tmp_path, data_root):
    """If only one of them stepped, their weights would differ from then on."""
    process = start(data_root, 2, tmp_path, before=BAD_LOSS, gradient_accumulation_steps=4,
                    max_iters=4, eval_interval=100, max_skipped=2)
    _, err = process.communicate(timeout=180)
    assert [row['skipped'] for row in metrics(tmp_path)] == [0, 1, 1, 2]
    assert process.returncode != 0
    assert 'iteration 4: the gradient norm is nan (loss ' in err, err


@pytest.mark.slow
def test_dropout_differs_between_ranks_and_resumes_exactly(tmp_path, data_root):
    settings = SIX_STEPS | dict(dropout=0.3)
    run(data_root, 2, tmp_path / 'whole', **settings)
    first = settings | dict(max_iters=3, checkpoint_interval=1)
    run(data_root, 2, tmp_path / 'parts', **first)
    states = load(tmp_path / 'parts' / 'ckpt.pt')['rng']
    assert not torch.equal(states[0]['torch'], states[1]['torch'])
    run(data_root, 2, tmp_path / 'parts', init_from='resume', **settings)
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')


@pytest.mark.slow
@pytest.mark.parametrize('during', ['training', 'evaluation'])
def test_a_signal_to_one_process_stops_all(tmp_path, data_root, during):
    """The other process must not wait for it in the next gradient or loss."""
    evaluates = during == 'evaluation'
    settings = dict(eval_interval=1, eval_iters=2000) if evaluates else dict(eval_interval=10 ** 6)
    process = start(data_root, 2, tmp_path, **SIX_STEPS | dict(max_iters=100000) | settings)
    for line in process.stdout:
        if line.startswith('iter 0:' if evaluates else 'iter 4:'):
            break
    children = subprocess.check_output(['pgrep', '-P', str(process.pid)], text=True).split()
    time.sleep(evaluates)
    os.kill(max(map(int, children)), signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not list(tmp_path.glob('.*.tmp'))
    saved = re.findall(r'(another process was stopped|SIGTERM): saved iteration (\d+)', out)
    assert len(saved) == 1 and int(saved[0][1]) == load(tmp_path / 'ckpt.pt')['iter_num']
    assert (saved[0][1] == '1') == evaluates


def test_processes_share_micro_batches_evenly():
    settings, two = SimpleNamespace(gradient_accumulation_steps=4), SimpleNamespace(world_size=2)
    train.check_accumulation(settings, two)
    settings.gradient_accumulation_steps = 3
    with pytest.raises(UserError, match='gradient_accumulation_steps=3 .* 2 processes'):
        train.check_accumulation(settings, two)


@pytest.mark.slow
def test_a_wrong_setting_ends_all_processes(tmp_path, data_root):
    process = start(data_root, 2, tmp_path / 'out', backend='nccl')
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and not (tmp_path / 'out').exists()
    report = err.partition('Root Cause')[2]  # torchrun's, which is last
    assert re.search("error: .*'nccl'.*gloo", report)


@pytest.mark.parametrize('name, value, error', [
    ('WORLD_SIZE', 'two', "^environment variable WORLD_SIZE='two': must be a whole number, "
                          'as torchrun sets it$'),
    ('WORLD_SIZE', '2', '^the 2 processes .* torchrun')])
def test_an_environment_that_torchrun_did_not_set_is_an_error(
        tmp_path, monkeypatch, name, value, error):
    monkeypatch.setenv(name, value)
    monkeypatch.delenv('MASTER_ADDR', raising=False)
    with pytest.raises(UserError, match=error):
        run_train(tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


# -- restarts --------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('config, more', [(VANILLA, {}), (FULL_STACK, dict(parallel='fsdp'))],
                         ids=['ddp', 'fsdp'])
def test_a_process_that_dies_is_started_again(tmp_path, data_root, config, more):
    run_train(tmp_path / 'whole', config, **SIX_STEPS)
    options = ['--standalone', '--nproc_per_node=2', '--max-restarts=1', '--monitor-interval=0.1']
    process = start(data_root, options, tmp_path / 'killed', config, KILL, **SIX_STEPS,
                    checkpoint_interval=1, **more)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count('step 0:') == 1 and 'Resuming training from' in out
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(tmp_path / 'killed'))


def test_a_checkpoint_of_another_launch_is_not_resumed(tmp_path, monkeypatch):
    """A run from scratch that dies before its first checkpoint starts from scratch again."""
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'first')
    run_train(tmp_path, max_iters=2, eval_interval=2)
    assert load(tmp_path / 'ckpt.pt')['launch'] == 'first'
    for launch, resumed in (('first', True), ('second', False), ('', False)):
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', launch)
        s = resumed_after_restart(train.Settings(out_dir=str(tmp_path)), Ranks('gloo', 'cpu'))
        assert (s.init_from == 'resume') == resumed
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    run_train(tmp_path, max_iters=2, eval_interval=2)
    run_train(tmp_path, max_iters=2, eval_interval=2)
    assert load(tmp_path / 'ckpt.pt')['launch'] == '' and peek(tmp_path / 'none.pt') is None
    monkeypatch.setenv('TORCHELASTIC_MAX_RESTARTS', '1')
    with pytest.raises(UserError, match='^--max-restarts .*--standalone or --rdzv-id=NAME$'):
        run_train(tmp_path)


# -- parallel='fsdp'

FSDP = dict(parallel='fsdp')
STACK = dict(SHORT_STACK, bias=True)
NEAR = dict(atol=1e-5, rtol=0)


def assert_same_state(a, b):
    """Whole tensors in one file, at the same places as without FSDP."""
    one, two = (load(folder / 'ckpt.pt') for folder in (a, b))
    assert {type(x) for x in two['model'].values()} == {torch.Tensor}
    assert one.keys() == two.keys() and one['model'].keys() == two['model'].keys()
    torch.testing.assert_close(two['model'], one['model'], **NEAR)
    torch.testing.assert_close(two['optimizer']['state'], one['optimizer']['state'], **NEAR)
    head, embedding = (two['model'][f'{name}.weight'] for name in ('lm_head', 'transformer.wte'))
    assert head.data_ptr() == embedding.data_ptr()  # written once


@pytest.mark.parametrize('n, config, more', [
    (2, STACK, {}),
    *(pytest.param(4, *row, marks=pytest.mark.slow) for row in (
        (VANILLA, dict(recompute='selective')),
        (STACK, dict(chunked_loss=False, grad_clip=0.0, recompute='sqrt')),
        (STACK, dict(dtype='bfloat16', recompute='mlp')),
        (FULL_STACK | CHANGES['many'], dict(optimizer='muon', recompute='offload'))))], ids=str)
def test_several_processes_have_the_losses_of_one(tmp_path, data_root, n, config, more):
    run_train(tmp_path / 'one', config, **SIX_STEPS | more)
    printed = run(data_root, n, tmp_path / 'many', config, **SIX_STEPS | FSDP | more)
    assert printed.count('step 0:') == 1
    one, many = (metrics(tmp_path / name) for name in ('one', 'many'))
    if more.keys() & {'optimizer', 'dtype'}:
        # these round, so a small difference can grow
        expected = [pytest.approx(row['loss'], abs=1e-3) for row in one]
        assert [row['loss'] for row in many] == expected and len(one) == 6
        return
    assert_same_losses(one, many)
    assert_same_state(tmp_path / 'one', tmp_path / 'many')
    norms = [row['grad_norm'] for row in one]
    assert norms == pytest.approx([row['grad_norm'] for row in many], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('counts', [(2, 4, 1), (1, 4, 2)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, data_root, counts):
    run_train(tmp_path / 'whole', STACK, **SIX_STEPS)
    parts, each = tmp_path / 'parts', 6 // len(counts)
    for k, n in enumerate(counts):
        max_iters = 5 if k == len(counts) - 1 else each * (k + 1)
        more = FSDP | dict(max_iters=max_iters, init_from='resume' if k else 'scratch')
        run(data_root, n, parts, STACK, **SIX_STEPS | more)
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(parts))
    assert_same_state(tmp_path / 'whole', parts)


@pytest.mark.parametrize('name, value', [('dtype', 'float16'), ('memory_report', True)])
def test_settings_that_exclude_it(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}={value!r}.* not go with *parallel='fsdp'"):
        run_train(tmp_path, parallel='fsdp', **{name: value})
