"""data_seed: the order of the batches whatever the model is; without it, nanoGPT's."""
import torch

from tests.programs.support import VANILLA, run_train
from training import batches


def seen(tmp_path, monkeypatch, name, **settings):
    """The batches that a run trains on."""
    rows, plain = [], batches.TokenBatches.next
    with monkeypatch.context() as patch:
        patch.setattr(batches.TokenBatches, 'next', lambda self: rows.append(plain(self)) or rows[-1])
        run_train(tmp_path / name, VANILLA, max_iters=3, **settings)
    return torch.stack([x for x, _ in rows])


def test_runs_of_a_data_seed_see_the_same_batches_whatever_their_weights(tmp_path, monkeypatch):
    small, large, other = (seen(tmp_path, monkeypatch, str(k), data_seed=seed, n_layer=n, seed=k) for k, (seed, n) in
                           enumerate([(5, 1), (5, 3), (6, 1)]))
    assert torch.equal(small, large) and not torch.equal(small, other)


def test_without_one_the_weights_are_drawn_first(tmp_path, monkeypatch):
    small, again, large = (seen(tmp_path, monkeypatch, str(k), n_layer=n) for k, n in enumerate((1, 1, 3)))
    assert torch.equal(small, again) and not torch.equal(small, large)
