#!/usr/bin/env bash
# Replays the traces of lab/sessions against nanoKV, vLLM and llama.cpp, for the tables in its README: two hours on two idle
# cores, of which one is the times of the chat trace. What has a line or a file in results/sessions is not measured again.
#
#   VLLM_PYTHON=.venv-vllm/bin/python LLAMA_SERVER=llama-server lab/scripts/sessions.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
RESULTS=results/sessions
mkdir -p "$RESULTS"

# trace, its KV cache in MB, server as nanokv-float32, option of the replay: how it is loaded; file of the result, and its name there
replay() {
    local trace=$1 megabytes=$2 server=$3 load=$4 more='' program=''
    local name=$trace-${load#--}-$megabytes-$server
    local file=$RESULTS/${5:-replay}.jsonl measured
    name=${6:-${name//=/-}}
    grep -qs "^{\"run\":\"$name\"" "$file" && return
    case $server in
        nanokv-int8) more='--weight_dtype=int8 --kv_dtype=int8' ;;
        nanokv-bfloat16) more=--dtype=bfloat16 ;;
        vllm-*) more=--dtype=${server#vllm-} program=${VLLM_PYTHON:-.venv-vllm/bin/python} ;;
        llama*) program=${LLAMA_SERVER:-llama-server} ;;
    esac
    measured=$(mktemp)
    "${PYTHON:-python}" -m lab.sessions replay "lab/sessions/traces/$trace.jsonl" --start="${server%%-*}" \
        --program="$program" --kv="${megabytes}MB" --more="$more" --save="$measured" "$load"
    "${PYTHON:-python}" -c 'import json, sys; print(json.dumps({"run": sys.argv[1], **json.load(sys.stdin)},
        separators=(",", ":")))' "$name" < "$measured" >> "$file"
    rm "$measured"
}

# all that the prefixes of a trace take in float32 and 16 running requests, and a quarter of it
for cell in 'chat 400' 'editing 840' 'forking 380'; do
    for server in nanokv-float32 vllm-float32 nanokv-bfloat16 vllm-bfloat16 nanokv-int8; do
        # shellcheck disable=SC2086
        replay $cell $server --users=16
    done
done
for server in nanokv-float32 nanokv-int8 vllm-float32 vllm-bfloat16; do
    replay chat 100 $server --rate=4
done
for server in nanokv-float32 nanokv-int8 vllm-float32; do
    for cell in 'chat 100' 'editing 210' 'forking 95'; do
        # shellcheck disable=SC2086
        replay $cell $server --users=16
    done
done
replay chat 400 nanokv-float32 --rate=4
replay chat 400 vllm-float32 --rate=4
replay chat 2400 llama.cpp-float16 --rate=4  # 75 MB a request

# how much runs differ
for k in 1 2 3 4; do
    replay forking 380 nanokv-float32 --users=16 pairs "forking-nanokv-$k"
    replay forking 380 vllm-float32 --users=16 pairs "forking-vllm-$k"
done

# three times as many users as rows: all may wait; there are fewer places than users
overload() {
    local file=$RESULTS/$1.json
    [ -e "$file" ] || "${PYTHON:-python}" -m lab.sessions replay lab/sessions/traces/chat.jsonl --start=nanokv --kv=100MB \
        --users=48 --more=--max_waiting="$2" --save="$file"
}
overload overload 64
overload overload-refused 8
