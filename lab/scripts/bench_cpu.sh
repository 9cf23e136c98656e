#!/usr/bin/env bash
# Runs the benchmarks for results/cpu/, then makes the page there from their files: an hour on two idle cores. What has a file
# is not measured again; a benchmark that fails does not end the others.
#
#   lab/scripts/bench_cpu.sh                    # all missing ones
#   lab/scripts/bench_cpu.sh decode-b16 serve   # of these
set -uo pipefail
cd "$(dirname "$0")/../.."
trap 'exit 130' INT
PYTHON=${PYTHON:-python}
[ $# = 0 ] && only='' || only=" $* "
files=() failed=()

# name, arguments of bench.py
bench() {
    local name=$1 file=results/cpu/$1.json
    shift
    if [ ! -e "$file" ] && [[ -z $only || $only == *" $name "* ]]; then
        echo "== $name"
        "$PYTHON" bench.py "$@" --device=cpu --save="$file" || failed+=("$name")
    fi
    [ ! -e "$file" ] || files+=("$file")
}
# the full stack: GPT-2 124M's shape and number of parameters, with every memory saving on
full() { bench "$1" config/train_gpt2_mqa_local.py "--mode=$2" "${@:3}"; }
decode() { full "$1" decode "${@:2}"; }
int8='--weight_dtype=int8 --kv_dtype=int8'
vllm='--against=vllm --batch_sizes=16 --contexts=64 --requests=32 --output_lengths=64'

# shellcheck disable=SC2086
{
decode decode-b1 --against=vanilla --batch_sizes=1 --contexts=1024,4096,16384,32768
decode decode-b4 --against=vanilla --batch_sizes=4 --contexts=1024,4096,16384
decode decode-b16 --against=vanilla --batch_sizes=16 --contexts=1024,4096
decode decode-int8-b1 --batch_sizes=1 --contexts=1024,4096,16384,32768 $int8 --against=vanilla_float32
decode decode-int8-b4 --batch_sizes=4 --contexts=1024,4096,16384 $int8 --against=vanilla_float32
decode decode-int8-b16 --batch_sizes=16 --contexts=1024,4096 $int8 --against=vanilla_float32
decode decode-int8-kv --batch_sizes=1,4,16 --contexts=1024,4096,16384 --kv_dtype=int8 --against=float32_kv
decode decode-1GB --contexts=4096 --budget=1GB $int8 --against=vanilla_float32
decode decode-bfloat16 --batch_sizes=1,16 --contexts=1024 --dtype=bfloat16
decode decode-plain-torch --batch_sizes=1,16 --contexts=1024 --native=False
full prefill prefill --against=untrimmed --contexts=1024,8192
full prefill-int8 prefill --against=untrimmed --contexts=1024,4096,8192 $int8
full prefill-chunked prefill --against=vanilla --contexts=1024,4096 --prefill_chunk=256
full recompute recompute --against=vanilla --contexts=1024
# in the environment that lab/scripts/vllm_env.sh makes
full against-vllm serve $vllm $int8
full against-vllm-bfloat16 serve $vllm --dtype=bfloat16
full against-vllm-prefill prefill --against=vllm --contexts=1024,4096,8192 $int8
full against-vllm-prefill-bfloat16 prefill --against=vllm --contexts=1024,4096,8192 --dtype=bfloat16
full serve serve --batch_sizes=16 --contexts=64
}

"$PYTHON" -X utf8 -m lab.benchmarks.table "${files[@]}" > results/cpu/README.md
[ ${#failed[@]} = 0 ] || { echo "error: failed: ${failed[*]}" >&2; exit 1; }
