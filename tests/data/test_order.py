"""Orders of windows: each window once per epoch, for any number; the same order after resuming."""
import pytest
import torch

from data.order import make_order

GENERATOR = torch.Generator()


def order(name, n_tokens=101, size=5, seed=3):
    return make_order(name, n_tokens, size, GENERATOR.manual_seed(7), seed)


@pytest.mark.parametrize('name, seed', [('sequential', 3), ('shuffled', 3), ('shuffled', -2)])
def test_each_window_once_an_epoch(name, seed):
    """A window needs one more token, its last target."""
    assert order(name, n_tokens=100).n == 19 and order(name, n_tokens=101).n == 20
    epochs = order(name, seed=seed).draw(60).view(3, 20)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(0, 100, 5))
    assert (epochs[0].tolist() == sorted(epochs[0].tolist())) == (name == 'sequential')
    assert torch.equal(epochs[0], epochs[1]) == (name == 'sequential')


@pytest.mark.parametrize('name', ['random', 'sequential', 'shuffled'])
def test_from_a_former_place_it_goes_on_as_before(name):
    first = order(name)
    first.draw(13)
    state = first.state
    expected = first.draw(40)
    second = order(name)
    second.state = state
    assert torch.equal(second.draw(40), expected)
    assert expected.dtype == torch.int64 and 0 <= expected.min() and expected.max() <= 100 - 5


def test_however_it_is_drawn():
    whole, parts = order('shuffled').draw(60), order('shuffled')
    assert torch.equal(whole, torch.cat([parts.draw(n) for n in (1, 7, 30, 22)]))
    assert not torch.equal(whole, order('shuffled', seed=4).draw(60))


@pytest.mark.parametrize('name', ['sequential', 'shuffled'])
def test_with_windows_of_another_size_it_goes_on_behind_as_many_tokens(name):
    first, second = order(name, size=5), order(name, size=10)
    first.draw(13)
    second.state = first.state
    assert second.drawn == 6 and second.state.tolist() == [6, 10]
    with pytest.raises(ValueError, match='random order'):
        second.state = order('random').state
