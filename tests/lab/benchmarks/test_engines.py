"""Comparison with transformers: times of tokens, and tokens that rounding may change."""
import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from engine.weights.quantize import quantize_weights
from lab.benchmarks.engines import HF_CACHES, HuggingFace, Ours
from lab.benchmarks.generation import same_tokens
from tests.helpers.models import VOCAB, random_model, tokens

VANILLA = GPTConfig(n_layer=2, n_head=2, n_embd=12, block_size=32, vocab_size=VOCAB)


@pytest.mark.parametrize('name', HF_CACHES)
def test_the_first_token_is_timed_apart_from_the_later_ones(name, fake_clock):
    pytest.importorskip('transformers')
    theirs = HuggingFace(random_model(VANILLA, torch.float32), None, None)

    def hook(*_):
        fake_clock.time += 3.0 if not fake_clock.time else 0.5
    theirs.model.register_forward_hook(hook)
    made = theirs.sides(tokens(3, 9), 6, None)[name]()
    assert (made.ttft, made.tpot) == (3.0, 0.5) and made.tokens.shape == (3, 6)


def test_tokens_may_differ_where_rounding_decides_and_nowhere_else(monkeypatch):
    model, prompt = random_model(VANILLA, torch.float32), tokens(1, 4)
    ours = Ours(model, prompt, 3)().tokens
    unseen = next(t for t in range(VOCAB) if t not in prompt and t not in ours)
    theirs = torch.tensor([[int(ours[0, 0]), unseen, unseen]])
    with pytest.raises(UserError, match='token 1 of row 0'):
        same_tokens(model, prompt, ours, theirs, 'hf')
    with torch.no_grad():  # now the two tokens are equally likely everywhere
        model.lm_head.weight[unseen] = model.lm_head.weight[ours[0, 1]]
    assert same_tokens(model, prompt, ours, theirs, 'hf') == {'rows_equal': 0, 'rows': 1}
    with torch.no_grad():
        model.lm_head.weight[unseen] *= 0.9
    with pytest.raises(UserError, match='more than rounding'):
        same_tokens(model, prompt, ours, theirs, 'hf')
    only_counted = same_tokens(model.bfloat16(), prompt, ours, theirs, 'hf')
    assert only_counted['rows_equal'] == 0
    # quantized weights are given the noise of their logits
    quantize_weights(model.float(), 'int8')
    with pytest.raises(UserError, match='more than rounding'):
        same_tokens(model, prompt, ours, theirs, 'hf')
    plain = model.forward  # logits that differ by 9 where there is a cache
    monkeypatch.setattr(model, 'forward', lambda idx, cache=0: [plain(idx)[0] + 9 * (cache != 0)])
    assert same_tokens(model, prompt, ours, theirs, 'hf') == {'rows_equal': 0, 'rows': 1}
