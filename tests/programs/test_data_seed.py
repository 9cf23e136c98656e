"""data_seed: the same batches for any model. data_order: kept through interruptions."""
import pytest
import torch

from config.errors import UserError
from tests.programs.support import HARD, VANILLA, losses, run_train
from training import batches


def seen(tmp_path, monkeypatch, name, **settings):
    """The batches that a run trains on."""
    rows, plain = [], batches.TokenBatches.next

    def recorded(self):
        rows.append(plain(self))
        return rows[-1]
    with monkeypatch.context() as patch:
        patch.setattr(batches.TokenBatches, 'next', recorded)
        run_train(tmp_path / name, VANILLA, max_iters=3, **settings)
    return torch.stack([x for x, _ in rows[:4]])  # the prefetching thread may have made more


def test_runs_of_a_data_seed_see_the_same_batches_whatever_their_weights(tmp_path, monkeypatch):
    settings = [(5, 1), (5, 3), (6, 1)]
    small, large, other = (
        seen(tmp_path, monkeypatch, str(k), data_seed=seed, n_layer=n_layer, seed=k)
        for k, (seed, n_layer) in enumerate(settings))
    assert torch.equal(small, large) and not torch.equal(small, other)


def test_without_one_the_weights_are_drawn_first_as_in_nanogpt(tmp_path, monkeypatch):
    small, again, large = (
        seen(tmp_path, monkeypatch, str(k), n_layer=n) for k, n in enumerate((1, 1, 3)))
    assert torch.equal(small, again) and not torch.equal(small, large)


@pytest.mark.parametrize('order', ['random', 'sequential', 'shuffled'])
def test_a_run_goes_on_in_its_order_however_many_batches_were_ahead(tmp_path, order):
    config = dict(VANILLA, data_order=order, **HARD)
    run_train(tmp_path / 'whole', config, max_iters=9, data_prefetch=0)
    run_train(tmp_path / 'parts', config, max_iters=4, data_prefetch=7)
    run_train(tmp_path / 'parts', config, max_iters=9, data_prefetch=2, init_from='resume')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'parts')


def test_another_order_is_refused(tmp_path):
    run_train(tmp_path, max_iters=2, eval_interval=2, data_order='shuffled')
    for order in ('random', 'sequential'):
        with pytest.raises(UserError, match="trained with data_order='shuffled'.* go on with "
                                            "--data_order=shuffled"):
            run_train(tmp_path, max_iters=4, data_order=order, init_from='resume')


@pytest.mark.parametrize('settings, named', [
    (dict(data_prefetch=65), 'data_prefetch=65: at most 64'),
    (dict(data_seed=2 ** 70), str(2 ** 70)),
    (dict(dataset='recall', data_order='shuffled', block_size=20, recall_task='distances=3'),
     'makes its sequences')])
def test_wrong_settings(tmp_path, settings, named):
    with pytest.raises(UserError) as caught:
        run_train(tmp_path, **settings)
    assert named in str(caught.value)
