"""What is measured of trained weights: losses through the row's cache, recall, facts
looked up, and losses of identifiers in source code."""
import dataclasses

import numpy as np
import pytest
import torch

from common.errors import UserError
from common.gpt_config import GPTConfig
from data.bpe import encode_documents, learn_bpe, learned_encoding
from data.recall.tasks import LagTask, LookupTask
from data.tokenizer import BPETokenizer, CharTokenizer
from kv.cache import KVCache
from lab.ablation import lookup, measure
from lab.ablation.identifiers import NEW, Identifiers, find_identifiers, loss_by_distance, names_of
from model import GPT

ALPHABET = 'abcdefghijklm'
TOKENIZER = CharTokenizer({c: i for i, c in enumerate(ALPHABET)}, dict(enumerate(ALPHABET)))
WINDOWS = torch.randint(len(ALPHABET), (6, 65), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ladder(ladder_of):
    return ladder_of()


@pytest.fixture
def saved(ladder):
    """A checkpoint of row '+ windows'."""
    torch.manual_seed(0)
    config = ladder.trained_config(ladder.rows['+ windows'])
    model = GPT(config)
    for p in model.parameters():
        p.data.mul_(4)
    return {'model': model.state_dict(), 'model_args': vars(config)}


def test_a_row_is_judged_through_a_cache_of_its_own_storage(ladder, saved):
    row = ladder.rows['+ windows']
    model = measure.trained_model(ladder, row, saved, 'ckpt.pt')
    plain, int8, half = (
        measure.losses(model, dataclasses.replace(row, kv_dtype=kv_dtype), WINDOWS, TOKENIZER)[0]
        for kv_dtype in ('auto', 'int8', 'bfloat16'))
    assert plain['cache_minus_forward_largest'] < 1e-5
    assert plain['val_loss'] == pytest.approx(plain['val_loss_forward'], abs=1e-6)
    assert int8['cache_minus_forward_largest'] < 1e-3
    assert 0 < abs(int8['val_loss'] - plain['val_loss']) < 0.02
    assert 0 < half['cache_minus_forward_largest'] < 0.1
    assert plain['bytes'] == plain['tokens'] == 6 * 64
    assert plain['bits_per_byte'] == pytest.approx(plain['val_loss'] / np.log(2))


@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_a_cache_that_gives_other_losses_is_an_error(kv_dtype, ladder, saved, monkeypatch):
    row = dataclasses.replace(ladder.rows['+ windows'], kv_dtype=kv_dtype)
    model = measure.trained_model(ladder, row, saved, 'ckpt.pt')
    commit = KVCache.commit

    def forgetful(cache, *args, **kwargs):
        commit(cache, *args, **kwargs)
        cache.stores[0].zero_values(list(range(cache.batch_size)), int(cache.lengths.max()))
    monkeypatch.setattr(KVCache, 'commit', forgetful)
    with pytest.raises(RuntimeError, match='is not that of the forward pass'):
        measure.losses(model, row, WINDOWS, TOKENIZER)


def test_a_row_that_changes_at_inference_gets_converted_weights(ladder, saved):
    with pytest.raises(UserError, match='another model than row .*MQA'):
        measure.trained_model(ladder, ladder.rows['+ MQA'], saved, 'ckpt.pt')
    plain = measure.trained_model(ladder, ladder.rows['+ windows'], saved, 'ckpt.pt')
    tied = measure.trained_model(ladder, ladder.rows['tied later'], saved, 'ckpt.pt')
    assert len(tied.plan.slots) == 2 and len(plain.plan.slots) == 3
    name = 'transformer.h.1.attn.c_attn.weight'
    assert torch.equal(tied.state_dict()[name], plain.state_dict()[name][:32])


@pytest.mark.parametrize('right_at', [(7, 20), (20,), ()])
def test_recall_counts_what_is_asked_alone(ladder, saved, monkeypatch, right_at):
    """A model that predicts the right token always, never, or at only one distance."""
    model = measure.trained_model(ladder, ladder.rows['+ windows'], saved, 'ckpt.pt')
    task = LagTask(64, (7, 20))

    def logits_of(idx):
        out = torch.zeros(*idx.shape, task.vocab_size)
        for distance in right_at:
            if (idx == 64 + task.distances.index(distance)).any(1).all():
                out.scatter_(2, torch.roll(idx, distance, dims=1)[..., None], 1.0)
        return out
    monkeypatch.setattr(lookup, 'through_cache', lambda *args: logits_of)
    found = lookup.recall(model, 'float32', task, rows=32)
    assert found['local_reach'] == 2 * 7 and list(found['accuracy']) == [7, 20]
    for distance, share in found['accuracy'].items():
        assert share == 1.0 if distance in right_at else share < 0.05


# -- facts recalled by content

FACTS = LookupTask(block_size=60, pairs=(9, 2, 5), gap=11, n_keys=30, n_values=20)
SMALL = GPTConfig(block_size=60, vocab_size=FACTS.vocab_size, n_layer=3, n_head=2, n_embd=8,
                   layer_pattern='LLG', window_size=4, n_kv_head=1)


@pytest.fixture
def oracle(monkeypatch):
    """Answers are right unless `wrong(number of facts, distance)`, both tensors."""
    def install(wrong):
        def logits_of(idx):
            out = torch.zeros(*idx.shape, FACTS.vocab_size)
            same = (idx[:, :, None] == idx[:, None, :]) & (idx > 0)[:, :, None]
            same &= torch.ones_like(same[0]).tril(-1)
            fact = same.int().argmax(-1)
            answer = idx.gather(1, (fact + 1).clamp(max=idx.size(1) - 1))
            distance = torch.arange(idx.size(1)) - fact
            n = (idx > FACTS.n_keys).sum(1, keepdim=True) / 2
            out.scatter_(2, torch.where(wrong(n, distance), 0, answer)[..., None], 1.0)
            return out
        monkeypatch.setattr(lookup, 'through_cache', lambda *_: logits_of)
    return install


def test_facts_are_the_most_up_to_which_all_numbers_are_recalled(oracle):
    model = GPT(SMALL).eval()
    for first_wrong, facts in ((99, 9), (9, 5), (5, 2), (2, 0)):
        oracle(lambda n, distance, bad=first_wrong: (n == bad) & (distance > 0))
        found = lookup.lookup(model, 'int8', FACTS, rows=16)
        assert list(found['accuracy']) == [2, 5, 9]
        assert found['accuracy'] == {n: float(n != first_wrong) for n in (2, 5, 9)}
        assert found['facts'] == facts
        assert found['kv_bytes'] == model.plan.nbytes(1, 60, 'int8')
        assert found['bytes_per_fact'] == (found['kv_bytes'] / facts if facts else None)
    assert found['local_reach'] == 2 * 3


# -- identifiers of source code, against examples made by hand

FILES = ['def __init__(self, naïve_x):\n    # self\n    self.naïve_x = "naïve_x"\n',
         'for naïve_x in f(3):\n    pass\n', 'import os\nif (\n', '']


def named(source):
    text = source.encode()
    return [(name, text[start:end].decode()) for name, start, end in names_of(source)]


def test_names_are_identifiers_without_keywords_strings_and_comments():
    assert [name for name, _ in named(FILES[0])] == [
        '__init__', 'self', 'naïve_x', 'self', 'naïve_x']
    for source in (*FILES, 'é = "é"; b = é\r\nb\x0c = 1\n'):
        assert all(name == text for name, text in named(source))
    assert [name for name, _ in named(FILES[2])] == ['os']  # until the end that is missing
    assert [name for name, _ in named('x = f"{y} {z!r:>{w}}" + v\n')] == ['x', 'v']


@pytest.mark.parametrize('n_tokens', [257, 300])
def test_tokens_of_identifiers(n_tokens):
    """The tokens from start to end hold the identifier, and no token less would."""
    tokenizer = BPETokenizer(learned_encoding(learn_bpe(FILES, n_tokens)['stoi']))
    ids = encode_documents(tokenizer.encoding, FILES)
    found = find_identifiers(ids, tokenizer)
    names = [name for source in FILES for name, _ in named(source)]
    assert len(found.names) == len(names)
    assert len(set(zip(found.names.tolist(), names))) == len(set(names)) == len(set(found.names))
    for start, end, name in zip(found.starts, found.ends, names):
        pieces = [tokenizer.token_bytes(i) for i in ids[start:end]]
        assert name.encode() in b''.join(pieces)
        for less in (pieces[1:], pieces[:-1]):
            assert name.encode() not in b''.join(less)


def test_loss_by_distance_to_the_last_use_in_the_window():
    """Window 0 holds tokens 0 to 8, window 1 tokens 8 to 16. Token t costs t nats."""
    identifiers = Identifiers(starts=np.array([0, 2, 5, 7, 8, 10, 15]),
                              ends=np.array([1, 4, 6, 8, 10, 11, 18]),
                              names=np.array([0, 1, 0, 1, 1, 0, 1]))
    nats = np.array([range(1, 9), range(9, 17)], float)
    found = loss_by_distance(nats, np.array([0, 8]), identifiers)
    # 0 at 0 is the context's first token, no target; 1 at 8 ends beyond window 0 and has no loss
    # for its first token in window 1; 1 at 15 ends beyond window 1
    assert list(found.items()) == [(4, {'count': 2, 'nats': (5 + 7) / 2}),
                                   (NEW, {'count': 2, 'nats': (5 + 10) / 2})]
    with pytest.raises(UserError, match='BPE'):
        find_identifiers(np.array([0]), CharTokenizer({'a': 0}, {0: 'a'}))
