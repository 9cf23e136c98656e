"""Measure the K/V bytes that vLLM allocates per request, for an exported model and for vanilla
GPT-2 in the same shape. The last line of the output is one JSON document.

    python -m interop.nanokv_vllm.kv FOLDER --max_model_len=8192 --max_num_batched_tokens=512

vLLM starts both with dummy weights and reports how many requests of max_model_len tokens fit in its
memory. A request takes more than the plan's arithmetic, printed next to it: sizes are rounded up to
blocks, and a local layer also stores a step's new tokens (max_num_batched_tokens).
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kv import account

PASSED = ('max_model_len', 'max_num_batched_tokens', 'dtype', 'gpu_memory_utilization')
DTYPES = 'float32', 'bfloat16', 'float16'


def vanilla(config: dict, tokens: int) -> dict:
    """Return the config.json of GPT-2 in the same shape."""
    n_head = config['num_attention_heads']
    return {'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'n_head': n_head,
            'n_layer': config['num_hidden_layers'], 'n_embd': n_head * config['head_dim'],
            'n_positions': tokens, 'vocab_size': config['vocab_size']}


def measure(folder: str, args) -> dict:
    """Return vLLM's own numbers, from an engine in this process."""
    os.environ |= {'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'VLLM_ALLOW_LONG_MAX_MODEL_LEN': '1'}
    import vllm
    llm = vllm.LLM(model=folder, load_format='dummy', skip_tokenizer_init=True, max_num_seqs=4,
                   enforce_eager=True, **{name: getattr(args, name) for name in PASSED})
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    [nbytes] = {tensor.size for tensor in cache.kv_cache_tensors}  # one pool for all layers
    requests = llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    groups = [{'layers': len(group.layer_names), 'block_size': group.kv_cache_spec.block_size,
               'kind': type(group.kv_cache_spec).__name__} for group in cache.kv_cache_groups]
    per_request = round(nbytes / requests)  # whole blocks
    return {'vllm': vllm.__version__, 'bytes': nbytes, 'requests': requests, 'groups': groups,
            'bytes_per_request': per_request, 'bytes_per_token': per_request / args.max_model_len}


def compare(args) -> dict:
    """Compare the exported model with vanilla GPT-2, each in its own process."""
    config = json.loads(Path(args.folder, 'config.json').read_text(encoding='utf-8'))
    tokens, dtype = args.max_model_len, args.dtype
    found = {name: getattr(args, name) for name in PASSED[:3]}
    flags = [f'--{name}={getattr(args, name)}' for name in PASSED]
    with tempfile.TemporaryDirectory() as other:
        Path(other, 'config.json').write_text(json.dumps(vanilla(config, tokens)), encoding='utf-8')
        for name, folder in (('ours', args.folder), ('vanilla', other)):
            command = [sys.executable, '-m', 'interop.nanokv_vllm.kv', folder, '--one', *flags]
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            found['vllm'] = found[name].pop('vllm')
            settings = json.loads(Path(folder, 'config.json').read_text(encoding='utf-8'))
            found[name]['planned'] = account(settings, max_seq_len=tokens, kv_dtype=dtype)['bytes']
    for name in ('bytes_per_request', 'planned'):
        found[f'smaller_{name}'] = found['vanilla'][name] / found['ours'][name]
    return found


def main():
    parser = argparse.ArgumentParser(prog='python -m interop.nanokv_vllm.kv', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('folder', help='a folder of interop.export')
    add('--max_model_len', type=int, default=8192, help='tokens of a request (%(default)s)')
    add('--max_num_batched_tokens', type=int, default=512, help='tokens of a step (%(default)s)')
    add('--dtype', default='bfloat16', choices=DTYPES, help='(%(default)s)')
    add('--gpu_memory_utilization', type=float, default=0.2,
        help='share of memory for vLLM (%(default)s)')
    add('--one', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    print('\n' + json.dumps(measure(args.folder, args) if args.one else compare(args)))


if __name__ == '__main__':
    main()
