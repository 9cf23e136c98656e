"""torchrun starts processes again when one dies, and the run ends as if none had; several hosts, on one machine."""
import os
import socket
import subprocess
import sys
import time

import pytest

from tests.programs.support import FULL_STACK, LAUNCH, ROOT, VANILLA, flags, load, metrics, run_train
from tests.programs.test_distributed import SIX_STEPS, assert_same_losses
from training import distributed

KILL = '''
import os, signal, train
plain = train.Run.step
def step(run):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and (run.ranks.rank, run.iter_num) == (1, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(run)
train.Run.step = step
'''


def launch(data_root, out_dir, options, config=VANILLA, before='', **settings):
    """train.py by torchrun with these options."""
    command = [sys.executable, '-m', 'torch.distributed.run', *options, '--no-python', sys.executable, '-c',
               before + LAUNCH.format('train'), str(data_root), *flags(dict(config, out_dir=out_dir) | settings)]
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=str(ROOT), PYTHONUNBUFFERED='1')
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.slow
@pytest.mark.parametrize('config, more', [(VANILLA, {}), (FULL_STACK, dict(parallel='fsdp'))], ids=['ddp', 'fsdp'])
def test_a_process_that_dies_is_started_again(tmp_path, data_root, config, more):
    run_train(tmp_path / 'whole', config, **SIX_STEPS)
    options = ['--standalone', '--nproc_per_node=2', '--max-restarts=1', '--monitor-interval=0.1']
    process = launch(data_root, tmp_path / 'killed', options, config, KILL, **SIX_STEPS, checkpoint_interval=1, **more)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count('step 0:') == 1 and 'Resuming training from' in out
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(tmp_path / 'killed'))


def test_what_another_launch_left_is_not_gone_on_from(tmp_path, monkeypatch):
    """A run that begins anew, and dies before its first checkpoint, begins anew again."""
    from types import SimpleNamespace

    from training.checkpoint_manager import launch_of
    from training.distributed import Ranks, go_on_after_restart
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'first')
    run_train(tmp_path, max_iters=2, eval_interval=2)
    assert load(tmp_path / 'ckpt.pt')['launch'] == 'first'
    for launch, gone_on in (('first', True), ('second', False), ('', False), ('none', False)):
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', launch)
        s = SimpleNamespace(out_dir=str(tmp_path), init_from='scratch', resume_from='ckpt.pt')
        go_on_after_restart(s, Ranks('gloo', 'cpu'), launch_of)
        assert (s.init_from == 'resume') == gone_on
    assert launch_of(tmp_path / 'none.pt') == ''


def test_an_agent_that_has_the_number_of_a_former_one_is_another(monkeypatch):
    """As in containers, where torchrun often has the same process id."""
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    sleeping = [sys.executable, '-c', 'import time; time.sleep(60)']
    agents, names = [], []
    for _ in range(2):
        agents.append(subprocess.Popen(sleeping))
        monkeypatch.setattr(os, 'getppid', lambda: agents[-1].pid)
        names += [distributed.launch_id(), distributed.launch_id()]
        time.sleep(0.05)
    for agent in agents:
        agent.kill()
        agent.wait()
    without_number = [name.partition(',')[2].partition(',')[2] for name in names]
    assert names[0] == names[1] != names[2] == names[3]
    if os.path.exists('/proc/self/stat'):
        assert without_number[0] == without_number[1] != without_number[2]


@pytest.mark.slow
def test_two_agents_are_one_run(tmp_path, data_root):
    """As two hosts would: each with a process of its own, whose local rank is 0."""
    run_train(tmp_path / 'one', **SIX_STEPS)
    with socket.socket() as sock:
        sock.bind(('127.0.0.1', 0))
        port = sock.getsockname()[1]
    options = ['--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d', f'--rdzv-endpoint=127.0.0.1:{port}', '--rdzv-id=x']
    agents = [launch(data_root, tmp_path / 'two', options, **SIX_STEPS, parallel='fsdp') for _ in range(2)]
    for agent in agents:
        _, err = agent.communicate(timeout=300)
        assert agent.returncode == 0, err
    assert_same_losses(metrics(tmp_path / 'one'), metrics(tmp_path / 'two'))
    assert len(load(tmp_path / 'two' / 'ckpt.pt')['shards']['files']) == 2
