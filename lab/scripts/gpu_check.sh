#!/usr/bin/env bash
# Check and measure everything that needs a GPU: correctness, speed against the hardware's limits,
# profiles. Made for a machine that is available for half an hour: each call ends within 9 minutes,
# the most informative calls come first, and a call that is cut off keeps its results.
# Needs no network and only these packages: torch 2.11 or newer with Triton, numpy, rich; for the
# tests also pytest and hypothesis.
#
#   lab/scripts/gpu_check.sh --dry_run=True
#       list every cell: its estimated time, the hardware's limit, the share of it expected
#   lab/scripts/gpu_check.sh --part=smoke    does it run at all: six cells, a process each (2 minutes)
#   lab/scripts/gpu_check.sh --part=first    is it right, is it fast, where does the time go (6 minutes)
#   lab/scripts/gpu_check.sh --part=tests    the tests marked gpu, in 8 processes (8 minutes)
#   lab/scripts/gpu_check.sh --part=tune     layouts of the decode kernel (6 minutes)
#   lab/scripts/gpu_check.sh --part=train    training at T=1,024, by backend and batch (8 minutes)
#   --part=sizes, programs, train-more, ladder: for further visits, 5 to 9 minutes each
#   lab/scripts/gpu_check.sh --part=first --out=FOLDER --limit=540 --only=captured,rates
#   lab/scripts/gpu_check.sh --merge FOLDER/cells.jsonl
#       add the results of another folder to OUT
#   lab/scripts/gpu_check.sh --part=first --rehearse=True --out=out-rehearsal
#       run the same cells on a CPU with tiny sizes, to test the check itself
#
# Writes to OUT (default: results/gpu): cells.jsonl, one line for each result as it comes;
# README.md, the table of all results; detail.tar.gz, logs and profiler traces. Ends with a summary
# of at most 40 lines. Exit status 1: a cell failed or was not run.
set -uo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" lab/scripts/gpu_check.py "$@"
