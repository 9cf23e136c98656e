"""How the vLLM plugin reads config.json, which does not need vLLM itself."""
import dataclasses
import re
from pathlib import Path

import pytest

from common.gpt_config import GPTConfig, fields_with, model_args
from interop.huggingface import derived_keys
from interop.nanokv_vllm.config import DEFAULTS, NanoKVConfig
from interop.nanokv_vllm.shapes import shapes
from kv import account
from kv.plan import plan_kv
from model import GPT
from tests.helpers.models import FULL_STACK

SHAPES = [FULL_STACK, dict(FULL_STACK, bias=False, qk_norm=False, n_kv_head=2, mlp_hidden=30,
                           head_dim=8),
          dict(FULL_STACK, pos_embedding='learned', layer_pattern='G', kv_share=''),
          dict(FULL_STACK, attn_sink=True, kv_tied='all', n_kv_head=2, attn_gate=True),
          dict(FULL_STACK, layer_pattern='LG', kv_share='', kv_tied='global'),
          dict(FULL_STACK, kv_latent=12, rope_fraction_global=0.0)]


def test_it_knows_the_fields_that_there_are():
    assert DEFAULTS == {name: getattr(GPTConfig, name) for name in fields_with('known', 'export')}
    with pytest.raises(ValueError, match="colour='red' is not supported by this version of nanoKV"):
        NanoKVConfig(nanokv={'colour': 'red'})
    with pytest.raises(ValueError, match='nanokv.key_offset=True: .*vLLM'):
        shapes(NanoKVConfig(nanokv={'key_offset': True}))


def test_the_docs_have_every_field_and_name_those_that_the_export_refuses():
    folder = Path(__file__).parents[2] / 'docs'
    table = (folder / 'interop.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| (.*) \| yes \| refused \| refused \|$', table, re.MULTILINE)
    names = {f.name for f in dataclasses.fields(GPTConfig)}
    refused = names - set(fields_with('known', 'export'))
    assert set(re.findall(r'`(\w+)`', ' '.join(rows))) == refused
    text = ' '.join(path.read_text(encoding='utf-8') for path in folder.glob('*.md'))
    assert names - set(re.findall(r'\w+', text)) <= {'vocab_size'}


@pytest.mark.parametrize('shape', SHAPES)
def test_shapes_and_accounted_bytes_are_those_of_what_is_exported(shape):
    config = GPTConfig(**shape)
    keys = {'nanokv': model_args(config), **derived_keys(config)}
    found = account(keys, max_seq_len=40, kv_dtype='bfloat16')
    assert found['bytes'] == plan_kv(config).nbytes(1, 40, 'bfloat16')
    weights = GPT(config).state_dict()
    assert shapes(NanoKVConfig(**keys)) == {name: tuple(x.shape) for name, x in weights.items()}
