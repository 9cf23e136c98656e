"""Prefixes on disk: they survive a restart and an eviction; damaged files and those of a different
model are never used."""
import os
import shutil
import stat
import sys
import warnings
from pathlib import Path

import pytest
import torch

from config.errors import UserError
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.prefix.disk import DiskTier, fingerprint
from engine.weights.quantize import quantize_weights
from model import GPT, GPTConfig
from tests.engine.test_prefix_store import World, shrink
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.serving import KINDS, TOKENIZER, alone, assert_same, budget_for, model_of, prompt

PARAMS = SamplingParams(6, seed=3)


def engine_of(folder, model=None, budget=10 ** 9, **more):
    return Engine(model or model_of('full stack'), 1, 60, page_size=4, prefill_chunk=12,
                  prefix_budget=budget, prefix_folder=str(folder), tokenizer=TOKENIZER, **more)


def stored(folder, ids=None, **kinds):
    """An engine that has completed the prompt `ids` and written its prefix cache to disk."""
    engine = engine_of(folder, **kinds)
    engine.generate([ids or prompt(40)], PARAMS)
    engine.close()
    return engine


def ask(engine, ids, params=PARAMS):
    """Return n_cached of a completion, which must be as from an engine without a prefix cache."""
    [completion] = engine.generate([ids], params)
    kv_dtype = engine.cache.kv_dtype
    assert_same(completion, alone(engine.model, ids, params, kv_dtype=kv_dtype,
                                  tokenizer=TOKENIZER))
    return completion.n_cached


def files(folder):
    return sorted(Path(folder).rglob('*.safetensors'))


@pytest.mark.parametrize('kind, kv_dtype', [
    *((kind, 'auto') for kind in (*KINDS, 'offset keys', 'offset keys, all global', 'latents')),
    ('full stack', 'int8'), ('latents', 'int8')])
def test_after_a_restart_the_past_is_there(tmp_path, kind, kv_dtype):
    settings = dict(model=model_of(kind), kv_dtype=kv_dtype)
    stored(tmp_path, **settings)
    assert len(files(tmp_path)) == 12 and not list(tmp_path.rglob('*.tmp'))
    assert ask(engine_of(tmp_path, **settings), prompt(40) + prompt(7, seed=1)) == 40


def test_a_state_that_a_file_lacks_is_added_to_it(tmp_path):
    """The block ends amid a prefill chunk at first, and then where a prompt leaves the tree."""
    settings, edited = dict(model=model_of('offset keys, all global')), prompt(40)[:19] + [5] * 9
    stored(tmp_path, **settings)
    engine = engine_of(tmp_path, **settings)
    assert ask(engine, edited) == 12
    engine.close()
    assert ask(engine_of(tmp_path, **settings), edited[:19] + [6] * 9) == 16
    assert engine.prefix.copier.state_nbytes == 3 * 2 * 4 * 8  # slots, heads, D / 2, float64


@pytest.mark.parametrize('kind, window, budget, n, found',
                         [('full stack', 5, 9_000, 40, 36), ('unshared', 20, 8_000, 50, 48)])
def test_what_leaves_the_memory_comes_back_from_disk_again_and_again(tmp_path, kind, window, budget,
                                                                     n, found):
    model = random_model(GPTConfig(**KINDS[kind] | dict(window_size=window)))
    engine = engine_of(tmp_path, model, budget, kv_dtype='int8')
    for seed in (0, 1, 2):
        ask(engine, prompt(n, seed=seed))
    assert [ask(engine, prompt(n)) for _ in range(3)] == [found] * 3
    assert engine.prefix.stats.evicted > 10 and engine.prefix.nbytes <= budget


@pytest.mark.parametrize('damage', ['emptied', 'a byte', 'exchanged', 'gone', "another model's"])
def test_a_damaged_file_counts_as_missing(tmp_path, damage):
    ids, theirs = prompt(40), tmp_path / 'theirs'
    stored(tmp_path)
    again, paths = engine_of(tmp_path), files(tmp_path)
    stored(theirs, model=random_model(GPTConfig(**KINDS['full stack']), seed=5))
    for path in paths:
        data = path.read_bytes()
        if damage == 'exchanged':
            shutil.copy(next(other for other in paths if other != path), path)
        elif damage == "another model's":
            shutil.copy(next(theirs.rglob(path.name), files(theirs)[0]), path)
        elif damage == 'gone':
            path.unlink()
        else:
            changed = data[:-9] + bytes([data[-9] ^ 64]) + data[-8:]
            path.write_bytes(changed if damage == 'a byte' else b'')
    if damage in ('exchanged', "another model's"):  # intact files, but of something else
        assert ask(again, ids) == 0
    else:
        with pytest.warns(UserWarning, match='counts as missing'):
            assert ask(again, ids) == 0


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
    assert marks[4] == fingerprint(model, 'float64', 4, 20)  # rings of one window hold their part
    differ = random_model(GPTConfig(**FULL_STACK | dict(
        layer_pattern='LLG', kv_share='', window_pattern='3,50,0')), torch.float32)
    marks = [fingerprint(differ, 'float32', 4, n) for n in (40, 60, 80)]
    assert marks[0] != marks[1] and marks[1] == marks[2]
    old = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=2, n_head=2, n_embd=4,
                        layer_pattern='LG', window_size=3))
    for p in old.parameters():
        p.data.zero_()
    # as commit 1920085 has it, whose config had two fields less
    assert fingerprint(old, 'float32', 4).startswith('5d9308c8696783f7e514f33debad287b')


def test_the_budget_is_for_the_files_of_all_models(tmp_path):
    """Of any model, those used longest ago go first: when a model is loaded, and while it runs."""
    old = stored(tmp_path)
    (tmp_path / ('e' * 32)).symlink_to(tmp_path / 'elsewhere')
    safe = [tmp_path / 'elsewhere' / 'ab.safetensors', old.prefix.disk.folder / 'notes.txt',
            tmp_path / 'model.safetensors']
    for path in safe:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'x' * 50_000)
    other, room = random_model(GPTConfig(**KINDS['full stack']), seed=5), old.prefix.disk.nbytes
    engine = stored(tmp_path, model=other, prefix_disk_budget=room * 3 // 2)
    disk = engine.prefix.disk
    kept = [sum(path.stat().st_size for path in folder.glob('*.safetensors'))
            for folder in (old.prefix.disk.folder, disk.folder)]
    assert room // 4 < kept[0] <= room // 2 < kept[1] and sum(kept) == disk.nbytes
    engine_of(tmp_path, prefix_disk_budget=1)
    assert files(tmp_path) == sorted(safe[::2]) and all(path.exists() for path in safe)


@pytest.mark.parametrize('shared', [False, True])
def test_only_their_owner_can_read_them(tmp_path, monkeypatch, shared):
    """They contain tokens of prompts. Files and folders of an earlier version become private, but
    not a folder with other things in it."""
    top, modes, replace = tmp_path / 'prefixes', [], os.replace

    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    def replaced(source, target):
        modes.append(mode(source))
        replace(source, target)
    monkeypatch.setattr(os, 'replace', replaced)
    folder = stored(top).prefix.disk.folder
    assert set(modes) == {0o600} and mode(top) == mode(folder) == 0o700
    for path in (top, folder, *files(top)):
        path.chmod(0o755)
    if shared:
        (top / 'other').touch()
    DiskTier(top, 'f' * 64, 10 ** 9)
    assert {mode(path) for path in files(top)} == {0o600} and mode(folder) == 0o700
    assert mode(top) == (0o755 if shared else 0o700)


@pytest.mark.parametrize('name, budget, patch, words', [
    ('folder', 0, None, 'prefix_budget=0: bytes of host memory are needed, for a prefix_'),
    ('folder', -1, None, 'prefix_budget=-1'), ('file', 1, None, 'cannot be used'),
    ('folder', 1, (vars(os), 'geteuid', lambda: os.getuid() + 1), 'belongs to another user'),
    ('folder', 1, (sys.modules, 'safetensors.torch', None),
     r"needs the safetensors package: pip install -e '\.\[hf\]'")])
def test_what_cannot_keep_prefixes_is_refused(tmp_path, monkeypatch, name, budget, patch, words):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'file').touch()
    if patch:
        monkeypatch.setitem(*patch)
    with pytest.raises(UserError, match=words):
        engine_of(tmp_path / name, budget=budget)


@pytest.mark.parametrize('full', [True, False])
def test_a_full_disk_or_another_process_that_deletes_amid_a_write(tmp_path, monkeypatch, full):
    engine, replace = engine_of(tmp_path), os.replace
    engine.generate([prompt(20)], PARAMS)

    def replaced(source, target):
        if full:
            raise OSError(28, 'No space left on device')
        replace(source, target)
        os.unlink(target)
    monkeypatch.setattr(os, 'replace', replaced)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        engine.close()
        assert engine.prefix.disk.read(next(iter(engine.prefix.blocks))) is None
    [warning] = warned  # not one for each block
    said = 'cannot be written, so its prefix is not stored' if full else 'cannot be read'
    assert said in str(warning.message) and ('No space' in str(warning.message)) == full
    assert not files(tmp_path) and not list(tmp_path.rglob('*.tmp'))


def test_what_an_interrupted_write_left_is_removed(tmp_path):
    folder = DiskTier(tmp_path, 'f' * 64, 10 ** 9).folder
    # the second may belong to another running process
    old, new = folder / 'a.1.tmp', folder / 'b.2.tmp'
    for path in (old, new):
        path.write_bytes(b'x')
    os.utime(old, (1, 1))
    assert DiskTier(tmp_path, 'f' * 64, 10 ** 9).nbytes == 0 and new.exists() and not old.exists()


def test_buffers_in_more_memory_than_they_need(tmp_path, monkeypatch):
    """Like on CUDA, where pinned memory comes in powers of two: all of it counts, and only the part
    in use is written to disk."""
    def rounded(copies, buffer):
        size = 1 << (buffer.numel() - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8)[:buffer.numel()].copy_(buffer)
    plain = stored(tmp_path / 'plain', kv_dtype='int8')
    monkeypatch.setattr('engine.prefix.blocks.HostCopies.out', rounded)
    store = stored(tmp_path / 'rounded', kv_dtype='int8').prefix
    nbytes = [sum(block.nbytes for block in store.blocks) for store in (plain.prefix, store)]
    assert nbytes[0] < nbytes[1] == store.nbytes
    sizes = [[path.stat().st_size for path in files(tmp_path / name)]
             for name in ('plain', 'rounded')]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize('n_reads', [0, 1])
def test_the_ends_of_texts_leave_a_full_disk_first(tmp_path, n_reads):
    """In whatever order their files were written or read."""
    disk = stored(tmp_path, prompt(50)).prefix.disk
    room = disk.nbytes * 8 // 10
    for _ in range(n_reads):
        engine_of(tmp_path).prefix.match(prompt(50))
    disk = DiskTier(tmp_path, disk.fingerprint, room)
    while disk.nbytes > room:
        disk._delete(next(iter(disk._sizes)))
    assert 20 <= ask(engine_of(tmp_path), prompt(50)) < 48


def test_a_waiting_request_reads_nothing(tmp_path, monkeypatch):
    """It waits for pages while the first request has all of them."""
    stored(tmp_path)
    reads, model = [], model_of('full stack')
    monkeypatch.setattr('safetensors.safe_open', lambda *args: reads.append(1))
    engine = Engine(model, 2, 60, page_size=4, prefix_budget=6_000, prefix_folder=str(tmp_path),
                    kv_budget=budget_for(model, 2, 60, 15, 4))
    engine.submit(prompt(48, seed=9), SamplingParams(12, seed=0))
    engine.submit(prompt(40), PARAMS)
    for _ in range(8):
        engine.step()
    assert engine.scheduler.waiting and not reads


def world(folder):
    return World(disk=DiskTier(folder, '0' * 64, 10 ** 9))


def test_the_end_of_a_text_and_what_was_dropped_come_from_disk(tmp_path):
    """A block of fewer tokens than a page is found though its length is not known, and local parts
    that blocks in memory have lost."""
    first, text = world(tmp_path), [i * i % 61 for i in range(23)]
    first.visit(text)
    first.store._drop_local([(block,) for block in first.store.blocks])
    amid = text[:14] + [62]
    assert first.store.match(amid, disk=False).length < 14 == first.store.match(amid).length
    first.visit(amid)
    first.store.close()
    assert world(tmp_path).store.match(text + [9, 9]).length == 23


def test_a_block_whose_file_is_gone_is_completed_not_doubled(tmp_path):
    """Read from disk, its local part dropped; then the file is deleted."""
    first, text = world(tmp_path), [i * i % 61 for i in range(23)]
    first.visit(text)
    first.store.close()
    again = world(tmp_path)
    assert again.store.match(text + [9]).length == 23
    again.store.compact()
    n = len(files(tmp_path))
    for path in files(tmp_path):
        again.store.disk.delete(bytes.fromhex(path.stem))
    again.visit(text)
    again.consistent()
    again.store.close()
    assert len(files(tmp_path)) == n
    assert again.store.match(text + [9]).length == 23
    shrink(again.store, 0)
    again.consistent()
