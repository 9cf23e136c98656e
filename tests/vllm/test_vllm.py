"""Exported models in vLLM on a CPU: greedy texts equal ours. Needs make test-vllm."""
import json
import os

import pytest
import torch

from common.gpt_config import GPTConfig
from interop.export import hf_model
from tests.helpers.models import full_logits, random_model

pytest.importorskip('vllm', reason='make test-vllm has an environment with vLLM')
os.environ.setdefault('VLLM_ENABLE_V1_MULTIPROCESSING', '0')

V, N_NEW, MOST = 96, 40, 512
# vLLM's CPU kernels need heads of 32
SHAPE = dict(n_layer=12, n_head=4, n_embd=128, head_dim=32, vocab_size=V, block_size=MOST)
FULL = dict(SHAPE, n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True,
            pos_embedding='rope', qk_norm=True, window_size=32, bias=False)
SHAPES = {'vanilla': SHAPE, 'full': FULL, 'heads of 24': dict(FULL, head_dim=24),  # kept in 32
          'gqa': dict(SHAPE, n_kv_head=2, layer_pattern='LG', window_size=20, pos_embedding='rope',
                      rope_theta_global=1e5, gelu='tanh', mlp_hidden=320, attn_gate=True),
          'tied': dict(FULL, kv_tied='all', n_kv_head=2, attn_sink=True, gelu='relu2',
                       rope_fraction_global=0.3, bias=True),
          'tied global': dict(FULL, kv_tied='global', attn_sink=True, rope_fraction_global=0.0),
          'latents': dict(FULL, kv_latent=64, attn_sink=True, rope_fraction_global=0.0, bias=True)}


def prompts() -> list[list[int]]:
    """32 prompts, some longer than ten windows. Many share a prefix, for prefix caching."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 380, (32,), generator=generator).tolist()
    common = torch.randint(V, (MOST,), generator=generator).tolist()
    found = []
    for k, n in enumerate(lengths):
        own = torch.randint(V, (n,), generator=generator).tolist()
        found.append(common[:n * (k % 4) // 4] + own[n * (k % 4) // 4:])
    return found


@pytest.mark.parametrize('name, ranks', [*((name, 1) for name in SHAPES), ('full', 2), ('gqa', 2),
                                         ('tied', 2), ('latents', 2)])
def test_greedy_texts_are_ours(tmp_path, monkeypatch, name, ranks):
    """If a token differs, rounding decided between two equally likely ones."""
    from vllm import LLM, SamplingParams
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        monkeypatch.setenv('VLLM_CPU_OMP_THREADS_BIND', f'{cores[0]}|{cores[-1]}')
    model = random_model(GPTConfig(**SHAPES[name]), torch.float32, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.35 if p.dim() > 1 else 1)  # so that texts do not repeat themselves at once
    hf_model(model).save_pretrained(tmp_path)
    llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, dtype='float32', enforce_eager=True,
              max_model_len=MOST,
              tensor_parallel_size=ranks, enable_prefix_caching=True, max_num_seqs=8,
              kv_cache_memory_bytes=2 ** 28)
    asked = prompts()[::4 if ranks > 1 else 1]
    params = SamplingParams(temperature=0, max_tokens=N_NEW, detokenize=False, ignore_eos=True)
    for _ in range(2):  # the second time from the prefix cache
        answers = llm.generate([{'prompt_token_ids': ids} for ids in asked], params)
        texts, same = set(), 0
        for ids, answer in zip(asked, answers):
            text = list(answer.outputs[0].token_ids)
            logits = full_logits(model, torch.tensor([ids + text]))[0, len(ids) - 1:-1]
            best = logits.max(-1).values
            chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            assert len(text) == N_NEW and (best - chosen).max() < 2e-3
            same += torch.equal(logits.argmax(-1), torch.tensor(text))
            texts.add(tuple(text))
        assert same >= 0.9 * len(asked) and len(texts) > 0.75 * len(asked)
    del llm


def test_weights_of_another_shape_are_refused(tmp_path):
    """vLLM would silently load the part that it needs."""
    from vllm import LLM
    hf_model(random_model(GPTConfig(**FULL, mlp_hidden=320),
                          torch.float32)).save_pretrained(tmp_path)
    path = tmp_path / 'config.json'
    config = json.loads(path.read_text())
    config['nanokv']['mlp_hidden'] = config['intermediate_size'] = 256
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError,
                       match=r'mlp.c_fc.weight is \(320, 128\), config.json says \(256, 128\)'):
        LLM(model=str(tmp_path), skip_tokenizer_init=True, dtype='float32', enforce_eager=True,
            max_model_len=MOST, kv_cache_memory_bytes=2 ** 28)
