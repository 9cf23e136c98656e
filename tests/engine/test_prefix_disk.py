"""Prefixes on disk: they survive a restart and an eviction; nobody is served what is damaged or
another model's."""
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from config.errors import UserError
from engine.blocks import allocated_nbytes
from engine.engine import Engine
from engine.params import SamplingParams
from engine.prefix_disk import DiskTier, _hash, fingerprint
from engine.weights import quantize_weights
from model import GPTConfig
from tests.helpers.models import random_model
from tests.helpers.serving import KINDS, TOKENIZER, alone, assert_same, budget_for, model_of, prompt

PARAMS = SamplingParams(6, seed=3)


def engine_of(folder, model=None, budget=10 ** 9, **more):
    return Engine(model or model_of('full stack'), 1, 60, page_size=4, prefill_chunk=12,
                  prefix_budget=budget,
                  prefix_folder=str(folder), tokenizer=TOKENIZER, **more)


def stored(folder, ids=None, **kinds):
    """An engine that has generated after `ids` and written its prefix cache to disk."""
    engine = engine_of(folder, **kinds)
    engine.generate([ids or prompt(40)], PARAMS)
    engine.close()
    return engine


def ask(engine, ids, params=PARAMS):
    """n_cached of a completion, which must be that of an engine without a prefix cache."""
    [completion] = engine.generate([ids], params)
    kv_dtype = engine.cache.kv_dtype
    assert_same(completion, alone(engine.model, ids, params, kv_dtype=kv_dtype,
                                  tokenizer=TOKENIZER))
    return completion.n_cached


def files(folder):
    return sorted(Path(folder).rglob('*.safetensors'))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])
def test_after_a_restart_the_past_is_there(tmp_path, kind, kv_dtype):
    model, ids = model_of(kind), prompt(40)
    first = engine_of(tmp_path, model, kv_dtype=kv_dtype)
    first.generate([ids], PARAMS)
    first.close()
    assert len(files(tmp_path)) == 11 and not list(tmp_path.rglob('*.tmp'))
    [completion] = engine_of(tmp_path, model, kv_dtype=kv_dtype).generate([ids + prompt(7, seed=1)],
                                                            PARAMS)
    assert completion.n_cached == 40
    assert_same(completion, alone(model, ids + prompt(7, seed=1), PARAMS, kv_dtype=kv_dtype,
                                  tokenizer=TOKENIZER))


def test_what_leaves_the_memory_comes_back_from_disk(tmp_path):
    engine = engine_of(tmp_path, budget=9_000, kv_dtype='int8')
    for seed in (0, 1, 2, 0, 1, 2):
        ids = prompt(40, seed=seed)
        n_cached = ask(engine, ids)
    assert n_cached == 36 and engine.prefix.stats.evicted > 10
    assert engine.prefix.nbytes <= 9_000


@pytest.mark.parametrize('damage',
                         ['truncated', 'emptied', 'changed', 'a byte', 'exchanged', 'gone'])
def test_a_damaged_file_counts_as_missing(tmp_path, damage):
    ids = prompt(40)
    stored(tmp_path)
    again, paths = engine_of(tmp_path), files(tmp_path)
    for path in paths:
        data = path.read_bytes()
        if damage == 'exchanged':
            shutil.copy(next(other for other in paths if other != path), path)
        elif damage == 'gone':
            path.unlink()
        else:
            path.write_bytes({'truncated': data[:-50], 'emptied': b'', 'changed': data[:9]
                              + b'x' * 30 + data[39:],
                              'a byte': data[:-9] + bytes([data[-9] ^ 64]) + data[-8:]}[damage])
    if damage == 'exchanged':  # a whole file, of other tokens
        assert ask(again, ids) == 0
    else:
        with pytest.warns(UserWarning, match='counts as missing'):
            assert ask(again, ids) == 0


def test_a_file_of_another_size_counts_as_missing(tmp_path):
    ids = prompt(40)
    stored(tmp_path)
    for path in files(tmp_path):
        with safe_open(path, 'pt') as file:
            tensors, about = {name: file.get_tensor(name)[:-8].clone()
                              for name in file.keys()}, file.metadata()  # noqa: SIM118
        about.pop('hash')
        save_file(tensors, path, about | {'hash': _hash(about, tensors)})
    assert ask(engine_of(tmp_path), ids) == 0


def test_another_model_finds_nothing_even_in_its_own_folder(tmp_path):
    ids, engine = prompt(40), engine_of(tmp_path)
    other = random_model(GPTConfig(**KINDS['full stack']), seed=5)
    engine.generate([ids], PARAMS)
    engine.close()
    theirs = engine_of(tmp_path, other)
    assert theirs.prefix.disk.folder != engine.prefix.disk.folder
    for path in files(tmp_path):  # somebody moves them there
        shutil.copy(path, theirs.prefix.disk.folder)
    theirs = engine_of(tmp_path, other)
    assert theirs.prefix.disk.nbytes == engine.prefix.disk.nbytes > 0
    assert ask(theirs, ids) == 0


def test_what_a_fingerprint_tells_apart():
    model = random_model(GPTConfig(**KINDS['full stack']))
    marks = [fingerprint(model, 'float64', 4), fingerprint(model, 'int8', 4),
             fingerprint(model, 'float64', 8)]
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight[0] += 1e-9
    marks.append(fingerprint(model, 'float64', 4))
    quantize_weights(model.float(), 'int8')
    marks.append(fingerprint(model, 'float64', 4))
    assert len(set(marks)) == 5 and marks[4] == fingerprint(model, 'float64', 4)



def test_the_oldest_files_make_room(tmp_path):
    engine = engine_of(tmp_path)
    engine.prefix.disk.budget = 20_000
    for seed in range(4):
        engine.generate([prompt(40, seed=seed)], PARAMS)
        engine.close()
        assert 10_000 < sum(path.stat().st_size
                            for path in files(tmp_path)) == engine.prefix.disk.nbytes <= 20_000
    [completion] = engine_of(tmp_path).generate([prompt(40, seed=0)], PARAMS)
    assert completion.n_cached == 0


def test_where_nothing_can_be_written(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match='cannot be used'):
        engine_of(tmp_path / 'file')
    engine = engine_of(tmp_path / 'full')
    engine.generate([prompt(20)], PARAMS)

    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'replace', full)
    with pytest.warns(UserWarning,
                      match='cannot be written, so its prefix is not stored.*No space') as warned:
        engine.close()
    assert len(warned) == 1  # not one a block
    assert not files(tmp_path) and not list(tmp_path.rglob('*.tmp'))


def test_what_is_needed(tmp_path, monkeypatch):
    with pytest.raises(UserError,
                       match='prefix_budget=0: bytes of host memory are needed, for a prefix_'):
        engine_of(tmp_path, budget=0)
    with pytest.raises(UserError, match='prefix_budget=-1'):
        engine_of('', budget=-1)
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(UserError,
                       match=r"needs the safetensors package: pip install -e '\.\[hf\]'"):
        DiskTier(tmp_path, 'f' * 64, 1)


def test_what_an_interrupted_write_left_is_removed(tmp_path):
    folder = DiskTier(tmp_path, 'f' * 64, 10 ** 9).folder
    # the second may be another process's, at work
    old, new = folder / 'a.1.tmp', folder / 'b.2.tmp'
    for path in (old, new):
        path.write_bytes(b'x')
    os.utime(old, (1, 1))
    assert DiskTier(tmp_path, 'f' * 64, 10 ** 9).nbytes == 0 and new.exists() and not old.exists()


def test_buffers_in_more_memory_than_they_need(tmp_path, monkeypatch):
    """As on CUDA, where pinned memory comes in powers of two: all of it counts, and the disk gets
    only what is in use."""
    def out(copies, buffer):
        return torch.empty(1 << (buffer.numel() - 1).bit_length(),
                           dtype=torch.uint8)[:buffer.numel()].copy_(buffer)
    plain, budget = engine_of(tmp_path / 'plain', kv_dtype='int8'), 25_000
    plain.generate([prompt(40)], PARAMS)
    plain.close()
    monkeypatch.setattr('engine.blocks.HostCopies.out', out)
    engine = engine_of(tmp_path / 'rounded', budget=budget, kv_dtype='int8')
    for seed in (1, 2, 0, 0):
        ids = prompt(40, seed=seed)
        n_cached = ask(engine, ids)
    assert n_cached == 36
    store = engine.prefix
    assert store.nbytes == sum(block.nbytes for block in store.blocks) <= budget
    local = [block.local for block in store.blocks if block.local is not None]
    assert local and all(allocated_nbytes(buffer).bit_count() == 1
                         and allocated_nbytes(buffer) >= buffer.numel() for buffer in local)
    assert any(allocated_nbytes(buffer) > buffer.numel() for buffer in local)
    engine.close()
    sizes = {path.name: path.stat().st_size for path in files(tmp_path / 'rounded')}
    assert all(sizes[path.name] == path.stat().st_size for path in files(tmp_path / 'plain'))


@pytest.mark.parametrize('window', [4, 5, 6, 10, 20])
def test_windows_wider_than_a_page_come_back_whole(tmp_path, window):
    """Six conversations in turns, with memory for about one."""
    model, found = random_model(GPTConfig(**KINDS['unshared'] | dict(window_size=window))), []
    engine = engine_of(tmp_path, model, budget=8_000, kv_dtype='int8')
    for turn in range(3):
        for seed in range(6):
            ids = prompt(40 + 4 * turn, seed=seed)
            [completion] = engine.generate([ids], SamplingParams(2, seed=seed))
            assert_same(completion, alone(model, ids, SamplingParams(2, seed=seed), kv_dtype='int8',
                                          tokenizer=TOKENIZER))
            found.append(completion.n_cached)
    assert engine.prefix.stats.evicted > 60 and min(found[6:]) >= 36


def test_a_prompt_that_was_evicted_is_found_again_and_again(tmp_path):
    model = random_model(GPTConfig(**KINDS['unshared'] | dict(window_size=20)))
    engine = engine_of(tmp_path, model, budget=8_000, kv_dtype='int8')
    for seed in (0, 1, 2):
        engine.generate([prompt(50, seed=seed)], PARAMS)
    assert [engine.generate([prompt(50)], PARAMS)[0].n_cached for _ in range(3)] == [48, 48, 48]


def test_the_ends_of_texts_leave_a_full_disk_first(tmp_path):
    whole = stored(tmp_path / 'whole', prompt(50))
    room = whole.prefix.disk.nbytes * 8 // 10
    for order in ('written', 'read'):  # and read: from the beginning on
        engine = engine_of(tmp_path / order)
        engine.generate([prompt(50)], PARAMS)
        engine.close()
        again = engine_of(tmp_path / order)
        if order == 'read':
            again.prefix.match(prompt(50))
            again.prefix.blocks.clear()
            again = engine_of(tmp_path / order)
        again.prefix.disk.budget = room
        while again.prefix.disk.nbytes > room:
            again.prefix.disk._delete(next(iter(again.prefix.disk._sizes)))
        assert 20 <= again.generate([prompt(50)], PARAMS)[0].n_cached < 48


def test_what_the_disk_has_deleted_is_written_again(tmp_path):
    engine = stored(tmp_path)
    n = len(files(tmp_path))
    disk = engine.prefix.disk
    for name in list(disk._sizes):
        disk._delete(name)
    assert disk.nbytes == 0 and not files(tmp_path)
    engine.close()
    assert len(files(tmp_path)) == n and disk.nbytes == sum(path.stat().st_size
                                                            for path in files(tmp_path))


def test_what_was_read_holds_no_file(tmp_path):
    stored(tmp_path)
    again = engine_of(tmp_path)
    assert len(again.prefix.match(prompt(40)).blocks) == 9
    if os.path.exists('/proc/self/maps'):
        assert str(tmp_path) not in Path('/proc/self/maps').read_text()


def test_a_waiting_request_reads_nothing(tmp_path, monkeypatch):
    stored(tmp_path)
    reads, plain = [], DiskTier._open
    monkeypatch.setattr(DiskTier, '_open', lambda *args: reads.append(1) or plain(*args))
    model = model_of('full stack')
    engine = Engine(model, 2, 60, page_size=4, prefix_budget=6_000, prefix_folder=str(tmp_path),
                    tokenizer=TOKENIZER,
                    kv_budget=budget_for(model, 2, 60, 15, 4))
    engine.submit(prompt(48, seed=9), SamplingParams(12, seed=0))
    index = engine.submit(prompt(40), PARAMS)
    for _ in range(8):
        engine.step()
    assert engine.jobs[index].request.row < 0 and not reads
    done = {event.index: event.completion for _ in range(30) for event in engine.step()
            if event.completion}
    assert done[index].n_cached == 36 and len(reads) < 14
    assert_same(done[index], alone(model, prompt(40), PARAMS, tokenizer=TOKENIZER))
    assert engine.prefix.nbytes <= 6_000


def test_another_process_deletes_amid_a_write(tmp_path, monkeypatch):
    engine, plain = engine_of(tmp_path), os.replace

    def replaced(source, target):
        plain(source, target)
        os.unlink(target)
    monkeypatch.setattr(os, 'replace', replaced)
    engine.generate([prompt(20)], PARAMS)
    engine.close()
    assert not files(tmp_path)
    with pytest.warns(UserWarning, match='cannot be read'):
        assert engine.prefix.disk.read(next(iter(engine.prefix.blocks)).key, b'', b'') is None
