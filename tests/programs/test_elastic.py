"""torchrun restarts processes that die, without changing the result; two hosts on one machine."""
import socket
from types import SimpleNamespace

import pytest

from tests.programs.support import FULL_STACK, VANILLA, load, metrics, run_train
from tests.programs.test_distributed import SIX_STEPS, assert_same_losses, start
from training.checkpoint_manager import peek
from training.distributed import Ranks, go_on_after_restart

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
    for launch, resumed in (('first', True), ('second', False), ('', False), ('none', False)):
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', launch)
        s = SimpleNamespace(out_dir=str(tmp_path), init_from='scratch', resume_from='ckpt.pt')
        go_on_after_restart(s, Ranks('gloo', 'cpu'))
        assert (s.init_from == 'resume') == resumed
    assert peek(tmp_path / 'none.pt') is None


@pytest.mark.slow
def test_two_agents_are_one_run(tmp_path, data_root):
    """As on two hosts: each has one process, whose local rank is 0."""
    run_train(tmp_path / 'one', **SIX_STEPS)
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    options = ['--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d', '--rdzv-id=x',
               f'--rdzv-endpoint=127.0.0.1:{port}']
    two = tmp_path / 'two'
    agents = [start(data_root, options, two, **SIX_STEPS, parallel='fsdp') for _ in range(2)]
    for agent in agents:
        _, err = agent.communicate(timeout=300)
        assert agent.returncode == 0, err
    assert_same_losses(metrics(tmp_path / 'one'), metrics(two))
    assert len(load(two / 'ckpt.pt')['shards']['files']) == 2
