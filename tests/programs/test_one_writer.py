"""Two trainings into one out_dir: one writes, the other says why it does not; readers are not in the way."""
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from config.errors import UserError
from config.folder_lock import only_writer
from tests.programs.support import FULL_STACK, LAUNCH, ROOT, VANILLA, flags, metrics, run_train


def start(data_root, out_dir, program='train', **settings):
    command = [sys.executable, '-c', LAUNCH.format(program), str(data_root), *flags(settings | dict(out_dir=out_dir))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {'OMP_NUM_THREADS': '1'})


def test_the_second_is_refused_before_it_writes_or_loads_anything(tmp_path, data_root, capsys):
    out = tmp_path / 'out'
    run_train(out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    with only_writer(out, ''):
        for settings in ({}, dict(init_from='resume', max_iters=30)):
            with pytest.raises(UserError) as refused:
                run_train(out, **settings)
            assert str(refused.value).startswith(
                f'{out} is being written by process {os.getpid()} on ')
            assert 'give another --out_dir' in str(refused.value)
        after = {path.name: path.read_bytes() for path in out.iterdir() if path.name != '.lock'}
        assert after == before and 'Resuming' not in capsys.readouterr().out


def test_readers_need_no_lock(tmp_path, data_root, capsys):
    import sample
    from training import plot
    out = tmp_path / 'out'
    run_train(out, VANILLA, max_iters=3)
    with only_writer(out, ''):
        capsys.readouterr()
        run_train(out, VANILLA | dict(init_from='resume', eval_only=True))
        assert 'val loss' in capsys.readouterr().out
        sample.main(flags(dict(out_dir=out, num_samples=1, max_new_tokens=5, device='cpu')))
        plot.main([str(out), f"--out={tmp_path / 'loss.png'}"])
    assert (tmp_path / 'loss.png').exists()


def test_settings_that_are_refused_leave_no_folder(tmp_path, data_root):
    with pytest.raises(ValueError):
        run_train(tmp_path / 'out', VANILLA | dict(n_head=3))
    assert not (tmp_path / 'out').exists()


def test_under_torchrun(tmp_path, data_root):
    """Rank 0 holds the lock: a second launch is refused as a whole."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py',
               *flags(VANILLA | dict(dataset='recall', recall_task='distances=3', block_size=20, out_dir=tmp_path / 'out',
                                     gradient_accumulation_steps=2))]
    with only_writer(tmp_path / 'out', ''):
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120,
                                 env=os.environ | {'OMP_NUM_THREADS': '1'})
        assert refused.returncode != 0 and 'is being written by process' in refused.stderr
        assert [path.name for path in (tmp_path / 'out').iterdir()] == ['.lock']


def rounds(n, data_root, folder):
    """Pairs of trainings of different lengths and widths into one folder, started at random times, some of them killed. What
    is there afterwards is of one of them and whole."""
    draw = random.Random(n)
    counts = {'both wrote, one after the other': 0, 'refused': 0, 'killed': 0}
    for k in range(n):
        out = folder / f'out{k}'
        pair = []
        for width, iters in ((16, 20), (32, 40)):
            pair.append(start(data_root, out, **VANILLA | dict(n_embd=width, max_iters=iters, checkpoint_interval=5)))
            time.sleep(draw.choice([0, 0, draw.random(), 4 * draw.random()]))
        victim = draw.choice([None, None, pair[0]])
        if victim:
            time.sleep(3 * draw.random())
            victim.send_signal(signal.SIGKILL)
        ended = [(process.communicate(timeout=120)[1], process.returncode) for process in pair]
        refused = [told for told, code in ended if code == 2]
        assert all('is being written by process' in told for told in refused), refused
        assert len(refused) < 2 and all(code in (0, 2, -signal.SIGKILL) for _, code in ended), ended
        counts['refused'] += len(refused)
        counts['killed'] += victim is not None
        counts['both wrote, one after the other'] += [code for _, code in ended] == [0, 0]
        whole = [(width, iters) for (width, iters), (_, code) in zip(((16, 20), (32, 40)), ended) if code == 0]
        saved = {path.name: torch.load(path, weights_only=True) for path in out.glob('ckpt*.pt')} if out.exists() else {}
        for width, iters in whole:  # each that ended well has its model, under whatever name
            assert any(c['model_args']['n_embd'] == width and c['iter_num'] == iters
                       for c in saved.values()), (saved.keys(), ended)
        for path in out.glob('metrics*.jsonl'):
            lines = path.read_text().split('\n')[:-1]  # a killed process may have written part of a line
            assert [json.loads(line)['iter'] for line in lines] == list(range(len(lines)))
    return counts


@pytest.mark.slow
def test_pairs_of_trainings_with_kills(tmp_path, data_root):
    counts = rounds(12, data_root, tmp_path)
    assert counts['refused'] > 0 and counts['killed'] > 0


def test_a_killed_one_is_no_obstacle(tmp_path, data_root):
    out = tmp_path / 'out'
    first = start(data_root, out, **FULL_STACK | dict(max_iters=100000, lr_decay_iters=100000, checkpoint_interval=5))
    for _ in range(600):
        if (out / 'ckpt.pt').exists():
            break
        time.sleep(0.1)
    first.kill()
    first.communicate()
    assert (out / '.lock').exists()
    done = torch.load(out / 'ckpt.pt', weights_only=True)['iter_num']
    run_train(out, FULL_STACK | dict(init_from='resume', max_iters=done + 5, lr_decay_iters=100000))
    assert [row['iter'] for row in metrics(out)] == list(range(done + 6)) and not (out / '.lock').exists()
