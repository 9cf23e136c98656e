#!/usr/bin/env bash
# Check and measure on a GPU all that needs one: correctness, speed beside what the hardware allows, profiles. Made for a machine
# that is at hand for half an hour: each call ends within 9 minutes, the most telling first, and loses nothing if it is cut off.
# Needs no network, only what is installed: torch 2.11 or newer with Triton, numpy, rich; pytest and hypothesis for the tests.
#
#   scripts/gpu_check.sh --dry_run=True        every cell, its estimated time, the hardware's limit and the share of it expected
#   scripts/gpu_check.sh --part=first          is it right, is it fast, where does the time go (6 minutes)
#   scripts/gpu_check.sh --part=tests          the tests marked gpu, in 8 processes (8 minutes)
#   scripts/gpu_check.sh --part=tune           layouts of the decode kernel (6 minutes)
#   scripts/gpu_check.sh --part=train          training at T=1,024, by backend and batch (8 minutes)
#   --part=sizes, programs, train-more, ladder  for further visits: 5 to 9 minutes each
#   scripts/gpu_check.sh --part=first --out=FOLDER --limit=540 --only=captured,rates
#   scripts/gpu_check.sh --merge FOLDER/cells.jsonl       results of another folder, into OUT
#   scripts/gpu_check.sh --part=first --rehearse=True --out=out-rehearsal         the same on a CPU, tiny: tries the check itself
#
# Writes to OUT (results/gpu, if not given): cells.jsonl, a line for each result as it comes; README.md, the table of them all;
# detail.tar.gz, logs and profiler traces. Prints at most 40 lines of summary last. Exit status 1: something was not right.
set -uo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
