"""Exported models in vLLM, on a CPU: greedy texts are ours. Needs its environment: make test-vllm."""
import os

import pytest
import torch

from config.gpt_config import GPTConfig
from interop.export import hf_model
from tests.helpers.models import full_logits, random_model

pytest.importorskip('vllm', reason='make test-vllm has an environment with vLLM')
os.environ.setdefault('VLLM_ENABLE_V1_MULTIPROCESSING', '0')

V, N_NEW, MOST = 96, 40, 512
SHAPE = dict(n_layer=12, n_head=4, n_embd=128, head_dim=32, vocab_size=V, block_size=MOST)  # vLLM's CPU kernels want heads of 32
FULL = dict(SHAPE, n_kv_head=1, layer_pattern='LLLLLG', kv_share='AABBBC', share_global_kv=True, pos_embedding='rope',
            qk_norm=True, window_size=32, bias=False)
SHAPES = {'vanilla': SHAPE, 'full': FULL,
          'gqa': dict(SHAPE, n_kv_head=2, layer_pattern='LG', window_size=20, pos_embedding='rope', rope_theta_global=1e5,
                      gelu='tanh', mlp_hidden=320)}


def prompts() -> list[list[int]]:
    """32, of many lengths, some past ten windows; many begin alike, so that prefix caching has something to do."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 380, (32,), generator=generator).tolist()
    common = torch.randint(V, (MOST,), generator=generator).tolist()
    found = []
    for k, n in enumerate(lengths):
        own = torch.randint(V, (n,), generator=generator).tolist()
        found.append(common[:n * (k % 4) // 4] + own[n * (k % 4) // 4:])
    return found


@pytest.mark.parametrize('name', SHAPES)
def test_greedy_texts_are_ours(tmp_path, name):
    """Where a token is another, rounding decided between two that are as likely."""
    from vllm import LLM, SamplingParams
    model = random_model(GPTConfig(**SHAPES[name]), torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.35 if p.dim() > 1 else 1)  # so that texts do not repeat themselves at once
    hf_model(model).save_pretrained(tmp_path)
    llm = LLM(model=str(tmp_path), skip_tokenizer_init=True, dtype='float32', enforce_eager=True, max_model_len=MOST,
              enable_prefix_caching=True, max_num_seqs=8, gpu_memory_utilization=0.1)
    asked = prompts()
    params = SamplingParams(temperature=0, max_tokens=N_NEW, detokenize=False, ignore_eos=True)
    for _ in range(2):  # the second time out of the prefix cache
        answers = llm.generate([{'prompt_token_ids': ids} for ids in asked], params)
        texts, same = set(), 0
        for ids, answer in zip(asked, answers):
            text = list(answer.outputs[0].token_ids)
            logits = full_logits(model, torch.tensor([ids + text]))[0, len(ids) - 1:-1]
            best, chosen = logits.max(-1).values, logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            assert len(text) == N_NEW and (best - chosen).max() < 2e-3
            same += torch.equal(logits.argmax(-1), torch.tensor(text))
            texts.add(tuple(text))
        assert same >= 30 and len(texts) > 24
    del llm
