"""train.py and sample.py as processes: signals, exit status, one line on stderr, no traceback."""
import signal

import pytest

from tests.programs.support import FULL_STACK, contents, flags, load, losses, start_program


@pytest.mark.parametrize('number', [
    signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_exits_with_status_0(tmp_path, data_root, number):
    settings = FULL_STACK | dict(out_dir=tmp_path, max_iters=100000, lr_decay_iters=100000)
    process = start_program('train', *flags(settings), data_root=data_root)
    for line in process.stdout:
        if line.startswith('iter 3:'):
            process.send_signal(number)
            break
    rest, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, '')
    n = load(tmp_path / 'ckpt.pt')['iter_num']
    assert rest.splitlines()[-1] == (f'{number.name}: saved iteration {n} to {tmp_path}/ckpt.pt; '
                                     'go on with --init_from=resume')
    assert n > 3 and [i for i, _ in losses(tmp_path)] == list(range(n))
    assert contents(tmp_path).keys() - {'ckpt_best.pt'} == {'ckpt.pt', 'metrics.jsonl'}


@pytest.mark.parametrize('program, args, named', [
    ('train', ['config/train_mqa_local.py', '--dataset=shakespeare_work', '--out_dir=not-created'],
     "'shakespeare_works'"),
    pytest.param('sample', ['--out_dir=/no/such/folder'], '/no/such/folder/ckpt.pt',
                 marks=pytest.mark.slow)])
def test_wrong_input_is_one_line_and_status_2(program, args, named):
    process = start_program(program, *args)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.startswith('error: ') and err.count('\n') == 1 and named in err
