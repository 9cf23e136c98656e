"""Batches, and prefetched ones, which equal those made one by one; orders and wide ids."""
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from data.making.writer import TokenWriter
from training.loop.batches import Prefetched, TokenBatches
from tests.helpers.datasets import write_dataset

CPU = torch.device('cpu')
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path, {'train': np.arange(500), 'val': 1000 + np.arange(30)}, None)
    return tmp_path


def batches_of(folder, depth=2, **more):
    return Prefetched(TokenBatches(folder, 8, 4, CPU, torch.Generator().manual_seed(5), **more),
                      depth)


# -- batches

def test_windows_are_nanogpts_and_targets_one_token_later(folder):
    batches = TokenBatches(folder, 8, 4, CPU)
    torch.manual_seed(3)
    x, y = batches.next()
    torch.manual_seed(3)
    assert torch.equal(x, torch.randint(500 - 8, (4,))[:, None] + torch.arange(8))
    assert x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
    # the last token is reached, and no window is cut
    ends = {int(y[-1]) for _ in range(1000) for y in batches.next()[1]}
    assert max(ends) == 499 and min(ends) == 8


def test_evaluation_windows_are_always_the_same_and_shared_by_ranks(folder):
    def windows(seed=7, **ranks):
        batches = TokenBatches(folder, 8, 4, CPU, **ranks)
        return [x for x, _ in batches.evaluation('val', 5, seed)]
    before = torch.get_rng_state()
    alone = windows()
    assert torch.equal(torch.get_rng_state(), before)  # training has its own
    assert min(x.min() for x in alone) >= 1000 and not torch.equal(alone[0], alone[1])
    assert torch.equal(torch.cat(alone), torch.cat(windows()))
    assert not torch.equal(torch.cat(alone), torch.cat(windows(seed=8)))

    shared = [windows(rank=rank, world_size=2) for rank in range(2)]
    assert [len(part) for part in shared] == [3, 2]
    assert all(torch.equal(x, shared[k % 2][k // 2]) for k, x in enumerate(alone))


def test_one_token_more_than_block_size_is_enough(tmp_path):
    write_dataset(tmp_path, {'train': np.arange(9), 'val': np.arange(8)}, None)
    with pytest.raises(UserError, match='val.bin has 8 tokens.*block_size=8'):
        TokenBatches(tmp_path, 8, 4, CPU)
    write_dataset(tmp_path, {'train': np.arange(9), 'val': np.arange(9)}, None)
    assert TokenBatches(tmp_path, 8, 4, CPU).next()[1][0].tolist() == list(range(1, 9))


# -- prefetched

@pytest.mark.parametrize('order', ['random', 'sequential', 'shuffled'])
@pytest.mark.parametrize('depth', [1, 5])
def test_they_are_those_made_one_by_one_from_any_state_and_shared_by_ranks(folder, depth, order):
    plain, ahead = (batches_of(folder, n, order=order) for n in (0, depth))
    ranks = [batches_of(folder, depth, order=order, rank=rank, world_size=3) for rank in range(3)]
    states, expected = [], []
    for k in range(39):
        expected.append(plain.batches.next())
        for batches in (ahead, ranks[k % 3]):
            assert all(map(torch.equal, batches.next(), expected[k]))
        assert torch.equal(ahead.state, plain.batches.state)
        states.append(ahead.state)
    for batches in (plain, ahead):
        found = [batches.resume(states[7])] + [batches.next() for _ in range(8)]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(found, expected[7:]))
    for batches in (ahead, *ranks):
        batches.close()


def test_waiting_is_counted_and_no_thread_stays(folder, monkeypatch):
    before, batches, plain = threading.active_count(), batches_of(folder, 2), TokenBatches.next
    assert batches.share is None
    monkeypatch.setattr(TokenBatches, 'next', lambda self: time.sleep(0.03) or plain(self))
    batches.next()
    assert threading.active_count() == before + 1 and batches.waited == 0  # not for the first
    [batches.next() for _ in range(8)]
    assert batches.waited > 0.08 and 0 < batches.share <= 1  # 8 of 0.03 s, 2 of them prefetched
    for _ in range(2):
        batches.close()
        assert threading.active_count() == before


def test_an_error_is_told_again_until_it_goes_back(folder, interrupt):
    batches = batches_of(folder, 2)
    interrupt('training.loop.batches.TokenBatches.next', {3: 'before'}.get,
              SystemExit('not an Exception'))
    batches.next()
    batches.next()
    state = batches.state
    for _ in range(2):
        with pytest.raises(SystemExit, match='not an Exception'):
            batches.next()
    assert torch.equal(batches.state, state)
    batches.resume(state)
    assert len(batches.next()) == 2
    batches.close()


def test_a_process_that_ends_while_its_thread_is_at_work_ends_well(tmp_path):
    """torch in a separate thread would abort it at interpreter shutdown."""
    program = """if True:
        import torch
        from training.loop.batches import Prefetched
        class Endless:
            state, device, evaluation = None, torch.device('cpu'), None
            def next(self):
                for _ in range(200):
                    torch.randn(300, 300) @ torch.randn(300, 300)
        batches = Prefetched(Endless(), 4)
        batches.next()
        print('done')
    """
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'done\n', '')


# -- token files

def test_wide_ids(tmp_path):
    meta, ids = {'vocab_size': 200_000, 'dtype': 'uint32'}, 150_000 + np.arange(100)
    with TokenWriter(tmp_path, meta, shard_tokens=40) as out:
        out.add('train', ids)
        out.add('val', ids[:50])
    assert [path.stat().st_size for path in sorted(tmp_path.glob('train_*.bin'))] == [160, 160, 80]
    x, y = batches_of(tmp_path, order='sequential', vocab_size=200_000).next()
    # across shards
    assert x.flatten().tolist() == list(range(150_000, 150_032)) and y[0, -1] == 150_008
    with pytest.raises(UserError, match='allowed are 0 to 199999'):
        TokenWriter(tmp_path / 'b', meta).add('train', np.array([200_000]))
    (tmp_path / 'train_00002.bin').write_bytes(b'abcdef')
    with pytest.raises(UserError,
                       match=r"train_00002\.bin' has 6 bytes; allowed is a pos.* multiple of 4"):
        batches_of(tmp_path)
