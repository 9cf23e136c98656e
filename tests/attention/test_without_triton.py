"""Triton and flash-attn are optional: without them everything imports and runs on a CPU."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '''
import importlib, pkgutil, sys
sys.modules['triton'] = sys.modules['flash_attn'] = None  # importing them is an ImportError now
import torch
import attention, config, data, engine, interop, kv, lab.ablation, lab.benchmarks, training
of_other_packages = {'attention.kernels.decode', 'attention.kernels.new_key',  # Triton
                     'engine.steps.fused_linear', 'engine.steps.greedy',
                     'interop.nanokv_vllm.model'}  # vLLM
for package in (attention, config, engine, interop, kv, lab.ablation, lab.benchmarks, training):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
        ladders_and_mains = module.name.startswith('config.') or module.name.endswith('__main__')
        if not ladders_and_mains and module.name not in of_other_packages:
            importlib.import_module(module.name)
import bench, sample, train, ablate
from attention.backends import triton_usable
from attention.kernels import choose as choosing
from attention.kernels.choose import choose
from engine.engine import Engine
from engine.requests.params import SamplingParams
from model import GPT, GPTConfig

choosing.FLASH_ATTN_VERSION = 0  # whatever is installed
cuda = torch.device('cuda')
assert not triton_usable(cuda)
assert choose('global', 'auto', cuda, torch.bfloat16, 64) == 'sdpa'
model = GPT(GPTConfig(block_size=32, vocab_size=20, n_layer=2, n_head=2, n_embd=16,
                      layer_pattern='LG', window_size=4, pos_embedding='rope'))
model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long))[1].backward()
engine = Engine(model, 2, 32, 'int8')
print(len(engine.generate([[1, 2], [3]], SamplingParams(max_new_tokens=9))[0].tokens))
'''


def test_everything_imports_and_runs():
    done = subprocess.run([sys.executable, '-c', PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ['9']
