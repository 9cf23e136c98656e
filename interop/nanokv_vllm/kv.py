"""What vLLM keeps of K and V for a request, of an exported model and of vanilla GPT-2 in the same shape and engine.

    python -m interop.nanokv_vllm.kv FOLDER --max_model_len=8192
    python -m interop.nanokv_vllm.kv FOLDER --max_model_len=8192 --max_num_batched_tokens=512 --json

Both are started in vLLM (with made-up weights), which says how many requests of max_model_len tokens its memory has room for.
That is more for each than the plan's arithmetic, which is printed beside it: whole blocks are kept, and of local layers not
only the window but also what a step may add to it (max_num_batched_tokens), until it is done.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PASSED = ('max_model_len', 'max_num_batched_tokens', 'dtype', 'gpu_memory_utilization')
ELEMENT = {'float32': 4, 'bfloat16': 2, 'float16': 2}


def planned(config: dict, tokens: int, dtype: str) -> int:
    """Bytes by arithmetic alone: of each layer that owns its K and V, all tokens or the window's."""
    held = 0
    for i, (owner, kind) in enumerate(zip(config['kv_owners'], config['layer_types'])):
        if owner == i:
            held += min(config['sliding_window'], tokens) if kind == 'sliding_attention' else tokens
    return held * 2 * config['num_key_value_heads'] * config['head_dim'] * ELEMENT[dtype]


def vanilla(config: dict, tokens: int) -> dict:
    """config.json of GPT-2 in the same shape."""
    return {'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'n_layer': config['num_hidden_layers'],
            'n_head': config['num_attention_heads'], 'n_embd': config['num_attention_heads'] * config['head_dim'],
            'n_positions': tokens, 'vocab_size': config['vocab_size']}


def measure(folder: str, args) -> dict:
    """In this process: the engine's own figures."""
    os.environ |= {'VLLM_ENABLE_V1_MULTIPROCESSING': '0', 'VLLM_ALLOW_LONG_MAX_MODEL_LEN': '1'}
    from vllm import LLM
    llm = LLM(model=folder, load_format='dummy', skip_tokenizer_init=True, dtype=args.dtype, max_model_len=args.max_model_len,
              max_num_batched_tokens=args.max_num_batched_tokens, max_num_seqs=4, enforce_eager=True,
              gpu_memory_utilization=args.gpu_memory_utilization)
    core = llm.llm_engine.engine_core.engine_core
    held = core.scheduler.kv_cache_config
    [nbytes] = {tensor.size for tensor in held.kv_cache_tensors}  # one allocation, whose blocks all layers take from
    requests = llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    groups = [{'layers': len(group.layer_names), 'block_size': group.kv_cache_spec.block_size,
               'kind': type(group.kv_cache_spec).__name__} for group in held.kv_cache_groups]
    import vllm
    of_one = round(nbytes / requests)  # whole blocks
    return {'vllm': vllm.__version__, 'bytes': nbytes, 'requests': requests, 'bytes_per_request': of_one,
            'bytes_per_token': of_one / args.max_model_len, 'groups': groups}


def compare(args) -> dict:
    """Ours and vanilla, each in a process of its own."""
    try:
        config = json.loads((Path(args.folder) / 'config.json').read_text(encoding='utf-8'))
    except (OSError, ValueError) as e:
        sys.exit(f'error: no config.json that can be read in {args.folder}: {e}')
    if 'kv_owners' not in config:
        sys.exit(f'error: {args.folder} is not a folder of interop.export, or it is vanilla GPT-2 itself')
    found = {name: getattr(args, name) for name in ('max_model_len', 'max_num_batched_tokens', 'dtype')}
    with tempfile.TemporaryDirectory() as other:
        (Path(other) / 'config.json').write_text(json.dumps(vanilla(config, args.max_model_len)), encoding='utf-8')
        for name, folder in (('ours', args.folder), ('vanilla', other)):
            flags = [f'--{flag}={getattr(args, flag)}' for flag in PASSED]
            done = subprocess.run([sys.executable, __file__, folder, '--one', *flags], text=True, stdout=subprocess.PIPE)
            if done.returncode:
                sys.exit(f'error: {name}: vLLM failed; its output is above')
            found[name] = json.loads(done.stdout.splitlines()[-1])
    found['vllm'] = found['ours'].pop('vllm')
    found['vanilla'].pop('vllm')
    n_layer, n_head = config['num_hidden_layers'], config['num_attention_heads']
    found['ours']['planned'] = planned(config, args.max_model_len, args.dtype)
    found['vanilla']['planned'] = n_layer * args.max_model_len * 2 * n_head * config['head_dim'] * ELEMENT[args.dtype]
    for name in ('bytes_per_request', 'planned'):
        found[f'smaller_{name}'] = found['vanilla'][name] / found['ours'][name]
    return found


def main():
    parser = argparse.ArgumentParser(prog='python -m interop.nanokv_vllm.kv', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', help='what interop.export wrote')
    parser.add_argument('--max_model_len', type=int, default=8192, help='tokens of a request (%(default)s)')
    parser.add_argument('--max_num_batched_tokens', type=int, default=512, help='tokens of a step (%(default)s)')
    parser.add_argument('--dtype', default='bfloat16', choices=ELEMENT, help='(%(default)s)')
    parser.add_argument('--gpu_memory_utilization', type=float, default=0.2, help='share of memory for vLLM (%(default)s)')
    parser.add_argument('--json', action='store_true', help='end with one JSON document on the last line')
    parser.add_argument('--one', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print('\n' + json.dumps(measure(args.folder, args)))
        return
    found = compare(args)
    print(f"K and V of a request of {found['max_model_len']:,} tokens, {found['dtype']}, at most "
          f"{found['max_num_batched_tokens']:,} tokens a step\n\n{'':10}{'vLLM':>16}{'a token':>10}{'arithmetic':>16}")
    for name in ('vanilla', 'ours'):
        row = found[name]
        print(f"{name:10}{row['bytes_per_request']:16,.0f}{row['bytes_per_token']:10,.1f}{row['planned']:16,}")
    print(f"{'smaller':10}{found['smaller_bytes_per_request']:15.1f}x{'':10}{found['smaller_planned']:15.1f}x")
    if args.json:
        print(json.dumps(found))


if __name__ == '__main__':
    main()
