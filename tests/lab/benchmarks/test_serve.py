"""bench.py --mode=serve: random lengths, the same requests on both sides, and errors."""
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.weights.quantize import quantize_weights
from lab.benchmarks import clock, serve
from tests.helpers.models import FULL_STACK, VOCAB, random_model, tokens

SETTINGS = SimpleNamespace(kv_dtype='auto', prefill_chunk=0, repeats=5, captured=True)


def test_lengths_are_log_uniform_and_the_seeds():
    def lengths_of(text, seed=1, n=4000):
        return serve.output_lengths(SimpleNamespace(output_lengths=text, requests=n, seed=seed))
    lengths, again, other = (lengths_of('16,256', seed) for seed in (1, 1, 2))
    assert lengths == again != other and (min(lengths), max(lengths)) == (16, 256)
    assert sum(map(math.log, lengths)) / 4000 == pytest.approx(math.log(16 * 256) / 2, abs=0.05)
    assert lengths_of('5', n=3) == [5, 5, 5]
    for text in ('9,3', '1,2,3', '0,4', ''):
        with pytest.raises(UserError, match='output_lengths'):
            lengths_of(text)


def test_all_sides_give_each_request_its_tokens():
    model = random_model(GPTConfig(**FULL_STACK), torch.float32)
    lengths = [3, 9, 1, 14, 5, 2, 8]
    prompts = [[n, n + 1, 3] for n in range(7)]
    asked = model, 3, 3 + 14, lengths, SETTINGS
    sides = {'ours': serve.through_engine(*asked),
             'other': serve.through_engine(*asked, scheduler=serve.StaticScheduler)}
    found = clock.alternate(sides, 2, 'test', [prompts, prompts[::-1], prompts])
    for served in zip(*found.values()):  # state kept between rounds does no harm
        assert served[0].tokens == served[1].tokens
        for one in served:
            assert list(map(len, one.tokens)) == lengths and len(one.firsts) == 7
            assert all(0 < first <= one.seconds for first in one.firsts) and one.kv_held > 0
    texts = served[0].tokens
    assert serve.same_texts(model, prompts, texts, texts, 'x') == {'rows_equal': 7, 'rows': 7}


def test_texts_may_differ_where_rounding_decides_and_nowhere_else():
    model = random_model(GPTConfig(n_layer=2, n_head=2, n_embd=12, block_size=32,
                                   vocab_size=VOCAB), torch.float32)
    prompt = tokens(1, 4)[0].tolist()
    [ours] = serve.through_engine(model, 1, 7, [3], SETTINGS)([prompt]).tokens
    unseen = next(t for t in range(VOCAB) if t not in prompt + ours)
    same = partial(serve.same_texts, model, [prompt], [ours], [[ours[0], unseen, unseen]], 'vllm')
    with pytest.raises(UserError, match='vllm differ in token 1 of text 0'):
        same()
    with torch.no_grad():  # now the two tokens are equally likely everywhere
        model.lm_head.weight[unseen] = model.lm_head.weight[ours[1]]
    assert same() == {'rows_equal': 0, 'rows': 1}
    with torch.no_grad():
        model.lm_head.weight[unseen] *= 0.9
    with pytest.raises(UserError, match='more than rounding'):
        same()
    model.bfloat16()
    assert same()['rows_equal'] == 0  # only counted
    quantize_weights(model.float(), 'int8')
    assert same()['rows_equal'] == 0
