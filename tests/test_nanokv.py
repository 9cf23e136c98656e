"""nanokv.py, the idea in one file, computes what the core computes and stands alone."""
import ast
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import model as core
import nanokv

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (ROOT / 'nanokv.py').read_text(encoding='utf-8')
# two repetitions of the pattern and a layer more, and a window that long texts pass many times
CONFIG = nanokv.GPTConfig(vocab_size=11, block_size=16, n_layer=13, n_head=3, n_embd=24,
                          window_size=5)
T = 24


def models(dtype):
    """The small model and the core's, with the same weights."""
    torch.manual_seed(0)
    small = nanokv.GPT(CONFIG).to(dtype)
    with torch.no_grad():
        for p in small.parameters():  # gains too, and matrices with which attention is not uniform
            p.add_(torch.randn_like(p) * 0.2)
    config = core.GPTConfig(**asdict(CONFIG), bias=False, n_kv_head=1, share_global_kv=True,
                            pos_embedding='rope', qk_norm=True)
    large = core.GPT(config).to(dtype).eval()
    large.load_state_dict(small.state_dict())
    return small, large


@torch.no_grad()
def test_its_weights_give_the_same_logits_in_the_core():
    small, large = models(torch.float64)
    idx = torch.randint(11, (2, T))
    theirs, _ = large(idx, all_logits=True)
    torch.testing.assert_close(small(idx), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize('max_len', [3, T])
@pytest.mark.parametrize('dtype', ['float32', 'float64', 'bfloat16'])
def test_its_cache_takes_the_bytes_of_the_cores(dtype, max_len):
    small, large = models(torch.float32)
    cache = nanokv.KVCache(CONFIG, 2, max_len, getattr(torch, dtype))
    assert (sum(slot.nbytes for slot in cache.slots)
            == large.new_cache(2, max_len, kv_dtype=dtype).nbytes)


def test_its_plan_is_the_cores():
    _, large = models(torch.float32)
    ours = [(layer.slot, layer.owns) for layer in nanokv.plan(CONFIG)]
    assert ours == [(layer.slot, layer.owns) for layer in large.plan.layers]


@torch.no_grad()
@pytest.mark.parametrize('dtype, atol', [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_cached_logits_equal_those_of_a_full_forward_past_the_wrap(dtype, atol):
    assert T > 4 * CONFIG.window_size
    small, _ = models(dtype)
    idx = torch.randint(11, (2, T))
    cache = nanokv.KVCache(CONFIG, 2, T, dtype)
    cached = torch.cat([small(idx[:, i:i + 1], cache) for i in range(T)], dim=1)
    torch.testing.assert_close(cached, small(idx), rtol=0, atol=atol)


@torch.no_grad()
def test_a_full_cache_and_several_tokens_at_once_are_errors():
    small, _ = models(torch.float32)
    cache = nanokv.KVCache(CONFIG, 1, 1, torch.float32)
    with pytest.raises(ValueError, match='2 tokens after 0: a cache takes 1, up to 1'):
        small(torch.tensor([[1, 2]]), cache)
    small(torch.tensor([[1]]), cache)
    with pytest.raises(ValueError, match='1 tokens after 1: a cache takes 1, up to 1'):
        small(torch.tensor([[1]]), cache)


def test_it_is_short_and_imports_nothing_of_the_project():
    assert len(SOURCE.splitlines()) <= 250
    names = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add('.' if node.level else node.module.partition('.')[0])
    assert names - set(sys.stdlib_module_names) == {'torch'}


def run(*args):
    return subprocess.run([sys.executable, ROOT / 'nanokv.py', *args], capture_output=True,
                          text=True, encoding='utf-8')


def test_it_trains_writes_200_characters_and_counts_bytes(tmp_path):
    file = tmp_path / 'text.txt'
    file.write_text('abcdefgh' * 40, encoding='utf-8')
    done = run(str(file), '--steps=2')
    assert done.returncode == 0, done.stderr
    first, second, text, nbytes, difference = done.stdout.splitlines()
    assert first.startswith('step 0: loss 2.') and second.startswith('step 1: loss 1.')
    assert len(text) == 200 and set(text) <= set('abcdefgh')
    # the table of its docstring: 328 positions and 9,600; K and V, 32 numbers of 4 bytes
    assert nbytes == 'cache: 83,968 bytes; GPT-2 of this shape: 2,457,600, 29.3 times that'
    assert float(difference.split()[-1]) < 1e-4


def test_files_that_cannot_be_trained_on_are_one_clear_line(tmp_path):
    done = run(str(tmp_path / 'missing.txt'))
    assert done.returncode == 1
    assert done.stderr == f'{tmp_path}/missing.txt: no such file\n'

    (tmp_path / 'short.txt').write_text('too short')
    done = run(str(tmp_path / 'short.txt'))
    assert done.returncode == 1
    assert done.stderr == f'{tmp_path}/short.txt has 9 characters, fewer than 129\n'
