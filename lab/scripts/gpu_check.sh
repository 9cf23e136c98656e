#!/usr/bin/env bash
# Check and measure everything that needs a GPU, a part at a time, the most informative first. A
# part ends within 9 minutes. A command that fails, hangs or dies costs only itself.
#
#   lab/scripts/gpu_check.sh --part=smoke    does it run at all: six tests (2 minutes); mend, repeat
#   lab/scripts/gpu_check.sh --part=exact    the tests marked gpu, 8 processes at a time
#   lab/scripts/gpu_check.sh --part=speed    decoding, the engine, a training step, profiles
#   lab/scripts/gpu_check.sh --part=tune     Linear layers of few rows, memcheck
#   lab/scripts/gpu_check.sh --part=train    training at T=1,024, by backend and batch
#   --part=sizes, programs, recompute, ladder    for further visits
#
#   --out=FOLDER      for results (default: results/gpu); README.md in it has all parts' results
#   --limit=SECONDS   that the part may take (default: 540); what is left then is not run
#   --dry_run=True    print the commands instead of running them
#   --device=cpu      smoke and exact only: the same tests in a tiny shape, with interpreted kernels
#
# It needs no network and only torch 2.11 with Triton, numpy and rich; for tests also pytest and
# hypothesis. It ends with a list of what failed. Exit status: 0 nothing failed, 1 something did,
# 2 nothing was run.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
part='' out=results/gpu limit=540 dry_run=False device=cuda

for argument; do
  value=${argument#*=}
  case $argument in
    --part=*) part=$value ;;
    --out=*) out=$value ;;
    --limit=*) limit=$value ;;
    --device=*) device=$value ;;
    --dry_run | --dry_run=True) dry_run=True ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "unknown argument $argument: see --help" >&2; exit 2 ;;
  esac
done

# -- commands --------------------------------------------------------------------------------------

# step NAME SECONDS COMMAND...: its output goes to OUT/PART-NAME.log; notes a failure
step() {
  local name=$part-$1 seconds=$2 began=$SECONDS status=0
  shift 2
  if [[ $dry_run == True ]]; then
    printf '%q ' "$@" && echo
    return
  fi
  local left=$((limit - SECONDS))
  if ((left < 10)); then
    echo "$name: not run, the time was up" | tee -a "$failed"
    return 1
  fi
  timeout --kill-after=10 "$((seconds < left ? seconds : left))" "$@" \
    > "$out/$name.log" 2>&1 < /dev/null || status=$?
  case $status in
    0) echo "$name: ok, $((SECONDS - began)) s" ;;
    124 | 137) echo "$name: stopped or killed after $((SECONDS - began)) s" | tee -a "$failed" ;;
    *) echo "$name: failed with status $status: $(tail -n 1 "$out/$name.log")" | tee -a "$failed" ;;
  esac
  return "$status"
}

# tests NAME ID...: in one process. If it dies, each test gets a process of its own.
tests() {
  local name=$1 status=0 id k=0 xml=$out/$part-$1.xml
  shift
  step "$name" "$((60 + 40 * $#))" "$python" -m pytest -q -rfE --tb=short -p no:cacheprovider \
    -m 'gpu or not gpu' --junitxml="$xml" "$@" || status=$?
  if [[ $dry_run == False && $status -eq 1 && -f $out/$part-$name.log ]]; then
    grep -E '^(FAILED|ERROR) ' "$out/$part-$name.log" >> "$failed"
  elif ((status > 1)); then
    rm -f "$xml"
    (($# == 1)) || for id; do tests "$name-$((++k))" "$id"; done
  fi
}

# parallel COMMAND...: in the background, 8 at a time on a GPU
parallel() {
  local most=8
  [[ $device == cuda ]] || most=2
  while (($(jobs -rp | wc -l) >= most)); do wait -n; done
  "$@" &
}

# bench NAME SECONDS OPTION...: bench.py in the shape of GPT-2; full: with all savings
bench() { step "$1" "$2" "$python" bench.py "${@:3}" --device=cuda --save="$out/$part-$1.json"; }
full() { bench "$1" "$2" config/train_gpt2_mqa_local.py "${@:3}"; }
decode() { full "decode-$1" 90 --mode=decode "${@:2}"; }
training=(--mode=train --real_data=False --compile=True)
train() { full "$1" 180 "${training[@]}" "${@:2}"; }

# times NAME WHAT [BATCH]: lab/scripts/gpu_times.py
times() {
  step "$1" 90 "$python" lab/scripts/gpu_times.py "$2" "$out/$part-$1.json" "${@:3}"
}

# -- parts -----------------------------------------------------------------------------------------

# of tests/gpu/test_gpt2_shape.py
smoke=(captured_steps\[$device-auto-contiguous] captured_steps\[$device-int8-paged]
  engines_give_the_same_texts\[$device] write\[$device-int8]
  attention\[$device-int8-paged] int8_output_layer\[$device])

run_part() {
  case $part in
    smoke)
      [[ $device != cuda ]] || limit=$((limit < 120 ? limit : 120))
      for k in "${!smoke[@]}"; do
        parallel tests "$k" "tests/gpu/test_gpt2_shape.py::test_${smoke[k]}"
      done
      wait ;;
    exact)
      local where=tests marked=gpu ids first='^tests/(gpu|programs)/'
      [[ $device == cuda ]] || where=tests/gpu marked='not gpu'
      local without=()  # what uses the server, of which no test is marked gpu
      "$python" -c 'import starlette' 2> /dev/null ||
        without=(--ignore=tests/serving --ignore=tests/lab/sessions)
      # a file that cannot be imported is noted and left out
      step collection 120 "$python" -m pytest "$where" --collect-only -q -m "$marked" "${without[@]}"
      ids=$(grep -hs '^tests/.*::' "$out/$part-collection.log")
      mapfile -t ids < <(grep -E "$first" <<< "$ids"; grep -vE "$first" <<< "$ids")
      for ((k = 0; k < ${#ids[@]}; k += 8)); do parallel tests "$((k / 8))" "${ids[@]:k:8}"; done
      wait ;;
    speed)
      decode b64-8k-int8 --batch_sizes=64 --contexts=8192 --steps=32 --kv_dtype=int8
      decode b64-8k --batch_sizes=64 --contexts=8192 --steps=32
      decode b1-1k --batch_sizes=1 --contexts=1024 --steps=128
      times engine-b1 engine 1
      times engine-b64 engine 64
      times profile-decode profile 1
      train train-b32 --batch_size=32
      train profile-train --batch_size=32 --profile=True
      full kernels 120 --mode=kernels --window_size=512 --batch_sizes=1,64 --contexts=1024,8192 ;;
    tune)
      times linears linears
      if command -v compute-sanitizer > /dev/null; then
        step memcheck 200 compute-sanitizer --tool memcheck --error-exitcode 1 "$python" -m pytest \
          -m gpu tests/attention/kernels -k 'any_head_dim or different_lengths or what_torch_does'
      fi ;;
    train)
      train flex-b64 --batch_size=64 --attention_backend=flex
      bench vanilla-b64 150 "${training[@]}" --block_size=1024 --batch_size=64
      train varlen-b64 --batch_size=64 --attention_backend=varlen
      train flex-b16 --batch_size=16 --attention_backend=flex
      bench vanilla-b16 150 "${training[@]}" --block_size=1024 --batch_size=16 ;;
    recompute)
      train flex-b16-whole-loss --batch_size=16 --attention_backend=flex --chunked_loss=False
      train flex-b64-whole-loss --batch_size=64 --attention_backend=flex --chunked_loss=False
      train sdpa-b64 --batch_size=64 --attention_backend=sdpa
      full policies 240 --mode=recompute --against=vanilla --contexts=1024 --batch_sizes=16 ;;
    sizes)
      decode b1-1k-compiled --batch_sizes=1 --contexts=1024 --steps=128 --compile=True
      decode b16-8k --batch_sizes=16 --contexts=8192 --steps=32 --against=vanilla
      decode b256-8k-int8 --batch_sizes=256 --contexts=8192 --steps=32 --kv_dtype=int8
      decode 1B --n_layer=24 --n_head=16 --n_embd=2048 --mlp_hidden=0 --batch_sizes=1,16 \
        --contexts=1024 --steps=64 ;;
    programs)
      full serve 120 --mode=serve --batch_sizes=64 --contexts=256 --requests=256
      full prefill 120 --mode=prefill --against=vanilla --batch_sizes=1,8 --contexts=1024,8192 ;;
    ladder)
      step data 60 "$python" data/text/prepare.py --glob='*.py' \
        --input="$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))')"
      step ladder 500 "$python" ablate.py config/ablate_gpu.py --folder="$out/ladder" \
        --device=cuda --pictures=False --dataset=text --identifiers=False --side_rows={} \
        --max_iters=200 --lr_decay_iters=200 --warmup_iters=20 --eval_interval=100 \
        --eval_windows=32 ;;
  esac
}

case $part in
  smoke | exact | speed | tune | train | recompute | sizes | programs | ladder) ;;
  *) echo "--part=$part: choose smoke, exact, speed, tune, train, ... (see --help)" >&2; exit 2 ;;
esac
if [[ $dry_run == True ]]; then
  run_part
  exit 0
fi

if [[ $device != cuda && $part != smoke && $part != exact ]]; then
  echo "--part=$part needs a CUDA device" >&2
  exit 2
fi
facts=$("$python" -c "
import platform, sys, torch, triton
device = torch.cuda.get_device_name() if '$device' == 'cuda' else 'CPU'
print(f'{device}, torch {torch.__version__}, triton {triton.__version__}, '
      f'Python {platform.python_version()}')" 2>&1) || {
  echo "no CUDA device found: ${facts##*$'\n'}" >&2
  echo 'the tests of --part=smoke and exact run without one, in a tiny shape: --device=cpu' >&2
  exit 2
}
mkdir -p "$out"
rm -f "$out/$part"-*.{xml,json,log,txt}
failed=$out/$part-failed.txt
: > "$failed"
echo "$facts, commit $(git describe --always --dirty 2> /dev/null || echo unknown)," \
  "$(date -u +'%F %H:%M')" | tee "$out/$part-facts.txt"
run_part
"$python" lab/scripts/gpu_table.py "$out" || echo 'no table was written' >> "$failed"
echo
if [[ -s $failed ]]; then
  echo "failed (details in $out):"
  cut -c1-160 "$failed" | head -n 40
  exit 1
fi
echo "nothing failed; the results are in $out/README.md"
