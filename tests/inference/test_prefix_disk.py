"""Prefixes on disk: they survive a restart and an eviction; nobody is served what is damaged or another model's."""
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from config.errors import UserError
from inference.engine import Engine
from inference.params import SamplingParams
from inference.weights import quantize_weights
from kv.blocks import taken
from kv.prefix_disk import DiskTier, fingerprint
from model import GPTConfig
from tests.helpers.models import random_model
from tests.helpers.serving import KINDS, TOKENIZER, alone, assert_same, model_of, prompt

PARAMS = SamplingParams(6, seed=3)


def engine_of(folder, model=None, budget=10 ** 9, **more):
    return Engine(model or model_of('full stack'), 1, 60, page_size=4, prefill_chunk=12, prefix_budget=budget,
                  prefix_folder=str(folder), tokenizer=TOKENIZER, **more)


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
    [completion] = engine_of(tmp_path, model, kv_dtype=kv_dtype).generate([ids + prompt(7, seed=1)], PARAMS)
    assert completion.n_cached == 40
    assert_same(completion, alone(model, ids + prompt(7, seed=1), PARAMS, kv_dtype=kv_dtype, tokenizer=TOKENIZER))


def test_what_leaves_the_memory_comes_back_from_disk(tmp_path):
    engine = engine_of(tmp_path, budget=9_000, kv_dtype='int8')
    for seed in (0, 1, 2, 0, 1, 2):
        ids = prompt(40, seed=seed)
        [completion] = engine.generate([ids], PARAMS)
        assert_same(completion, alone(model_of('full stack'), ids, PARAMS, kv_dtype='int8', tokenizer=TOKENIZER))
    assert completion.n_cached == 36 and engine.prefix.stats.evicted > 10 and engine.prefix.nbytes <= 9_000


@pytest.mark.parametrize('damage', ['truncated', 'emptied', 'changed', 'exchanged', 'gone'])
def test_a_damaged_file_counts_as_missing(tmp_path, damage):
    ids, engine = prompt(40), engine_of(tmp_path)
    engine.generate([ids], PARAMS)
    engine.close()
    again, paths = engine_of(tmp_path), files(tmp_path)
    for path in paths:
        data = path.read_bytes()
        if damage == 'exchanged':
            shutil.copy(next(other for other in paths if other != path), path)
        elif damage == 'gone':
            path.unlink()
        else:
            path.write_bytes({'truncated': data[:-50], 'emptied': b'', 'changed': data[:9] + b'x' * 30 + data[39:]}[damage])
    if damage == 'exchanged':  # a whole file, of other tokens
        [completion] = again.generate([ids], PARAMS)
    else:
        with pytest.warns(UserWarning, match='counts as missing'):
            [completion] = again.generate([ids], PARAMS)
    assert completion.n_cached == 0
    assert_same(completion, alone(model_of('full stack'), ids, PARAMS, tokenizer=TOKENIZER))


def test_a_file_of_another_size_counts_as_missing(tmp_path):
    engine, ids = engine_of(tmp_path), prompt(40)
    engine.generate([ids], PARAMS)
    engine.close()
    for path in files(tmp_path):
        with safe_open(path, 'pt') as file:
            tensors, about = {name: file.get_tensor(name)[:-8].clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
        save_file(tensors, path, about)
    [completion] = engine_of(tmp_path).generate([ids], PARAMS)
    assert completion.n_cached == 0
    assert_same(completion, alone(model_of('full stack'), ids, PARAMS, tokenizer=TOKENIZER))


def test_another_model_finds_nothing_even_in_its_own_folder(tmp_path):
    ids, engine, other = prompt(40), engine_of(tmp_path), random_model(GPTConfig(**KINDS['full stack']), seed=5)
    engine.generate([ids], PARAMS)
    engine.close()
    theirs = engine_of(tmp_path, other)
    assert theirs.prefix.disk.folder != engine.prefix.disk.folder
    for path in files(tmp_path):  # somebody moves them there
        shutil.copy(path, theirs.prefix.disk.folder)
    theirs = engine_of(tmp_path, other)
    assert theirs.prefix.disk.nbytes == engine.prefix.disk.nbytes > 0
    [completion] = theirs.generate([ids], PARAMS)
    assert completion.n_cached == 0
    assert_same(completion, alone(other, ids, PARAMS, tokenizer=TOKENIZER))


def test_what_a_fingerprint_tells_apart():
    model = random_model(GPTConfig(**KINDS['full stack']))
    marks = [fingerprint(model, 'float64', 4), fingerprint(model, 'int8', 4), fingerprint(model, 'float64', 8)]
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight[0] += 1e-9
    marks.append(fingerprint(model, 'float64', 4))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied, as quantizing does
    pytest.importorskip('torchao')
    quantize_weights(model.float(), 'int8')
    marks.append(fingerprint(model, 'float64', 4))
    assert len(set(marks)) == 5 and marks[4] == fingerprint(model, 'float64', 4)



def test_the_oldest_files_make_room(tmp_path):
    engine = engine_of(tmp_path)
    engine.prefix.disk.budget = 20_000
    for seed in range(4):
        engine.generate([prompt(40, seed=seed)], PARAMS)
        engine.close()
        assert 10_000 < sum(path.stat().st_size for path in files(tmp_path)) == engine.prefix.disk.nbytes <= 20_000
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
    with pytest.warns(UserWarning, match='cannot be written, it is not kept: .*No space'):
        engine.close()
    assert not files(tmp_path) and not list(tmp_path.rglob('*.tmp'))


def test_what_is_needed(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='prefix_budget=0: bytes of host memory are needed, for a prefix_folder too'):
        engine_of(tmp_path, budget=0)
    with pytest.raises(UserError, match='prefix_budget=-1'):
        engine_of('', budget=-1)
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(UserError, match=r"needs the safetensors package: pip install -e '\.\[hf\]'"):
        DiskTier(tmp_path, 'f' * 64, 1)


def test_what_an_interrupted_write_left_is_removed(tmp_path):
    folder = DiskTier(tmp_path, 'f' * 64, 10 ** 9).folder
    old, new = folder / 'a.1.tmp', folder / 'b.2.tmp'  # the second may be another process's, at work
    for path in (old, new):
        path.write_bytes(b'x')
    os.utime(old, (1, 1))
    assert DiskTier(tmp_path, 'f' * 64, 10 ** 9).nbytes == 0 and new.exists() and not old.exists()


def test_buffers_in_more_memory_than_they_need(tmp_path, monkeypatch):
    """As on CUDA, where pinned memory comes in powers of two: all of it counts, and the disk gets only what is in use."""
    def out(copies, buffer):
        return torch.empty(1 << (buffer.numel() - 1).bit_length(), dtype=torch.uint8)[:buffer.numel()].copy_(buffer)
    plain, budget = engine_of(tmp_path / 'plain', kv_dtype='int8'), 25_000
    plain.generate([prompt(40)], PARAMS)
    plain.close()
    monkeypatch.setattr('kv.blocks.HostCopies.out', out)
    engine = engine_of(tmp_path / 'rounded', budget=budget, kv_dtype='int8')
    for seed in (1, 2, 0, 0):
        ids = prompt(40, seed=seed)
        [completion] = engine.generate([ids], PARAMS)
        assert_same(completion, alone(model_of('full stack'), ids, PARAMS, kv_dtype='int8', tokenizer=TOKENIZER))
    assert completion.n_cached == 36
    store = engine.prefix
    assert store.nbytes == sum(block.nbytes for block in store.index.values()) <= budget
    local = [block.local for block in store.index.values() if block.local is not None]
    assert local and all(taken(buffer).bit_count() == 1 and taken(buffer) >= buffer.numel() for buffer in local)
    assert any(taken(buffer) > buffer.numel() for buffer in local)
    engine.close()
    sizes = {path.name: path.stat().st_size for path in files(tmp_path / 'rounded')}
    assert all(sizes[path.name] == path.stat().st_size for path in files(tmp_path / 'plain'))
