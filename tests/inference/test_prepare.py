"""A prepared engine: requests neither compile a kernel nor capture a step."""
import json

import pytest
import torch

from config.errors import UserError
from config.gpt_config import GPTConfig
from inference.engine import Engine
from inference.params import SamplingParams
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.without_gpu import run_alone

PROGRAM = '''
from tests.helpers.without_gpu import pretend
pretend()
import json, random, sys
import torch
import inference.captured, kv.paged
from attention.kernels import decode, qkv
from config.gpt_config import GPTConfig
from inference.engine import Engine
from inference.params import SamplingParams
from tests.helpers.ahead_of_time import specialised
from tests.helpers.models import FULL_STACK, random_model

inference.captured.suits_capture = lambda model: True
kv.paged.PagedSlot.by_table = property(lambda self: True)
decode._n_processors = lambda device: 132
compiled = set()


class Launched:
    """Tells one compiled form of a kernel from another; nothing runs, and what it would write is zero."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, num_stages=0, **constants):
        given = dict(zip(self.kernel.arg_names, args)) | constants
        compiled.add(str((self.kernel.__name__, num_warps, num_stages, specialised(self.kernel, given))))
        for name in {'_split': ('OUT', 'LSE'), '_join': ('OUT',), '_write': ('Q',)}[self.kernel.__name__]:
            given[name].zero_()


for module, name in ((decode, '_split'), (decode, '_join'), (qkv, '_write')):
    setattr(module, name, Launched(getattr(module, name)))
heads, kv_dtype, room, prefix = json.loads(sys.argv[1])
config = FULL_STACK | dict(n_kv_head=heads, window_size=20, block_size=room, head_dim=16)
engine = Engine(random_model(GPTConfig(**config), torch.float32), 5, room, kv_dtype, prefill_chunk=64, page_size=16,
                prefix_budget=prefix)
engine.prepare()
prepared, steps, n_before = set(compiled), set(engine.captured._steps), engine.captured._steps.copy()
draw = random.Random(1)
for _ in range(6):
    prompts = [[draw.randrange(20)] * min(draw.choice([1, 2, 3, 17, 60, 64, 65, 300, 3000]), room - 9) for _ in range(7)]
    # a text that is continued finds its beginning in the prefix store: chunks of any size behind any number of tokens
    prompts += [prompts[0] + [1] * draw.randrange(9)]
    done = engine.generate([p[:room - 9] for p in prompts], SamplingParams(max_new_tokens=8, temperature=0))
    assert {completion.finish_reason for completion in done} == {'length'}
print(json.dumps({'prepared': len(prepared), 'amid traffic': sorted(compiled - prepared), 'steps': sorted(steps),
                  'captured amid traffic': engine.captured._steps != n_before, 'held': engine.cache.lengths.tolist()}))
'''


@pytest.mark.parametrize('heads, kv_dtype, room, prefix', [
    (1, 'int8', 4000, 0), (4, 'float32', 4000, 0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 'float32', 4000, 10 ** 9), (2, 'int8', 200, 10 ** 9),
                                                               (4, 'int8', 60, 0), (1, 'int8', 20, 0)])])
def test_requests_compile_and_capture_nothing(heads, kv_dtype, room, prefix):
    pytest.importorskip('triton')
    found = run_alone(PROGRAM, json.dumps([heads, kv_dtype, room, prefix]))
    assert found['amid traffic'] == [] and found['prepared'] > 4
    assert found['steps'] == [1, 2, 4, 5] and not found['captured amid traffic']


@pytest.fixture
def everywhere(monkeypatch):
    """As if captured decode were the fast way here too."""
    monkeypatch.setattr('inference.captured.suits_capture', lambda model: True)


def test_preparing_changes_no_text(everywhere):
    model = random_model(GPTConfig(**FULL_STACK))
    prompts, params = [[1, 2, 3], [4], [5] * 20], SamplingParams(max_new_tokens=9, seed=1)
    texts = []
    for prepared in (False, True):
        engine = Engine(model, 2, 40, page_size=8, prefill_chunk=8)
        if prepared:
            engine.prepare()
            assert engine.cache.lengths.tolist() == [0, 0] and engine.cache.table.n_free == engine.cache.table.n_pages
        texts.append([completion.tokens for completion in engine.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_not_while_there_are_requests(everywhere):
    engine = Engine(random_model(GPTConfig(**FULL_STACK)), 2, 40)
    engine.submit([1, 2])
    with pytest.raises(UserError, match='1 requests have not ended'):
        engine.prepare()


def test_where_steps_are_not_captured_it_does_nothing():
    engine = Engine(random_model(GPTConfig(**FULL_STACK)), 2, 40)
    engine.submit([1, 2])
    engine.prepare()
    assert engine.captured is None and torch.equal(engine.cache.lengths, torch.zeros(2, dtype=torch.int64))
