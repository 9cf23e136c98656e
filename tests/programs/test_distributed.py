"""train.py on several processes: the same losses as one with the same global batch, one set of files, one voice."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from config.errors import UserError
from tests.programs.support import FULL_STACK, LAUNCH, ROOT, VANILLA, flags, load, losses, metrics, run_train

SIX_STEPS = dict(gradient_accumulation_steps=4, max_iters=5, eval_interval=3, eval_iters=3)
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
'''  # on one rank, in its first micro-batch alone; the gradients stay finite


started = []


@pytest.fixture(autouse=True)
def _leave_nothing_running():
    yield
    while started:
        process = started.pop()
        if process.poll() is None:  # a test that failed: torchrun ends its processes
            process.terminate()
            process.communicate(timeout=60)


def start(data_root, n, out_dir, config=VANILLA, before='', **overrides):
    """train.py on `n` processes: under torchrun, or as it is for one. before: code to run first."""
    settings = dict(config, out_dir=out_dir) | overrides
    command = [sys.executable, '-c', before + LAUNCH.format('train'), str(data_root), *flags(settings)]
    if n > 1:
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', '--no-python',
                   *command]
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PYTHONUNBUFFERED='1')
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
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


SMALL_CHUNKS = "import training.loss; training.loss.CHUNK_BYTES = {'cpu': 4 * 12 * 9}\n"


@pytest.mark.parametrize('config', [
    pytest.param(VANILLA, marks=pytest.mark.slow, id='vanilla'),
    pytest.param(dict(FULL_STACK, recompute='selective'), id='full stack, recomputed'),
    pytest.param(dict(FULL_STACK, checkpoint_blocks=True), marks=pytest.mark.slow, id='blocks')])
def test_two_processes_have_the_losses_of_one_with_the_same_global_batch(
        tmp_path, data_root, config):
    """With recomputation and a chunked loss, against one process without either."""
    plain = {name: x for name, x in config.items() if name not in ('recompute', 'checkpoint_blocks')}
    run_train(tmp_path / 'one', plain, **SIX_STEPS, chunked_loss=False)
    out = run(data_root, 2, tmp_path / 'two', config, **SIX_STEPS, before=SMALL_CHUNKS)
    rows = [metrics(tmp_path / name) for name in ('one', 'two')]
    assert_same_losses(*rows)
    norms = [[row['grad_norm'] for row in each] for each in rows]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    one, two = (load(tmp_path / name / 'ckpt.pt') for name in ('one', 'two'))
    assert max((one['model'][name] - x).abs().max() for name, x in two['model'].items()) < 1e-5
    assert torch.equal(one['data_rng'], two['data_rng']) and len(two['rng']) == 2
    for line in ('step 0:', 'iter 0:', 'tokens per iteration'):
        assert out.count(line) == 1  # rank 1 is silent
    assert 'tokens per iteration will be: 256' in out  # 4 micro-batches of 4 sequences of 16


@pytest.mark.slow
def test_a_bad_loss_on_one_of_two_processes_is_skipped_by_both(tmp_path, data_root):
    """Else one would step and the other not, and their weights would part for good."""
    process = start(data_root, 2, tmp_path, before=BAD_LOSS, gradient_accumulation_steps=4, max_iters=4, eval_interval=100,
                    max_skipped=2)
    _, err = process.communicate(timeout=180)
    assert [row['skipped'] for row in metrics(tmp_path)] == [0, 1, 1, 2]
    assert process.returncode != 0 and 'iteration 4: the gradient norm is nan (loss ' in err, err


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, data_root):
    run(data_root, 1, tmp_path / 'whole', **SIX_STEPS)
    run(data_root, 2, tmp_path / 'parts', **SIX_STEPS | dict(max_iters=3))
    run(data_root, 1, tmp_path / 'parts', init_from='resume', **SIX_STEPS)
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(tmp_path / 'parts'))


@pytest.mark.slow
def test_dropout_differs_between_ranks_and_resumes_exactly(tmp_path, data_root):
    settings = SIX_STEPS | dict(dropout=0.3)
    run(data_root, 2, tmp_path / 'whole', **settings)
    run(data_root, 2, tmp_path / 'parts', **settings | dict(max_iters=3, checkpoint_interval=1, keep_checkpoints=2))
    assert {p.name for p in (tmp_path / 'parts').glob('*.pt')} == {'ckpt.pt', 'ckpt_0000002.pt'}
    states = load(tmp_path / 'parts' / 'ckpt.pt')['rng']
    assert not torch.equal(states[0]['torch'], states[1]['torch'])
    run(data_root, 2, tmp_path / 'parts', init_from='resume', **settings)
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')


def test_sigterm_to_torchrun_saves_once(tmp_path, data_root):
    process = start(data_root, 2, tmp_path, **SIX_STEPS | dict(max_iters=100000))
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith('iter 4:'):
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=120)
    saved = re.findall(r'SIGTERM: saved iteration (\d+)', ''.join(seen) + rest)
    assert len(saved) == 1 and int(saved[0]) == load(tmp_path / 'ckpt.pt')['iter_num'] >= 5
    assert not list(tmp_path.glob('.*.tmp'))


def wait_until_caught(pid: str, number: int):
    """Until the process has a handler for the signal: before that, it would end at once."""
    for _ in range(600):
        caught = re.search(r'^SigCgt:\s*(\w+)', Path(f'/proc/{pid}/status').read_text(), re.M)[1]
        if int(caught, 16) >> (number - 1) & 1:
            return
        time.sleep(0.1)
    raise TimeoutError(f'process {pid} never caught signal {number}')


@pytest.mark.parametrize('during', ['training', pytest.param('evaluation', marks=pytest.mark.slow)])
def test_a_signal_to_one_process_stops_all(tmp_path, data_root, during):
    """The other must not wait for it in the next gradient or loss."""
    settings = dict(eval_iters=6000) if during == 'evaluation' else dict(eval_interval=10 ** 6)
    process = start(data_root, 2, tmp_path, **SIX_STEPS | dict(max_iters=100000) | settings)
    for line in process.stdout:
        if line.startswith('using fused' if during == 'evaluation' else 'iter 4:'):
            break
    children = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    for child in children:
        wait_until_caught(child, signal.SIGTERM)
    time.sleep(1 if during == 'evaluation' else 0)
    os.kill(max(map(int, children)), signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    saved = re.findall(r'(another process was stopped|SIGTERM): saved iteration (\d+)', out)
    assert len(saved) == 1 and int(saved[0][1]) == load(tmp_path / 'ckpt.pt')['iter_num']
    assert (saved[0][1] == '0') == (during == 'evaluation')


@pytest.mark.slow
def test_evaluating_alone_is_shared_and_writes_nothing(tmp_path, data_root):
    settings = SIX_STEPS | dict(eval_only=True, eval_iters=1)  # fewer batches than processes
    one, two = (run(data_root, n, tmp_path / 'out', **settings) for n in (1, 2))
    lines = [re.findall(r'^step 0:.*', out, re.M) for out in (one, two)]
    assert lines[0] == lines[1] and len(lines[0]) == 1 and not list((tmp_path / 'out').iterdir())


@pytest.mark.parametrize('settings, named', [
    (dict(gradient_accumulation_steps=3), ['gradient_accumulation_steps=3', '2 processes']),
    pytest.param(dict(backend='nccl'), ["'nccl'", 'gloo'], marks=pytest.mark.slow),
    pytest.param(dict(backend='mpi'), ["'mpi'", "'gloo'"], marks=pytest.mark.slow),
])
def test_wrong_settings_end_all_processes(tmp_path, data_root, settings, named):
    process = start(data_root, 2, tmp_path / 'out', **settings)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and not (tmp_path / 'out').exists()
    line = next(line for line in err.splitlines() if 'error:' in line)
    assert all(text in line for text in named)


@pytest.mark.parametrize('name, value, error', [
    ('WORLD_SIZE', 'two', "^environment variable WORLD_SIZE='two': must be a whole number, "
                          'as torchrun sets it$'),
    ('RANK', '1', '^RANK=1 and WORLD_SIZE=1'),
    ('RANK', '-1', '^RANK=-1 and WORLD_SIZE=1'),
    ('WORLD_SIZE', '2', '^the 2 processes .* torchrun')])
def test_an_environment_that_torchrun_did_not_set_is_an_error(
        tmp_path, monkeypatch, name, value, error):
    monkeypatch.setenv(name, value)
    monkeypatch.delenv('MASTER_ADDR', raising=False)
    with pytest.raises(UserError, match=error) as caught:
        run_train(tmp_path / 'out')
    assert '\n' not in str(caught.value) and not (tmp_path / 'out').exists()
