#!/usr/bin/env bash
# What needs a GPU, in one short run (under 8 minutes): the speeds, then the tests that CUDA changes.
# Needs torch (2.9 or later), numpy, einops and safetensors; the tests also pytest, hypothesis and soundfile, and are
# left out without them. Results go to benchmarks/gpu.md, or to $OUT/gpu.md where OUT is set.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c "import torch, numpy, einops, safetensors" || exit 1
status=0
timeout 330 "$python" benchmarks/gpu.py --device cuda --seconds 240 -o "${OUT:-benchmarks}/gpu.md" || status=$?
if "$python" -c "import pytest, hypothesis, soundfile" 2>/dev/null; then
  CODEC_REQUIRE_CUDA=1 timeout 140 "$python" -m pytest -q -p no:cacheprovider -m cuda \
    --continue-on-collection-errors tests || status=$?
else
  echo "tests left out: pytest, hypothesis or soundfile isn't installed"
fi
exit "$status"
