"""lab/scripts/nanogpt_parity.py: the loss over a split is the mean over its windows."""
import numpy as np
import pytest
import torch

from lab.scripts.nanogpt_parity import whole_split_loss
from model import GPT, GPTConfig


@pytest.mark.parametrize('batch_size', [1, 2, 16])
def test_the_whole_split_counts_each_window_once(batch_size):
    torch.manual_seed(0)
    config = GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=8)
    model = GPT(config).double().eval()
    tokens = np.random.default_rng(0).integers(11, size=45).astype(np.uint16)
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        windows = [ids[None, i:i + 9] for i in range(0, 37, 8)]
        wanted = [model(w[:, :-1], w[:, 1:])[1].item() for w in windows]
    assert len(wanted) == 5
    found = whole_split_loss(model, tokens, 8, batch_size)
    assert found == pytest.approx(sum(wanted) / 5, abs=1e-12)
