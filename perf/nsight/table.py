"""A short table from Nsight Compute's raw CSV: `python perf/nsight/table.py moe.csv`.

The CSV is that of `ncu --import REPORT --page raw --csv`: names, units, then a line per launch.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from protocol import SHAPE

RANGE_COLUMN = "Push/Pop_Range"  # part of the name of the column with the NVTX ranges
RANGE = re.compile(r"M=(\d+) experts=(\d+)")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
ISSUED = "selected"  # this "stall reason" is the warp that issues
LEAST_STALL = 3.0  # per cent of the warps' time, at any M: smaller reasons get no row
PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
ELAPSED = "avg.pct_of_peak_sustained_elapsed"
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Launch:
    """One profiled launch; metrics in ns, bytes, hertz, per cent or plain numbers."""

    tokens: int
    experts: int
    metrics: Metrics

    @property
    def weight_bytes(self) -> int:
        """Bytes of the active experts."""
        return self.experts * SHAPE.expert_bytes


@dataclass(frozen=True)
class Quantity:
    """A row of the table: a value of each launch and the number of decimals."""

    name: str
    value: Callable[[Launch], float]
    decimals: int


def metric(name: str, key: str, decimals: int, per: float = 1.0) -> Quantity:
    """A row with one metric, divided by `per`."""
    return Quantity(name, lambda launch: launch.metrics[key] / per, decimals)


def conflicts(name: str, operation: str) -> Quantity:
    """Wavefronts (passes through shared memory) of "ld" or "st" that bank conflicts added."""
    lost = f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{operation}.sum"
    all_of_them = f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{operation}.sum"
    return Quantity(name, lambda at: 100 * at.metrics[lost] / max(at.metrics[all_of_them], 1), 1)


QUANTITIES = (
    Quantity("active experts", lambda at: at.experts, 0),
    metric("time, µs", "gpu__time_duration.sum", 1, 1e3),
    metric("SM clock, GHz", "sm__cycles_elapsed.avg.per_second", 2, 1e9),
    metric("DRAM read, MB", "dram__bytes_read.sum", 1, 1e6),
    Quantity(
        "DRAM read / weights of these experts",
        lambda at: at.metrics["dram__bytes_read.sum"] / at.weight_bytes,
        3,
    ),
    metric("DRAM read, TB/s", "dram__bytes_read.sum.per_second", 2, 1e12),
    metric("DRAM throughput, % of peak", f"dram__throughput.{ELAPSED}", 1),
    metric("L2 throughput, % of peak", f"lts__throughput.{ELAPSED}", 1),
    metric("L2 hits of reads, %", "lts__t_sector_op_read_hit_rate.pct", 1),
    metric("tensor pipe busy, %", f"sm__pipe_tensor_cycles_active.{ELAPSED}", 1),
    metric("issue slots used, %", f"sm__issue_active.{ELAPSED}", 1),
    metric("warp instructions, thousands", "smsp__inst_executed.sum", 0, 1e3),
    metric("ready warps per scheduler", "smsp__warps_eligible.avg.per_cycle_active", 2),
    conflicts("bank conflicts, % of shared-memory loads", "ld"),
    conflicts("bank conflicts, % of shared-memory stores", "st"),
)


def base_factor(unit: str) -> float:
    """What a value in `unit` is multiplied by to get ns, bytes, hertz, ... (1 for other units)."""
    if unit in NANOSECONDS:
        return NANOSECONDS[unit]
    scaled = re.fullmatch(r"([KMGT]?)(byte|hz)(/.*)?", unit)
    return PREFIXES[scaled[1]] if scaled else 1.0


def parse(text: str) -> list[Launch]:
    """The launches of a raw page with the driver's NVTX ranges, in order of M.

    Raises ValueError for another text or a launch outside of the ranges.
    """
    lines = [row for row in csv.reader(text.splitlines()) if row]
    if len(lines) < 3 or lines[0][0] != "ID" or "gpu__time_duration.sum" not in lines[0]:
        raise ValueError("expected the output of ncu --import REPORT --page raw --csv, got other")
    names, units, *rows = lines
    ranges = next((i for i, name in enumerate(names) if RANGE_COLUMN in name), None)
    launches = []
    for row in rows:
        found = RANGE.search(row[ranges]) if ranges is not None else None
        if found is None:
            raise ValueError(f"launch {row[0]}: expected an NVTX range like 'M=8 experts=57'")
        values = {}
        for name, unit, cell in zip(names, units, row, strict=True):
            try:
                values[name] = float(cell.replace(",", "")) * base_factor(unit)
            except ValueError:
                continue  # text, such as the kernel's name
        launches.append(Launch(int(found[1]), int(found[2]), values))
    return sorted(launches, key=lambda launch: launch.tokens)


def stall_shares(launch: Launch) -> dict[str, float]:
    """Per cent of the warps' time that each reason takes, issuing included: the sum is 100."""
    found = {m[1]: value for name, value in launch.metrics.items() if (m := STALL.fullmatch(name))}
    total = sum(found.values())
    return {name: 100 * value / total for name, value in found.items()}


def table(launches: Sequence[Launch]) -> str:
    """Markdown: a row per quantity, a column per M; quantities that were not measured are absent.

    The reasons why warps waited follow, the largest first, and a line on what all launches share.
    Raises ValueError without the metrics of that line.
    """
    lines = ["| M | " + " | ".join(str(launch.tokens) for launch in launches) + " |"]
    lines.append("|---|" + "---:|" * len(launches))
    for quantity in QUANTITIES:
        try:
            cells = [f"{quantity.value(launch):.{quantity.decimals}f}" for launch in launches]
        except KeyError:
            continue
        lines.append(f"| {quantity.name} | " + " | ".join(cells) + " |")
    shares = [stall_shares(launch) for launch in launches]
    names = [name for name in shares[0] if all(name in share for share in shares)]
    largest = {name: max(share[name] for share in shares) for name in names}
    for name in sorted(largest, key=lambda name: -largest[name]):
        if largest[name] >= LEAST_STALL:
            label = "warps issue" if name == ISSUED else f"warps wait: {name.replace('_', ' ')}"
            cells = [f"{share[name]:.1f}" for share in shares]
            lines.append(f"| {label}, % of their time | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + launch_line(launches[0]) + "\n"


def launch_line(launch: Launch) -> str:
    """Grid, registers, shared memory and occupancy, as a sentence.

    Raises ValueError for a metric that is not there.
    """

    def get(name: str) -> float:
        if name not in launch.metrics:
            raise ValueError(f"expected the metric {name} of ncu.sh's sections, got none")
        return launch.metrics[name]

    return (
        f"{get('launch__grid_size'):.0f} CTAs of {get('launch__block_size'):.0f} threads; "
        f"{get('launch__registers_per_thread'):.0f} registers a thread at launch, "
        f"{get('launch__shared_mem_per_block_dynamic'):.0f} bytes of shared memory a CTA; "
        f"at most {get('sm__maximum_warps_per_active_cycle_pct'):.2f} % of an SM's warps."
    )


def main(argv: Sequence[str]) -> int:
    """Print the table of one file; 2 for wrong usage, 1 for another kind of file."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(table(parse(Path(argv[0]).read_text(encoding="utf-8"))), end="")
    except (OSError, ValueError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
