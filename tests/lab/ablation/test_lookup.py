"""Facts recalled by content: what is counted, what a fact costs, and a ladder end to end."""
import json

import pytest
import torch

import ablate
from config.gpt_config import GPTConfig
from data.recall.tasks import LookupTask
from lab.ablation import lookup as looking
from lab.ablation import tables
from lab.ablation.summary import lookup_of_row
from lab.ablation.tables import listed
from model import GPT
from tests.lab.ablation.test_ablate import LADDER

TASK = LookupTask(block_size=60, pairs=(9, 2, 5), gap=11, n_keys=30, n_values=20)
CONFIG = GPTConfig(block_size=60, vocab_size=TASK.vocab_size, n_layer=3, n_head=2, n_embd=8,
                   layer_pattern='LLG', window_size=4, n_kv_head=1)
ROWS = """
base = 'config/train_lookup.py'
lookup_task = 'pairs=1,2 gap=4 n_keys=8 n_values=8 sequences=20'
block_size = 16
rows = {'MHA': {}, '+ int8 KV': dict(kv_dtype='int8')}
"""


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


def test_what_the_table_says():
    def run(facts):
        return {'accuracy': {'2': 1.0, '4': facts / 4}, 'facts': facts,
                'bytes_per_fact': 60 / facts if facts else None, 'kv_bytes': 60,
                'rows': 8, 'gap': 3, 'n_values': 50, 'local_reach': 2}
    found = lookup_of_row([run(4), run(0), run(4)])
    row = {'name': 'a', 'side': False, 'above': '', 'lookup': found}
    table = tables.lookups([row])
    assert table.rows[0][1:] == ('100.0 (0.0)', '66.7 (57.7)', '4 (x2), 0', '60', '15 (x2)')
    assert 'chance is 2.0' in table.title
    assert listed([]) == '-'


@pytest.mark.slow
def test_a_ladder_of_it(tmp_path, capsys):
    path, folder = tmp_path / 'ablate_facts.py', tmp_path / 'results'
    path.write_text(LADDER + ROWS)
    ablate.main([str(path), f'--folder={folder}', '--device=cpu', '--json=True'])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])['rows']
    state = 2 * 2 * 4 * 4  # of the offset keys of 2 layers, 2 heads of 8
    for row, nbytes in zip(rows, (2 * 2 * 16 * 16 * 4 + state, 2 * 2 * 16 * 2 * (8 + 2) + state)):
        found = row['lookup']
        assert found['kv_bytes'] == nbytes and set(found['accuracy']) == {'1', '2'}
        assert len(found['facts']) == 1 and all(
            0 <= each['mean'] <= 1 for each in found['accuracy'].values())
    assert (folder / 'lookup.png').stat().st_size > 1000
