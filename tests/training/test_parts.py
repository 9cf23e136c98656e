"""Parts of a training step: optimizer groups, signals, device."""
import mmap
import platform
import random
import resource

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.sizes import physical_memory
from model import GPT, GPTConfig
from training.checkpoint.file import rng_state, save_checkpoint, set_rng_state
from training.device import keep_freed_memory, memory_use, pick_device, pick_dtype
from training.step.optim import configure_optimizers

CPU, F32 = torch.device('cpu'), torch.float32


# -- optimizer

def test_matrices_decay_and_vectors_do_not_in_nanogpts_order():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=11, block_size=4, bias=True))
    optimizer = configure_optimizers(model, 0.3, 1e-3, (0.8, 0.9), 'cpu')
    decay, no_decay = optimizer.param_groups
    named = dict(model.named_parameters())
    assert [id(p) for p in decay['params']] == [id(p) for p in named.values() if p.dim() >= 2]
    assert [id(p) for p in no_decay['params']] == [id(p) for p in named.values() if p.dim() < 2]
    assert (decay['weight_decay'], no_decay['weight_decay']) == (0.3, 0.0)
    assert (decay['betas'], decay['lr']) == ((0.8, 0.9), 1e-3)
    assert list(named)[0] == 'transformer.wte.weight' and 'lm_head.weight' not in named


# -- random numbers

def test_rng_state_restores_every_generator_through_a_checkpoint(tmp_path):
    def draw():
        numbers = np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss(0, 1)
        return torch.rand(3).tolist(), *numbers
    np.random.randn()    # leaves a second normal number in the generator
    random.gauss(0, 1)
    save_checkpoint(tmp_path / 'c.pt', {'rng': rng_state()})
    expected = draw()
    draw()
    set_rng_state(torch.load(tmp_path / 'c.pt', weights_only=True)['rng'])
    assert draw() == expected


# -- device

@pytest.mark.parametrize('name', ['cpux', '', 'meta', 'xpu', 'cuda:99'])
def test_unusable_devices_are_named_with_the_usable(name):
    assert (pick_dtype('auto', CPU), pick_dtype('bfloat16', CPU)) == (F32, torch.bfloat16)
    with pytest.raises(UserError) as caught:
        pick_device(name)
    assert f"device={name!r} cannot be used here; usable are 'auto', " in str(caught.value)
    assert '\n' not in str(caught.value)


# -- memory

@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='of glibc')
def test_memory_that_tensors_freed_is_there_for_the_next():
    """The system would have to clear its pages again: up to 46,000 of 4 kB."""
    keep_freed_memory(CPU)
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(n * 2 ** 18) for n in (1, 3, 7, 12) * 8]  # in MB
        del tensors
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 200


def test_memory_of_the_process_is_in_bytes_and_its_peak_stays():
    before = memory_use(CPU)
    block = mmap.mmap(-1, 64 * 2 ** 20)  # a torch allocation might reuse the process's memory
    for _ in range(64):
        block.write(bytes(2 ** 20))
    during = memory_use(CPU)
    assert 60 * 2 ** 20 < during.used - before.used < 80 * 2 ** 20
    block.close()
    after = memory_use(CPU)
    assert after.used < during.used - 60 * 2 ** 20
    assert after.peak >= during.peak * 0.99 >= during.used * 0.99
    assert after.total == physical_memory()
