#!/usr/bin/env bash
# Check and measure on a GPU all that needs one. Each part takes under 9 minutes on one H200-class GPU, most useful first, and
# needs no network, only what is installed (torch 2.11 or newer with Triton, pytest for the first part).
#
#   scripts/gpu_check.sh --part=tests      the tests marked gpu
#   scripts/gpu_check.sh --part=kernels    attention and the K/V write alone, against SDPA and FlexAttention
#   scripts/gpu_check.sh --part=decode     tokens per second out of caches, captured; batch, context, int8, a 1B shape
#   scripts/gpu_check.sh --part=train      vanilla and full stack, bfloat16 and float16, every recomputation policy, long sequences
#   scripts/gpu_check.sh --part=ablate     a short ladder
#   scripts/gpu_check.sh --part=tests --out=FOLDER --limit=500
#
# Writes OUT/*.json (results/gpu, if not given) and a table of all that is there, OUT/README.md.
set -uo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
