#!/usr/bin/env bash
# GPU tests and benchmarks in one go; results as JSON in $OUT (default: benchmarks/results/new).
#   usage: benchmarks/run_gpu.sh [OBJECTS]
# OBJECTS: a folder of kernels compiled without a GPU (benchmarks/compile_all.py --arch sm_90a --out OBJECTS, with --tuning
# --shards for tuned.py too); the benchmarks load them instead of compiling for every head.
# TUNED=1 measures autotune as well (about 9 minutes), TUNED=only nothing else; NO_TESTS=1 leaves the tests out.
# KERNEL=1 sweeps the stream kernels (OBJECTS then also of kernel_sweep.py compile), and looks at them with compute-sanitizer.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results/new}; mkdir -p "$out"
python=${PYTHON:-python3}; export PYTHONPATH=$PWD/src:${PYTHONPATH:-}
status=0
if [ -n "${1:-}" ]; then chmod 700 "$1"; export LOWBATCH_LMHEAD_OBJECTS=$(realpath "$1"); fi
step() { echo "== $*"; local begin=$SECONDS; "$@" || { status=1; echo "FAILED: $*"; }; echo "== $((SECONDS - begin)) s"; }
if [ "${TUNED:-}" != only ]; then
[ -n "${NO_TESTS:-}" ] || step env -u LOWBATCH_LMHEAD_OBJECTS "$python" -m pytest -q -m gpu tests/gpu --junitxml "$out/tests.xml"
step "$python" benchmarks/host.py --out "$out/host.json" ${LOWBATCH_LMHEAD_OBJECTS:+--objects "$LOWBATCH_LMHEAD_OBJECTS"}
step "$python" benchmarks/writes.py --out "$out/writes.json"
step "$python" benchmarks/core.py --out "$out/core.json"
step "$python" benchmarks/decode_tail.py --out "$out/decode_tail.json"
fi
if [ -n "${TUNED:-}" ]; then
  step env -u LOWBATCH_LMHEAD_OBJECTS "$python" benchmarks/tuned.py cold --out "$out/tuned_cold.json"
  step "$python" benchmarks/tuned.py again --out "$out/tuned_again.json"
  step "$python" benchmarks/tuned.py heads --out "$out/tuned.json"
fi
if [ -n "${KERNEL:-}" ]; then
  step "$python" benchmarks/kernel_sweep.py run --out "$out/kernel_sweep.json" ${LOWBATCH_LMHEAD_OBJECTS:+--objects "$LOWBATCH_LMHEAD_OBJECTS"}
  for tool in memcheck racecheck; do
    step compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" tests/gpu/test_gpu_stream.py
  done
fi
exit $status
