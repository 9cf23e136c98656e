"""`lab.conform`: sound models pass, and every planted fault is found."""
import dataclasses
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attention.masks
import interop.modeling_nanokv
from training.native import loading, modules
from attention.kernels.norm_rope import NormAndRotate
from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.prefix.blocks import BlockCopier
from engine.steps.static import StaticCache
from kv.cache import KVCache, RaggedToken
from kv.plan import Slot
from kv.slots import KVStore, RingStore
from lab import conform
from model import GPT, CausalSelfAttention
from tests.helpers.models import FULL_STACK

ROOT = Path(__file__).resolve().parents[2]
CONFIG = conform.reduced(GPTConfig(**FULL_STACK | dict(head_dim=8, attn_sink=True)))
META = dict(choices=(), tries=(64,), trained='', known=())
OFFSET = dict(key_offset=True)
FEW_LAYERS = dict(n_layer=4, layer_pattern='LLG', kv_share='AAB')


# each fault makes the function that replaces the plain one

def write_first(plain):
    """A ring is written before its own chunk has read it."""
    def append(self, new, rows, start):
        plain(self, new, rows, start)
        return plain(self, new, rows, start)
    return append


def forgotten_scale(plain):
    def encode(self, k, v):
        new = plain(self, k, v)
        return new if len(new) == 2 else (*new[:3], new[2])  # V gets the scales of K
    return encode


def one_key_more(plain):
    def init(self, *args):
        plain(self, *args)
        self.kv_lens = self.kv_lens + 1
    return init


def lost_between_segments(plain):
    def blocks(self, *args, **kwargs):
        x, kvs = plain(self, *args, **kwargs)
        return x, {slot: [2 * part for part in kv] for slot, kv in kvs.items()}
    return blocks


def miscounted(plain):
    return lambda self, dtype: plain(self, dtype) - 1


@pytest.mark.parametrize('where, attribute, fault, changes, name', [
    (RingStore, 'append', write_first, {}, 'cache, float64'),
    (attention.masks, 'in_window', lambda plain: lambda q, k, window: plain(
        q, k, window and window + 1), {}, 'cache, float64'),
    (KVStore, 'encode', forgotten_scale, {}, 'int8 K and V'),
    (KVCache, 'row_stores', lambda _: property(lambda self: self.stores), OFFSET, 'ragged rows'),
    (BlockCopier, 'put_state', lambda _: lambda self, row, buffer: None, OFFSET,
     'engine and prefix cache'),
    (RaggedToken, '__init__', one_key_more, {}, 'ragged rows'),
    (Slot, 'position_nbytes', miscounted, {}, 'bytes'),
    (NormAndRotate, 'backward', lambda plain: staticmethod(lambda ctx, dy: [
        x if x is None else 1.01 * x for x in plain(ctx, dy)]), FEW_LAYERS, 'gradients'),
    (modules, 'attend', lambda plain: lambda *args: plain(*args[:6]), {},  # no sink
     'training kernels'),
    (GPT, '_blocks', lost_between_segments, {}, 'recomputation'),
    (StaticCache, 'read', lambda plain: lambda self, layer, q, sink: plain(self, layer, q), {},
     'captured step'),
    (conform, 'parameters', lambda plain: lambda config, plan: plain(config, plan) - 1, {},
     'parameters'),
    (interop.modeling_nanokv, 'rotate', lambda plain: lambda x, cos, sin: plain(x, cos, -sin), {},
     'export')])
def test_a_fault_is_found(where, attribute, fault, changes, name, monkeypatch):
    config = conform.reduced(GPTConfig(**vars(CONFIG) | changes))
    if name == 'training kernels' and loading.library() is None:
        pytest.skip('no C++ compiler')
    assert conform.conform(config, [name]) == {name: ''}
    monkeypatch.setattr(where, attribute, fault(getattr(where, attribute)))
    found = conform.conform(config, [name])[name]
    assert found and not found.startswith('('), 'not found'


@pytest.fixture
def changed_copy(tmp_path):
    """A function of the number of an example in docs/architecture.md: a copy of the project with
    its lines."""
    listed = subprocess.run(['git', 'ls-files', '*.py', '*.h', '*.cpp'], cwd=ROOT, text=True,
                            capture_output=True, check=True).stdout.split()
    for path in (path for path in listed if not path.startswith('tests/')):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    docs = (ROOT / 'docs' / 'architecture.md').read_text(encoding='utf-8')
    diffs = re.findall(r'```diff\n(.*?)```', docs, re.DOTALL)

    def apply(number):
        done = subprocess.run(['git', 'apply', '--unsafe-paths', '-'], cwd=tmp_path, text=True,
                              input=diffs[number], capture_output=True)
        assert done.returncode == 0, done.stderr
        return tmp_path
    return apply


def conformed(folder, *flags):
    return subprocess.run([sys.executable, '-m', 'lab.conform', 'config/train_mqa_local.py',
                           *flags], cwd=folder, text=True, capture_output=True)


MASK = ['--global_every=4', '--global_last=64']


@pytest.mark.slow
@pytest.mark.parametrize('number, flags, n_refused', [(0, ['--head_scale=True'], 5), (1, MASK, 4)])
def test_the_examples_in_the_docs(changed_copy, number, flags, n_refused):
    """Decode steps and the export refuse both; the count of parameters refuses the first."""
    done = conformed(changed_copy(number), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f'({flags[0][2:]})') == n_refused
    assert done.stdout.count('\N{CHECK MARK}') == len(conform.CHECKS) - n_refused


@pytest.mark.slow
def test_a_mask_in_the_full_forward_pass_only_is_found(changed_copy):
    folder = changed_copy(1)
    for path in ('kv/cache.py', 'engine/pages/cache.py'):
        text = (folder / path).read_text(encoding='utf-8')
        assert 'layer.mask' in text
        (folder / path).write_text(text.replace('layer.mask', '0'), encoding='utf-8')
    done = conformed(folder, *MASK)
    assert done.returncode == 1 and '1 of 1 configs differ' in done.stderr
    for name in ('cache, float64', 'ragged rows', 'pages', 'engine and prefix cache'):
        assert f'\N{BALLOT X}  {name}' in done.stdout


def test_sequences_are_twice_as_long_as_the_numbers_of_new_fields(monkeypatch):
    """A key is seen up to 64 positions away in the full forward pass only, and in no other."""
    fields = [('reach', int, dataclasses.field(default=0, metadata=META)),
              ('reaches', str, dataclasses.field(default='', metadata=META))]
    new = dataclasses.make_dataclass('NewConfig', fields, bases=(GPTConfig,))
    monkeypatch.setattr(conform, 'GPTConfig', new)
    for changes, length in ((dict(reach=64), 128), (dict(reaches='4,70'), 140),
                            (dict(n_head=12), 40), (dict(reach=1000), 512)):
        config = conform.reduced(new(n_layer=1, n_embd=24, **changes))
        assert config.block_size == length
    assert conform.distances(config) == {'reach': 1000}
    monkeypatch.setattr(CausalSelfAttention, 'attend_to_sequence', lambda self, q, k, v: (
        self.attend(q, k, v, 64)))
    config = conform.reduced(new(n_layer=2, n_embd=24, n_head=3, reach=64))
    checks = ['cache, float64', 'ragged rows', 'engine and prefix cache', 'int8 K and V']
    found = conform.conform(config, checks)
    assert all('position' in why or 'expected' in why or 'deviation' in why
               for why in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(4))
def test_random_configs_conform(seed):
    rng = random.Random(seed)
    for _ in range(20):
        config = conform.random_config(rng)
        found = conform.conform(config, [name for name in conform.CHECKS if name != 'resuming'])
        differ = [f'{name}: {why}' for name, why in found.items() if why and why[0] != '(']
        assert not differ, config


def test_the_program(capsys, monkeypatch):
    flags = ['--n_layer=3', '--n_head=2', '--n_embd=16', '--n_kv_head=1', '--layer_pattern=LG']
    conform.main([*flags, '--window_size=4', '--kv_head_pattern=1,2'])
    out = capsys.readouterr().out
    assert '\n--as_given=True --block_size=48 --n_layer=3 ' in out
    assert out.count('\N{CHECK MARK}') == len(conform.CHECKS) - 1
    assert "(kv_head_pattern='1,2')" in out  # the export
    with pytest.raises(UserError, match='kv_latent=8'):
        conform.main([*flags, '--window_size=4', '--kv_latent=8', '--pos_embedding=rope'])
    monkeypatch.setattr(Slot, 'position_nbytes', miscounted(Slot.position_nbytes))
    # it starts three programs, which the first config has done
    monkeypatch.delitem(conform.CHECKS, 'resuming')
    with pytest.raises(SystemExit, match='1 of 1 configs differ'):
        conform.main(['--n_layer=2', '--n_head=2', '--n_embd=16'])
    assert '\N{BALLOT X}  bytes' in capsys.readouterr().out
