"""The C++ extensions, compiled for ARM and run in an emulator, against plain torch here."""
import pytest
import torch

from common.gpt_config import GPTConfig
from engine import native
from tests.engine import test_chunks, test_linear, test_weights
from tests.engine.test_native import (
    CHUNKS, KINDS, bound_of, caches, largest_gap, largest_gap_of_chunks, prompts,
    test_other_weights_stay_close as check_other_weights)
from tests.helpers.emulated import AVAILABLE, Emulated
from tests.helpers.models import random_model
from tests.training import test_native as training
from training.native import loading

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not AVAILABLE, reason='see .ci/run')]


def emulated(module, monkeypatch_module, folder, source, names, flags):
    """`module.library()` is the one in the emulator."""
    library = Emulated(folder, source, names, flags)
    monkeypatch_module.setattr(module, 'library', lambda: library)
    yield library
    library.close()


@pytest.fixture(scope='module')
def module_patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, 'get_num_threads', lambda: 3)
        yield patch


@pytest.fixture(scope='module', params=['armv8-a', 'armv8.2-a+dotprod'])
def decode_on_arm(request, module_patch, tmp_path_factory):
    """For a processor without and with dot products of bytes."""
    yield from emulated(native, module_patch, tmp_path_factory.mktemp('arm'), native.SOURCE,
                        ['nanokv_' + name for name in ('decode', 'linear', 'attend')],
                        [f'-march={request.param}'])


@pytest.fixture(scope='module')
def training_on_arm(module_patch, tmp_path_factory):
    names = ['nanokv_' + name for name in ('attention', 'attention_backward', 'gelu', 'norm',
                                           'norm_backward', 'cross_entropy', 'add')]
    yield from emulated(loading, module_patch, tmp_path_factory.mktemp('arm'),
                        loading.SOURCE, names, ['-march=armv8-a'])


@pytest.mark.parametrize('kv_dtype, paged', [('float32', False), ('bfloat16', True),
                                             ('int8', False), ('int4', True)])
@pytest.mark.parametrize('kind', KINDS)
def test_a_step(decode_on_arm, kind, kv_dtype, paged):
    model = random_model(GPTConfig(**KINDS[kind]), torch.float32)
    bound = bound_of(kind, kv_dtype)
    assert largest_gap(model, *caches(model, kv_dtype, 3, paged), prompts(13, 1, 4), 4) < bound
    gap = largest_gap_of_chunks(model, *caches(model, kv_dtype, 3, paged), CHUNKS[:5])
    assert gap < bound


@pytest.mark.parametrize('weights, bound', [('bfloat16', 0.03), ('int8', 0.05)])
def test_a_step_with_other_weights(decode_on_arm, weights, bound):
    check_other_weights(weights, bound)


def test_matmuls(decode_on_arm):
    for dtype in (torch.float32, torch.bfloat16):
        test_linear.test_any_number_of_rows(48, 65, dtype)
    for n_rows in (1, 5, 18):
        test_weights.test_int4_matmuls_equal_exact_sums_by_group(True, n_rows, 40, 96, 32)
        test_weights.test_matmuls_equal_exact_sums_of_integers(True, n_rows, 40, 60)


@pytest.mark.parametrize('kv_dtype', ['float32', 'bfloat16', 'int8', 'int4'])
def test_chunks_of_prompts(decode_on_arm, kv_dtype):
    test_chunks.test_it_equals_dense_attention(3, 1, 24, kv_dtype)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_training_step(training_on_arm, dtype):
    training.test_attention_is_what_float64_gives(2, 4, 1, 16, 70, 8, False, dtype)
    training.test_attention_is_what_float64_gives(1, 6, 2, 20, 33, 0, False, dtype)
    training.test_gelu_is_what_float64_gives(True, dtype)
    training.test_gelu_is_what_float64_gives(False, dtype)
    training.test_norm_and_rotation_are_what_float64_gives(18, True, dtype)
    training.test_cross_entropy_is_what_float64_gives(50, 37)
    training.test_sums_of_bfloat16_are_added_in_float32()
