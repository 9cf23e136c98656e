"""The model compiles into a single graph, even with FlexAttention in its local layers."""
import pytest
import torch

from attention.kernels.choose import PREFERRED
from model import GPT, GPTConfig
from training.run import prepare


@pytest.mark.parametrize('flex', [False, True], ids=['blockwise', 'flex'])
def test_forward_is_one_graph_and_equals_eager(monkeypatch, flex):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=78, n_layer=3, n_head=4, n_embd=64, n_kv_head=1,
                          layer_pattern='LLG', kv_share='AAB', share_global_kv=True, window_size=16,
                          pos_embedding='rope', qk_norm=True)).eval()
    idx = torch.randint(78, (2, 64))
    with torch.no_grad():
        eager, _ = model(idx, all_logits=True)
        if flex:
            monkeypatch.setitem(PREFERRED, 'local', ('flex',))
            monkeypatch.setattr('attention.kernels.choose.why_unavailable', lambda *_: '')
            monkeypatch.setitem(PREFERRED, 'global', ('sdpa',))
        prepare(model, 64)
        compiled, _ = torch.compile(model, fullgraph=True, backend='aot_eager')(idx,
                                                                                all_logits=True)
    assert (compiled - eager).abs().max() < 1e-6
