"""Benchmark training steps (like nanoGPT's bench.py), decoding from the cache, prefill, serving.

    python bench.py --real_data=False                   # GPT-2 124M's shape, one random batch
    python bench.py --real_data=False --profile=True    # trace for chrome://tracing or TensorBoard
    python bench.py --real_data=False --compile=False --batch_size=4 --block_size=256 --json=True
    # a config's shape, and batches from its data set
    python bench.py config/train_mqa_local.py --dataset=shakespeare_works
    # training steps, interleaved with nanoGPT's
    python bench.py --real_data=False --against=nanogpt --nanogpt=FOLDER

    GPT2=config/train_gpt2_mqa_local.py
    python bench.py $GPT2 --mode=decode --batch_sizes=1,4,16 --contexts=1024,4096
    python bench.py $GPT2 --mode=decode --batch_sizes=16 --contexts=4096 --against=vanilla
    python bench.py $GPT2 --mode=decode --contexts=4096 --budget=1GB --against=vanilla
    python bench.py $GPT2 --mode=prefill --contexts=1024,8192 --prefill_chunk=1024
    python bench.py $GPT2 --mode=serve --batch_sizes=16 --contexts=64 --requests=64
    # the same model exported, in the environment that lab/scripts/vllm_env.sh makes
    python bench.py $GPT2 --mode=serve --contexts=64 --requests=32 --against=vllm
    python bench.py $GPT2 --mode=recompute --contexts=1024 --against=vanilla
    python bench.py $GPT2 --mode=kernels --batch_sizes=256 --contexts=8192              # on CUDA
    python bench.py --help

train: forward, backward and AdamW update of one batch, without dropout. decode: time per output
token (TPOT), greedy, from caches that hold `contexts` tokens, and bytes stored and read. prefill:
time to first token (TTFT). serve: requests of different lengths, continuous batching against
static. recompute: training steps by policy. kernels: attention and the K/V write alone, on CUDA.
Each is a module of lab/benchmarks/. Weights are random, in the settings' shape. Compared models are
interleaved; ratios are medians over pairs of rounds. `python -m lab.benchmarks.table` makes a page
from documents that were saved.
"""
import importlib
import json
from dataclasses import dataclass

import configurator
from common.files import write_json
from common.settings import Attention, Device, Inference, Json, Model, Seed, key
from data.datasets import DATA_ROOT
from lab.benchmarks.setting import check_against, check_target
from lab.benchmarks.table import TABLES, show
from training.device import check_seed


@dataclass(frozen=True)
class Settings(Inference, Seed, Device, Attention, Json, Model):
    mode: str = key('train', 'what to time, as described above',
                    ('train', 'decode', 'prefill', 'serve', 'recompute', 'kernels'))
    against: str = key(
        '', "baseline, timed interleaved: 'vanilla' (GPT-2's KV cache, our code; decode, prefill, "
        "recompute), 'vanilla_float32', 'float32_kv' (same model; decode), 'nanogpt' (train), "
        "'untrimmed' (all tokens in all layers; prefill), 'vllm' (prefill, serve)",
        ('', 'vanilla', 'vanilla_float32', 'float32_kv', 'untrimmed', 'nanogpt', 'vllm'))
    batch_sizes: str = key('1', "all modes but train: batch sizes, as '1,4,16'")
    contexts: str = key('512', "all modes but train: tokens in the cache, as '1024,4096'; of a "
                        'prompt (prefill, serve), of a sequence (recompute, or with a budget)')
    steps: int = key(16, 'mode decode: tokens timed in a round')
    repeats: int = key(5, 'all modes but train, kernels: rounds after a warm-up, at least 5')
    prefill_chunk: int = key(0, "mode prefill: tokens a chunk; 0 = all (serve: the engine's)")
    requests: int = key(64, 'mode serve: number of requests')
    message: int = key(20, 'prefill against vllm: tokens of the timed message')
    output_lengths: str = key('16,256', 'mode serve: shortest, longest output (log-uniform)')
    budget: str = key('', "mode decode: KV memory to fill, as '1GB'; replaces batch_sizes")
    policies: str = key('none,selective,mlp,block,sqrt', 'mode recompute: policies to compare')
    chunked_loss: bool = key(True, 'mode train (not against nanoGPT): loss in chunks')
    nanogpt: str = key('', 'with against=nanogpt: folder of a nanoGPT checkout')
    save: str = key('', 'also write the JSON document to this file')
    batch_size: int = key(12, 'mode train: sequences in a step')
    real_data: bool = key(True, 'mode train: use the data set; False = one fixed random batch')
    dataset: str = key('openwebtext', 'folder under data/; if absent, the vocabulary is 50304')
    compile: bool = key(True, 'torch.compile the model (train) or, if given, its MLPs (others)')
    profile: bool = key(False, 'mode train: write a profiler trace to bench_log/, time nothing')


def main(argv=None):
    s = configurator.parse(Settings, argv, usage=__doc__)
    check_seed(s.seed)
    check_against(s)
    check_target(s.save)  # before minutes of measuring
    module = 'vllm' if s.against == 'vllm' else s.mode  # a mode's module has its name
    document = importlib.import_module(f'lab.benchmarks.{module}').run(s, DATA_ROOT)
    if s.mode in TABLES:
        show(document)
    if s.save:
        write_json(s.save, document)
    if s.json:
        print(json.dumps(document))


if __name__ == '__main__':
    configurator.run_program(main)
