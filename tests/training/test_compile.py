"""With every recomputation policy the training step is one graph, compiled only once."""
import pytest
import torch
import torch._dynamo

from model import GPT, GPTConfig
from training.loss import linear_cross_entropy
from training.recompute import set_recompute
from training.run import prepare

CONFIG = dict(block_size=48, vocab_size=78, n_layer=4, n_head=4, n_embd=32, n_kv_head=1,
              layer_pattern='LLG', kv_share='AAB',
              share_global_kv=True, window_size=16, pos_embedding='rope', qk_norm=True, bias=False)


def train(model, call, autocast, steps=3):
    """Return the losses and the last gradients of a few steps of plain SGD."""
    losses = []
    for k in range(steps):
        x, y = torch.randint(78, (2, 2, 48), generator=torch.Generator().manual_seed(k))
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            loss = call(x, y)[1]
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('policy, chunked_loss, autocast', [
    ('selective', True, True), ('block', True, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ('mlp', False, False), ('none', True, True), ('none', False, False), ('sqrt', True, False),
        ('every:3', False, False)))])
@torch._dynamo.config.patch(error_on_recompile=True)
def test_training_is_one_graph(policy, chunked_loss, autocast):
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(**CONFIG))
        model.loss_fn = linear_cross_entropy if chunked_loss else None
        set_recompute(model, policy)
        prepare(model, 48)
        call = model
        if compiled:
            call = torch.compile(model, fullgraph=True, backend='aot_eager_decomp_partition')
        found.append(train(model, call, autocast))
    (losses, gradients), (expected_losses, expected) = found
    assert losses == pytest.approx(expected_losses, abs=2e-3 if autocast else 1e-5)
    bound = max(g.abs().max() for g in expected) * (0.05 if autocast else 1e-4)
    assert all((g - e).abs().max() < bound for g, e in zip(gradients, expected))
