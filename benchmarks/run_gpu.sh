#!/usr/bin/env bash
# GPU tests and benchmarks in one go; results as JSON in $OUT (default: benchmarks/results/new).
#   usage: benchmarks/run_gpu.sh [OBJECTS]
# OBJECTS: a folder of kernels compiled without a GPU (benchmarks/compile_all.py --arch sm_90a --out OBJECTS); the
# benchmarks load them instead of compiling for every head.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results/new}; mkdir -p "$out"
python=${PYTHON:-python3}; export PYTHONPATH=$PWD/src:${PYTHONPATH:-}
status=0
if [ -n "${1:-}" ]; then chmod 700 "$1"; export LOWBATCH_LMHEAD_OBJECTS=$(realpath "$1"); fi
step() { echo "== $*"; local begin=$SECONDS; "$@" || { status=1; echo "FAILED: $*"; }; echo "== $((SECONDS - begin)) s"; }
[ -n "${NO_TESTS:-}" ] || step env -u LOWBATCH_LMHEAD_OBJECTS "$python" -m pytest -q -m gpu tests/gpu --junitxml "$out/tests.xml"
step "$python" benchmarks/host.py --out "$out/host.json" ${LOWBATCH_LMHEAD_OBJECTS:+--objects "$LOWBATCH_LMHEAD_OBJECTS"}
step "$python" benchmarks/writes.py --out "$out/writes.json"
step "$python" benchmarks/core.py --out "$out/core.json"
exit $status
