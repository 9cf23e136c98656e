"""What vLLM allocates for a request equals kv.models' account. Needs make test-vllm."""
import json
import os
import subprocess
import sys

import pytest

from config.gpt_config import GPTConfig
from interop.export import hf_model
from kv import account
from tests.helpers.elsewhere import ROOT
from tests.helpers.models import random_model

pytest.importorskip('vllm', reason='make test-vllm has an environment with vLLM')

T, STEP = 2048, 512
SHAPE = dict(vocab_size=96, hidden_size=128, intermediate_size=64, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=T)
CONFIGS = {
    'llama': SHAPE | dict(architectures=['LlamaForCausalLM'], num_hidden_layers=3),
    # 11 windows and 2 global layers: six groups of two layers, one of them filled up
    'gemma3_text': SHAPE | dict(architectures=['Gemma3ForCausalLM'], num_hidden_layers=13,
                                sliding_window=100)}
OURS = dict(n_layer=12, n_head=4, n_embd=128, head_dim=32, vocab_size=96, block_size=T, n_kv_head=1,
            layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, window_size=100,
            pos_embedding='rope', qk_norm=True)


@pytest.mark.parametrize('name', [*CONFIGS, 'nanokv'])
def test_bytes_of_a_request(name, tmp_path):
    if name == 'nanokv':
        hf_model(random_model(GPTConfig(**OURS))).save_pretrained(tmp_path)
        config = json.loads((tmp_path / 'config.json').read_text())
    else:
        config = CONFIGS[name] | {'model_type': name}
        (tmp_path / 'config.json').write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, '-m', 'interop.nanokv_vllm.kv', str(tmp_path), '--one',
         f'--max_model_len={T}', f'--max_num_batched_tokens={STEP}'], cwd=ROOT,
        env=os.environ | {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'},
        stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    page_size = min(group['block_size'] for group in found['groups'])
    ours = account(config, max_seq_len=T, page_size=page_size, step_tokens=STEP)
    assert ours['engines']['vLLM, prefill'] == found['bytes_per_request']
