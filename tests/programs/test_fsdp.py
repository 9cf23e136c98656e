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
