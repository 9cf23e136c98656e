"""The order of timings, which ones are kept, and that ratios are computed per round."""
import pytest
import torch

from config.gpt_config import GPTConfig
from lab.benchmarks import clock
from lab.benchmarks.bandwidth import kv_read_per_step, weight_read_bytes
from lab.benchmarks.decode import DecodeRound, metrics
from lab.benchmarks.prefill import PrefillRound
from tests.helpers.models import FULL_STACK, random_model


@pytest.fixture
def model():
    return random_model(GPTConfig(**FULL_STACK), torch.float32)


def costs(fake_clock, model, seconds):
    """Make every forward of `model` advance the clock. Return the list of (input, logits)."""
    calls = []

    def hook(_, args, output):
        fake_clock.time += seconds(args[0])
        calls.append((args[0], output[0]))
    model.register_forward_hook(hook)
    return calls


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


def test_a_decode_round_times_its_steps_and_not_the_filling(model, fake_clock, monkeypatch):
    calls = costs(fake_clock, model, lambda idx: 0.25)
    one = DecodeRound(model, 3, 10, 15, 5, 'auto')
    fill = one.cache.fill_

    def slow_fill(length):
        fake_clock.time += 100
        return fill(length)
    monkeypatch.setattr(one.cache, 'fill_', slow_fill)
    assert one() == one() == 0.25
    assert one.cache.lengths.tolist() == [15, 15, 15] and len(calls) == 10
    for (idx, logits), (after, _) in zip(calls[:4], calls[1:5]):
        assert idx.shape == (3, 1)
        assert torch.equal(after, logits[:, -1].argmax(-1, keepdim=True))


def test_bytes_and_speeds_of_a_side(model):
    one = DecodeRound(model, 3, 10, 11, 1, 'auto')
    found = metrics(one, [0.5, 0.25, 1.0], [1000.0, 4000.0, 500.0])
    read = kv_read_per_step(model.plan, 'float32', 3, 10, 1) + weight_read_bytes(model, 3)
    assert found['tpot_ms']['median'] == 500 and found['tokens_per_second']['each'] == [6, 12, 3]
    assert found['bandwidth_share']['each'] == pytest.approx([read / 500, read / 1000, read / 500])
    assert (found['kv_bytes'], found['batch']) == (model.plan.nbytes(3, 11, 'float32'), 3)


def test_a_prefill_round_feeds_the_prompt_in_chunks(model, fake_clock):
    calls = costs(fake_clock, model, lambda idx: idx.size(1))
    for chunk, pieces in ((0, [13]), (5, [5, 5, 3])):
        calls.clear()
        one = PrefillRound(model, 2, 13, chunk, 'auto')
        assert one() == one() == 13  # seconds; the cache is empty again
        assert [idx.size(1) for idx, _ in calls] == 2 * pieces
        found = torch.cat([idx for idx, _ in calls[:len(pieces)]], dim=1)
        assert torch.equal(found, one.prompts)
