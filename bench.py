"""Benchmark training steps (like nanoGPT's bench.py), decoding from the cache, prefill, serving and
more.

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
static. recompute: training steps by recomputation policy.
kernels: only attention and the K/V write, on CUDA.
Each is a module of lab/benchmarks/. Weights are random, in the settings' shape. Compared models are
interleaved; ratios are medians over pairs of rounds. With --json=True the last line of output is
a JSON document; `python -m lab.benchmarks.table` makes a page from saved documents.
"""
import importlib
import json

import configurator
from data.datasets import DATA_ROOT
from lab.benchmarks.setting import check_against, check_target
from lab.benchmarks.table import TABLES, show
from lab.files import write_json
from training.device import check_seed


def main(argv=None):
    s = configurator.parse('bench', argv, usage=__doc__)
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
