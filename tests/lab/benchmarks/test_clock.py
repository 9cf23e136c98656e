"""The order of timings, which ones are kept, and that ratios are computed per round."""
import pytest
import torch

from config.gpt_config import GPTConfig
from lab.benchmarks import clock
from lab.benchmarks.decode import DecodeRound
from tests.helpers.models import FULL_STACK, random_model


def test_sides_take_turns_and_the_first_round_is_not_kept():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in 'ab'}
    found = clock.alternate(sides, 3, 'test')
    assert order == ['a', 'b'] * 4
    assert found == {'a': [3, 5, 7], 'b': [4, 6, 8]}


def test_ratios_are_medians_of_pairs_not_ratios_of_medians():
    ratio = clock.paired([2.0, 30.0, 4.0, 1.0, 8.0], [1.0, 10.0, 4.0, 4.0, 1.0])
    assert ratio == {'median': 2.0, 'min': 0.25, 'max': 8.0, 'each': [2.0, 3.0, 1.0, 0.25, 8.0]}
    with pytest.raises(ValueError):
        clock.paired([1.0, 2.0], [1.0])


def test_a_decode_round_times_its_steps_and_not_the_filling(monkeypatch):
    model, calls = random_model(GPTConfig(**FULL_STACK), torch.float32), []
    seconds = [0.0]
    monkeypatch.setattr(clock, 'now', lambda: sum(seconds))

    def forwarded(_, args, output):
        seconds.append(0.25)
        calls.append((args[0], output[0]))
    model.register_forward_hook(forwarded)
    one = DecodeRound(model, 3, 10, 15, 5, 'auto')
    fill = one.cache.fill_

    def slow_fill(length):
        seconds.append(100)
        return fill(length)
    monkeypatch.setattr(one.cache, 'fill_', slow_fill)
    assert one() == one() == 0.25
    assert one.cache.lengths.tolist() == [15, 15, 15] and len(calls) == 10
    for (idx, logits), (after, _) in zip(calls[:4], calls[1:5]):
        assert idx.shape == (3, 1)
        assert torch.equal(after, logits[:, -1].argmax(-1, keepdim=True))
