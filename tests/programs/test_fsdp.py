"""parallel='fsdp': the same losses as one process; checkpoints for any number of processes."""
import pytest
import torch

from config.errors import UserError
from tests.helpers.mechanisms import CHANGES
from tests.programs.support import FULL_STACK, VANILLA, load, metrics, run_train
from tests.programs.test_distributed import SHORT_STACK, SIX_STEPS, assert_same_losses, run

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


def test_two_processes_have_the_losses_of_one(tmp_path, data_root):
    run_train(tmp_path / 'one', STACK, **SIX_STEPS)
    printed = run(data_root, 2, tmp_path / 'two', STACK, **SIX_STEPS, **FSDP)
    one, two = (metrics(tmp_path / name) for name in ('one', 'two'))
    assert_same_losses(one, two)
    assert_same_state(tmp_path / 'one', tmp_path / 'two')
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
    run_train(tmp_path / 'whole', STACK, **SIX_STEPS)
    parts, each = tmp_path / 'parts', 6 // len(counts)
    for k, n in enumerate(counts):
        max_iters = 5 if k == len(counts) - 1 else each * (k + 1)
        more = FSDP | dict(max_iters=max_iters, init_from='resume' if k else 'scratch')
        run(data_root, n, parts, STACK, **SIX_STEPS | more)
    assert_same_losses(metrics(tmp_path / 'whole'), metrics(parts))
    assert_same_state(tmp_path / 'whole', parts)


@pytest.mark.parametrize('name, value', dict(
    dtype='float16', memory_report=True).items())
def test_settings_that_exclude_it(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}={value!r}.* not go with *parallel='fsdp'"):
        run_train(tmp_path, parallel='fsdp', **{name: value})
