#!/usr/bin/env bash
# What needs a GPU, in one short run (under 8 minutes): the tests that CUDA changes, then the speeds.
# Results go to benchmarks/gpu.md, or to $OUT/gpu.md where OUT is set.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
if "$python" -c "import pytest, hypothesis, soundfile" 2>/dev/null; then
  CODEC_REQUIRE_CUDA=1 timeout 180 "$python" -m pytest -q -m cuda tests
fi
timeout 240 "$python" benchmarks/gpu.py --device cuda -o "${OUT:-benchmarks}/gpu.md"
