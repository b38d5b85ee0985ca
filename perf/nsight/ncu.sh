#!/usr/bin/env bash
# One launch of mono_moe at each M under Nsight Compute: DIR/moe.ncu-rep, DIR/moe.csv, a table.
#   perf/nsight/ncu.sh [DIR] [driver options, such as --tokens 1,8]   (PYTHON=, NCU=: programs)
#
# --cache-control all   ncu runs the same launch once per pass. It empties the caches before each,
#                       so that every pass reads the weights from DRAM, as in a decode loop, where
#                       other layers have pushed them out. With `none`, all passes but the first
#                       would find weights in the L2 cache. The kernel's code, x and logits are
#                       cold as well: ncu's time is longer than that of perf/bench.py.
# --clock-control none  the clocks of real use and of the benchmark; ncu would lock the base clock.
# --nvtx-include        the driver's ranges: the last launch of each M, after warm-up launches.
set -euo pipefail
. "$(dirname "$0")/common.sh"
ncu=${NCU:-ncu}
if ! command -v "$ncu" >/dev/null; then
  echo "$ncu: not found; it comes with the CUDA toolkit (NCU=/path/to/ncu names another one)" >&2
  exit 3
fi
mkdir -p "$out"

metrics=(
  gpu__time_duration.sum
  sm__cycles_elapsed.avg.per_second
  dram__bytes_read.sum
  dram__bytes_read.sum.per_second
  dram__throughput.avg.pct_of_peak_sustained_elapsed
  lts__throughput.avg.pct_of_peak_sustained_elapsed
  lts__t_sector_op_read_hit_rate.pct
  sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
  sm__issue_active.avg.pct_of_peak_sustained_elapsed
  smsp__inst_executed.sum
  smsp__warps_eligible.avg.per_cycle_active
  l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum
  l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum
  l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum
  l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum
)
sections=(SpeedOfLight WarpStateStats Occupancy LaunchStats)

# Compiles the kernel into its disk cache, so that no compile runs under the profiler.
"$python" perf/nsight/driver.py --tokens 1 --launches 1 --copies 1
"$ncu" --clock-control none --cache-control all \
  -k regex:mono_moe --nvtx --nvtx-include 'regex:M=[0-9]+/' \
  "${sections[@]/#/--section=}" --metrics "$(IFS=,; echo "${metrics[*]}")" \
  -f -o "$out/moe" "$python" perf/nsight/driver.py --copies 1 "$@"
"$ncu" --import "$out/moe.ncu-rep" --page raw --csv --print-units base >"$out/moe.csv"
"$python" perf/nsight/table.py "$out/moe.csv"
