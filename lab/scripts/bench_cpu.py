"""Run the benchmarks for results/cpu/: bench.py's commands, then the page made from their JSON.

    python lab/scripts/bench_cpu.py                   # all missing ones: an hour on 2 idle cores
    python lab/scripts/bench_cpu.py decode-b16 serve  # these again
    python lab/scripts/bench_cpu.py --list
    python lab/scripts/bench_cpu.py --table           # only the page

Ctrl-C keeps the finished files.
"""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'results' / 'cpu'
# the full stack: GPT-2 124M's shape and number of parameters, with every memory saving on
FULL = 'config/train_gpt2_mqa_local.py --mode='
STORED_INT8 = ' --weight_dtype=int8 --kv_dtype=int8'
INT8 = STORED_INT8 + ' --against=vanilla_float32'
CONTEXTS = {1: '1024,4096,16384,32768', 4: '1024,4096,16384', 16: '1024,4096'}
DECODE = {f'b{batch}': f' --batch_sizes={batch} --contexts={contexts}'
          for batch, contexts in CONTEXTS.items()}
VLLM = FULL + ('serve --against=vllm --batch_sizes=16 --contexts=64 --requests=32 '
               '--output_lengths=64')
PEER = '--mode=decode --steps=32 --against='
BENCHES = {
    **{f'decode-{b}': FULL + 'decode --against=vanilla' + DECODE[b] for b in DECODE},
    **{f'decode-int8-{b}': FULL + 'decode' + DECODE[b] + INT8 for b in DECODE},
    'decode-int8-kv': FULL + 'decode --batch_sizes=1,4,16 --contexts=1024,4096,16384 '
                             '--kv_dtype=int8 --against=float32_kv',
    'decode-1GB': FULL + 'decode --contexts=4096 --budget=1GB' + INT8,
    'decode-bfloat16': FULL + 'decode --batch_sizes=1,16 --contexts=1024 --dtype=bfloat16',
    'decode-plain-torch': FULL + 'decode --batch_sizes=1,16 --contexts=1024 --native=False',
    # llama-cpp-python and gguf, or ctranslate2 and transformers, must be installed
    'against-llama.cpp-b1': PEER + 'llama.cpp --batch_sizes=1 --contexts=32,900',
    'against-llama.cpp-b16': PEER + 'llama.cpp --batch_sizes=16 --contexts=900',
    'against-llama.cpp-int8-b1':
        PEER + 'llama.cpp --batch_sizes=1 --contexts=32,900 --weight_dtype=int8',
    'against-llama.cpp-int8-b16':
        PEER + 'llama.cpp --batch_sizes=16 --contexts=900 --weight_dtype=int8 --kv_dtype=bfloat16',
    'against-ctranslate2-int8':
        PEER + 'ctranslate2 --batch_sizes=1,16 --contexts=32 --weight_dtype=int8',
    'against-hf': '--mode=decode --against=hf --batch_sizes=1,16 --contexts=960 --steps=32',
    # a checkout of karpathy/nanoGPT in ./nanoGPT
    'against-nanogpt': '--mode=decode --against=nanogpt --nanogpt=nanoGPT --batch_sizes=1 '
                       '--contexts=960 --steps=8',
    'prefill': FULL + 'prefill --against=untrimmed --contexts=1024,8192',
    'prefill-int8': FULL + 'prefill --against=untrimmed --contexts=1024,4096,8192' + STORED_INT8,
    'prefill-chunked': FULL + 'prefill --against=vanilla --contexts=1024,4096 --prefill_chunk=256',
    'recompute': FULL + 'recompute --against=vanilla --contexts=1024',
    'lengths': FULL + 'lengths --against=vanilla --contexts=256,512,1024,2048,8192',
    # in the environment that lab/scripts/vllm_env.sh makes
    'against-vllm': VLLM + STORED_INT8,
    'against-vllm-bfloat16': VLLM + ' --dtype=bfloat16',
    'against-vllm-prefill': FULL + 'prefill --against=vllm --contexts=1024,4096' + STORED_INT8,
    'serve': FULL + 'serve --batch_sizes=16 --contexts=64',
    'chat': FULL + 'chat --contexts=1024,8192 --kv_dtype=int8 --page_sizes=16,64',
}


PATHS = {name: RESULTS / f'{name}.json' for name in BENCHES}


def write_page() -> None:
    """Write results/cpu/README.md from the existing files."""
    found = [str(path) for path in PATHS.values() if path.exists()]
    command = [sys.executable, '-X', 'utf8', '-m', 'lab.benchmarks.table', *found]
    page = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    (RESULTS / 'README.md').write_bytes(page)


def main(names: list[str]) -> int | str:
    if '--list' in names:
        print('\n'.join(f'{name}: python bench.py {args}' for name, args in BENCHES.items()))
        return 0
    if names == ['--table']:
        write_page()
        return 0
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(__doc__.strip() if unknown[0].startswith('-')
              else f"error: {unknown[0]!r} is none of {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    failed = []
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in names or [name for name in BENCHES if not PATHS[name].exists()]:
        print(f'== {name}', flush=True)
        command = [sys.executable, 'bench.py', *BENCHES[name].split(), '--device=cpu',
                   f'--save={PATHS[name]}']
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    write_page()
    return f"error: failed: {', '.join(failed)}" if failed else 0


if __name__ == '__main__':
    try:
        raise SystemExit(main(sys.argv[1:]))
    except (KeyboardInterrupt, subprocess.CalledProcessError) as e:
        raise SystemExit(f'error: {e}' if str(e) else 'interrupted') from None
