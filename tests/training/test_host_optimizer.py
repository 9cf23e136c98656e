"""AdamW in host memory against AdamW on the device (on a GPU: programs/test_gpu.py)."""
import copy

import pytest
import torch

from config.sizes import nice_bytes
from tests.helpers.optim import assert_equal, backward, model_of, settings, step, weights
from training.host_optimizer import HostAdamW
from training.memory_use import memory_line, state_bytes
from training.optim import (
    load_optimizer,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
    state_name,
)
from training.update import GuardedUpdate

HOST = settings(optimizer='adamw', offload_optimizer=True)
PLAIN = settings(optimizer='adamw')


def both():
    for s in (HOST, PLAIN):
        model = model_of()
        yield model, make_optimizer(model, s, 'cpu')


def guarded(optimizer, grad_clip=0.5):
    return GuardedUpdate(optimizer, torch.amp.GradScaler('cpu', enabled=False), grad_clip,
                         torch.device('cpu'))


@pytest.mark.parametrize('bucket', [1, 20_000, 2 ** 30])
def test_its_steps_are_adamws(bucket):
    (model, optimizer), (twin, other) = both()
    optimizer = HostAdamW(optimizer.param_groups, lr=1e-2, betas=(0.8, 0.9), bucket=bucket)
    n = len(list(model.parameters()))
    low, high = {1: (n, n), 20_000: (2, n - 1), 2 ** 30: (1, 1)}[bucket]
    assert low <= len(optimizer.buckets) <= high
    updates = guarded(optimizer), guarded(other)
    for seed in range(5):
        for m, o, update in ((model, optimizer, updates[0]), (twin, other, updates[1])):
            set_learning_rate(o, 1e-2 / (seed + 1))
            backward(m, seed)
            update(seed, torch.tensor(1.0))
        assert_equal(weights(model), weights(twin))
    # check that something was clipped
    assert updates[0].read().grad_norm == updates[1].read().grad_norm > 0.5


def test_a_parameter_without_a_gradient_is_left_alone():
    (model, optimizer), (twin, other) = both()
    for seed in range(3):
        for m, o in ((model, optimizer), (twin, other)):
            backward(m, seed)
            m.transformer.h[1].mlp.c_fc.weight.grad = None
            o.step()
            o.zero_grad()
    assert_equal(weights(model), weights(twin))
    assert torch.equal(model.transformer.h[1].mlp.c_fc.weight,
                       model_of().transformer.h[1].mlp.c_fc.weight)


def test_the_settings_of_this_run_are_kept():
    (_, optimizer), (twin, other) = both()
    step(twin, other, 0)
    set_learning_rate(other, 5.0)

    def kept():
        return [{k: v for k, v in g.items() if k != 'params'} for g in optimizer.param_groups]
    before = copy.deepcopy(kept())
    load_optimizer(optimizer, other.state_dict())
    assert kept() == before


def test_nothing_of_it_counts_as_the_devices():
    model = model_of()
    optimizer = make_optimizer(model, HOST, 'cpu')
    assert optimizer_state(optimizer)['state'] == {}
    expected = (*state_bytes(model)[:2], 0)
    assert state_bytes(model, optimizer) == state_bytes(model, state_name(HOST)) == expected
    step(model, optimizer, 0)
    parameters = sum(p.nbytes for p in model.parameters())
    assert state_bytes(model, optimizer)[2] == 0
    # and one step count each
    assert optimizer.host_nbytes() == 4 * parameters + 4 * len(list(model.parameters()))
    assert f'optimizer {nice_bytes(0)} (and {nice_bytes(optimizer.host_nbytes())} on the host)' in \
        memory_line(model, optimizer, torch.device('cpu'))
