"""The config files in config/: they parse for every program and are what they claim to be."""
import warnings

import pytest
import torch

import configurator
from common.gpt_config import GPTConfig
from common.settings import MODEL
from engine.steps.native import MULTIPLE
from kv.plan import plan_kv
from model import GPT
from tests.helpers.programs import SETTINGS

SHIPPED = sorted(p.name for kind in ('train', 'finetune', 'eval')
                 for p in (configurator.ROOT / 'config').glob(f'{kind}_*.py'))
MEMORY = {'n_kv_head', 'layer_pattern', 'window_size', 'kv_share', 'share_global_kv',
          'pos_embedding', 'qk_norm'}
COMPARED = ['train_mqa_local.py', 'train_vanilla.py', 'train_rope_mha.py']


def settings(name, program='train'):
    return configurator.parse(SETTINGS[program], [f'config/{name}'], echo=False).values()


def gpt_config(name, vocab_size):
    s = settings(name)
    return GPTConfig(vocab_size=vocab_size, **{field: s[field] for field in MODEL})


def n_params(name, vocab_size):
    with torch.device('meta'):
        return sum(p.numel() for p in GPT(gpt_config(name, vocab_size)).parameters())


@pytest.mark.parametrize('program', SETTINGS)
@pytest.mark.parametrize('name', SHIPPED)
def test_config_parses_for_every_program_into_the_same_model(name, program):
    s, t = settings(name, program), settings(name)
    assert {field: s[field] for field in MODEL} == {field: t[field] for field in MODEL}
    given = configurator.parse(SETTINGS['train'], [f'config/{name}'], echo=False).given
    for key in {'out_dir', 'dataset'} & s.keys() & given.keys():
        assert s[key] == t[key]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        plan_kv(gpt_config(name, 65))


def test_parameters_are_gpt2s_and_the_demo_has_no_more_than_its_baseline_and_hardly_fewer():
    # nanoGPT's count: no biases, vocabulary padded
    assert n_params('train_gpt2.py', 50304) == 124_373_760
    plan = plan_kv(gpt_config('train_gpt2.py', 50304))
    assert plan == plan.vanilla()
    demo, baseline = (n_params(name, 4096) for name in ('train_mqa_local.py', 'train_rope_mha.py'))
    assert 0.99 * baseline < demo <= baseline


def test_the_three_compared_configs_differ_in_memory_settings_alone():
    demo, *others = map(settings, COMPARED)
    for other in others:
        different = {name for name in demo if demo[name] != other[name]}
        assert different <= MEMORY | {'mlp_hidden', 'out_dir'}
        assert other['mlp_hidden'] == 0


@pytest.mark.parametrize('name', COMPARED + ['train_text.py'])
def test_the_native_decode_step_runs_the_demo(name):
    config = gpt_config(name, 4096)
    widths = config.n_embd, config.resolved_head_dim, config.resolved_mlp_hidden
    assert not any(width % MULTIPLE for width in widths)
