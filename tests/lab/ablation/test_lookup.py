"""Facts recalled by content: what is counted, what a fact costs, and a ladder end to end."""

import pytest
import torch

from config.gpt_config import GPTConfig
from data.recall.tasks import LookupTask
from lab.ablation import lookup as looking
from model import GPT

TASK = LookupTask(block_size=60, pairs=(9, 2, 5), gap=11, n_keys=30, n_values=20)
CONFIG = GPTConfig(block_size=60, vocab_size=TASK.vocab_size, n_layer=3, n_head=2, n_embd=8,
                   layer_pattern='LLG', window_size=4, n_kv_head=1)
@pytest.fixture
def oracle(monkeypatch):
    """Answers are right unless `wrong(number of facts, distance)`, both tensors."""
    def install(wrong):
        def logits_of(idx):
            out = torch.zeros(*idx.shape, TASK.vocab_size)
            same = (idx[:, :, None] == idx[:, None, :]) & (idx > 0)[:, :, None]
            same &= torch.ones_like(same[0]).tril(-1)
            fact = same.int().argmax(-1)
            answer = idx.gather(1, (fact + 1).clamp(max=idx.size(1) - 1))
            distance = torch.arange(idx.size(1)) - fact
            n = (idx > TASK.n_keys).sum(1, keepdim=True) / 2
            out.scatter_(2, torch.where(wrong(n, distance), 0, answer)[..., None], 1.0)
            return out
        monkeypatch.setattr(looking, 'through_cache', lambda *_: logits_of)
    return install


def test_facts_are_the_most_up_to_which_all_numbers_are_recalled(oracle):
    model = GPT(CONFIG).eval()
    for first_wrong, facts in ((99, 9), (9, 5), (5, 2), (2, 0)):
        oracle(lambda n, distance, bad=first_wrong: (n == bad) & (distance > 0))
        found = looking.lookup(model, 'int8', TASK, rows=16)
        assert list(found['accuracy']) == [2, 5, 9]
        assert found['accuracy'] == {n: float(n != first_wrong) for n in (2, 5, 9)}
        assert found['facts'] == facts
        assert found['kv_bytes'] == model.plan.nbytes(1, 60, 'int8')
        assert found['bytes_per_fact'] == (found['kv_bytes'] / facts if facts else None)
    assert found['local_reach'] == 2 * 3
