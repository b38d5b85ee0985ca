#!/usr/bin/env bash
# A decode loop under Nsight Systems: graph replays in NVTX ranges, each kernel of a graph by itself.
#   perf/nsight/nsys.sh [DIR] [driver options, such as --tokens 1,8]   (PYTHON=, NSYS=: programs)
# Writes DIR/moe.nsys-rep for the GUI and prints the time per kernel and per range.
set -euo pipefail
. "$(dirname "$0")/common.sh"
nsys=${NSYS:-nsys}
if ! command -v "$nsys" >/dev/null; then
  echo "$nsys: not found. Nsight Systems is a package of its own beside the CUDA toolkit" \
    "(nsight-systems-cli); NSYS=/path/to/nsys names one that is not on PATH." >&2
  exit 3
fi
mkdir -p "$out"

"$python" perf/nsight/driver.py --tokens 1 --launches 1 --copies 1
# node: one record per kernel of a graph; by default a replay is one record as a whole.
"$nsys" profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none \
  --force-overwrite=true --output="$out/moe" \
  "$python" perf/nsight/driver.py --launches 24 --replays 20 "$@"
"$nsys" stats --report cuda_gpu_kern_sum --report nvtx_gpu_proj_sum "$out/moe.nsys-rep"
