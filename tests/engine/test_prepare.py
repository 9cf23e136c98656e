"""A prepared engine: requests compile no kernels and capture no steps."""
import json

import pytest

from common.errors import UserError
from common.gpt_config import GPTConfig
from engine.engine import Engine
from engine.steps.prepare import prepare
from tests.helpers.models import FULL_STACK, random_model
from tests.helpers.without_gpu import run_alone

PROGRAM = '''
from tests.helpers.without_gpu import pretend
pretend()
import json, random, sys
import torch
import engine.steps.captured
from attention.kernels import decode
from common.gpt_config import GPTConfig
from engine.steps import fused_linear, greedy
from engine.engine import Engine
from engine.requests.params import SamplingParams
from engine.steps.prepare import prepare
from tests.helpers.ahead_of_time import specialised
from tests.helpers.models import FULL_STACK, random_model

engine.steps.captured.suits_capture = lambda model: True
# kernels that run nothing give other logits
engine.steps.captured.difference = lambda *args: ''
decode._n_processors = lambda device: 132
compiled = set()


class Launched:
    """Replaces a kernel: records which specialisation a launch would compile, runs nothing, and
    fills the outputs with zeros."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, num_stages=0, **constants):
        given = dict(zip(self.kernel.arg_names, args)) | constants
        kernel_name, form = self.kernel.__name__, specialised(self.kernel, given)
        compiled.add(str((kernel_name, num_warps, num_stages, form)))
        outputs = {'_split': ('OUT', 'LSE'), '_join': ('OUT',), '_linear': ('Y',),
                   '_few_rows': ('Y',), '_of_parts': ('VALUES', 'PLACES'), '_of_rows': ('TOKENS',)}
        for name in outputs[kernel_name]:
            given[name].zero_()


for module, name in ((decode, '_split'), (decode, '_join'), (fused_linear, '_linear'),
                     (fused_linear, '_few_rows'), (greedy, '_of_parts'), (greedy, '_of_rows')):
    setattr(module, name, Launched(getattr(module, name)))
heads, kv_dtype, room, prefix = json.loads(sys.argv[1])
config = FULL_STACK | dict(n_kv_head=heads, window_size=20, block_size=room, head_dim=16)
model = random_model(GPTConfig(**config), torch.float32)
engine = Engine(model, 5, room, kv_dtype, prefill_chunk=64, page_size=16, prefix_budget=prefix)
prepare(engine)
prepared, steps = set(compiled), engine.fast_decode._steps.copy()
draw, longest = random.Random(1), room - 9
params = SamplingParams(max_new_tokens=8, temperature=0)
lengths = [1, 2, 3, 17, 60, 64, 65, 300, 3000]
for _ in range(6):
    prompts = [[draw.randrange(20)] * min(draw.choice(lengths), longest) for _ in range(7)]
    # a text that continues another finds its beginning in the prefix store: chunks of any size
    # after any number of tokens
    prompts += [prompts[0] + [1] * draw.randrange(9)]
    done = engine.generate([prompt[:longest] for prompt in prompts], params)
    assert {completion.finish_reason for completion in done} == {'length'}
print(json.dumps({'prepared': len(prepared), 'amid traffic': sorted(compiled - prepared),
                  'steps': sorted(steps),
                  'captured amid traffic': engine.fast_decode._steps != steps,
                  'held': engine.cache.lengths.tolist()}))
'''


@pytest.mark.parametrize('heads, kv_dtype, room, prefix', [
    (1, 'int8', 4000, 0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (4, 'float32', 4000, 0), (1, 'float32', 4000, 10 ** 9), (2, 'int8', 200, 10 ** 9),
        (4, 'int8', 60, 0), (1, 'int8', 20, 0)])])
def test_requests_compile_and_capture_nothing(heads, kv_dtype, room, prefix):
    pytest.importorskip('triton')
    found = run_alone(PROGRAM, json.dumps([heads, kv_dtype, room, prefix]))
    assert found['amid traffic'] == [] and found['prepared'] > 4
    assert found['steps'] == [1, 2, 4, 5] and not found['captured amid traffic']


def test_not_while_there_are_requests(everywhere):
    engine = Engine(random_model(GPTConfig(**FULL_STACK)), 2, 40)
    engine.submit([1, 2])
    with pytest.raises(UserError, match='1 requests have not ended'):
        prepare(engine)


def test_where_steps_are_not_captured_it_does_nothing():
    engine = Engine(random_model(GPTConfig(**FULL_STACK)), 2, 40)
    engine.submit([1, 2])
    prepare(engine)
    assert engine.fast_decode is None and engine.cache.lengths.tolist() == [0, 0]
