"""The measuring protocol: routings, weight copies, bytes, interleaved replays, rows, metadata.

One CUDA graph holds LAUNCHES launches with different routings; launch i reads weight copy
i % copies. The contestants' graphs take turns, and each replay gives one time per launch.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from cute_moe import reference
from cute_moe.kernels.moe.spec import MoeSpec

ROOT = Path(__file__).resolve().parent.parent
SHAPE = MoeSpec()
TOP_K = 8
LAUNCHES = 24
REPLAYS = 30
WARM_UP_REPLAYS = 5
ROUTINGS = ("uniform", "skewed", "same")
UP_BYTES = 2 * SHAPE.intermediate * SHAPE.hidden  # of one expert
DOWN_BYTES = SHAPE.intermediate * SHAPE.hidden
EXPERT_BYTES = UP_BYTES + DOWN_BYTES
COLD_FACTOR = 4  # least ratio of the bytes between two uses of an expert to the L2 cache
OK, NOTHING_TO_CHECK = "ok", "none"


@dataclass(frozen=True)
class Row:
    """One measured figure: µs per launch (median), [p10, p90], weight bytes and experts a launch.

    `case` names rows without tokens; `reuse_bytes` is the least number of bytes that a graph
    reads between two uses of an expert's weights (0 where that has no meaning).
    """

    op: str
    contestant: str
    tokens: int | None
    case: str | None
    routing: str
    cache: str
    us: float
    spread_us: tuple[float, float]
    bytes: int
    experts: float
    reuse_bytes: int
    check: str

    @property
    def passed(self) -> bool:
        """Whether the output was right, or there is none."""
        return self.check in (OK, NOTHING_TO_CHECK)


def summary(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and (p10, p90), in the unit of `times`, to three decimals."""
    low, middle, high = (round(float(v), 3) for v in np.percentile(times, (10, 50, 90)))
    return middle, (low, high)


def draw_logits(
    tokens: int, routing: str, launches: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Router logits bf16 [tokens, E] for every launch, on the generator's device.

    uniform: every expert is as likely; skewed: Zipf popularity, the popular experts being the
    same in all launches; same: all tokens have 8 experts, other ones in every launch.
    Raises ValueError for another routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {ROUTINGS}, got {routing!r}")
    options = {"generator": generator, "device": generator.device}
    e = SHAPE.num_experts
    order = torch.randperm(e, **options)
    result = []
    for launch in range(launches):
        logits = torch.randn(tokens, e, **options)
        if routing == "skewed":
            logits -= 1.5 * torch.log(torch.arange(1, e + 1, device=generator.device))[order]
        elif routing == "same":
            chosen = torch.arange(launch * TOP_K, (launch + 1) * TOP_K, device=generator.device)
            logits[:, order[chosen % e]] += 20.0
        result.append(logits.to(torch.bfloat16))
    return result


def active_experts(logits: torch.Tensor) -> list[int]:
    """Distinct experts of one launch in order of first appearance, as the kernel reads them."""
    ids, _ = reference.route(logits, TOP_K)
    return list(dict.fromkeys(ids.flatten().tolist()))


def mean_experts(lists: Sequence[Sequence[int]]) -> float:
    """Distinct experts per launch."""
    return round(sum(map(len, lists)) / len(lists), 2)


def reuse_bytes(lists: Sequence[Sequence[int]], copies: int) -> int:
    """Least bytes read between two uses of the same weights in a graph that repeats for ever.

    A launch reads w_up of all its experts in order, then w_down; copy = launch % copies.
    """
    ends: dict[tuple[int, int, bool], int] = {}
    position, least = 0, None
    for launch, experts in enumerate([*lists, *lists]):
        copy = launch % len(lists) % copies
        for is_down, size in ((False, UP_BYTES), (True, DOWN_BYTES)):
            for expert in experts:
                key = (copy, expert, is_down)
                if key in ends:
                    distance = position - ends[key]
                    least = distance if least is None else min(least, distance)
                position += size
                ends[key] = position
    return least or 0


def interleave(
    contestants: Mapping[str, Callable[[], object]], replays: int
) -> dict[str, list[float]]:
    """µs of each call, the contestants taking turns: A B C A B C ..., GPU time by events."""
    for _ in range(WARM_UP_REPLAYS):
        for work in contestants.values():
            work()
    torch.cuda.synchronize()
    spans = {name: [] for name in contestants}
    for _ in range(replays):
        for name, work in contestants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {n: [a.elapsed_time(b) * 1e3 for a, b in pairs] for n, pairs in spans.items()}


def eager_microseconds(launches: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Wall µs per call, without a graph: host and GPU together, one wait after all `launches`."""
    times = []
    for _ in range(WARM_UP_REPLAYS + replays):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6 / len(launches))
    return times[WARM_UP_REPLAYS:]


def to_json(meta: Mapping[str, object], rows: Sequence[Row]) -> dict[str, object]:
    """The content of a results file; rows without their empty fields."""
    plain = [{k: v for k, v in asdict(row).items() if v is not None} for row in rows]
    return {"meta": dict(meta), "rows": [{**r, "spread_us": list(r["spread_us"])} for r in plain]}


def to_text(content: Mapping[str, object]) -> str:
    """JSON with one row a line, so that two runs are easy to compare."""
    rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in content["rows"])
    meta = json.dumps(content["meta"], indent=1, ensure_ascii=False)
    return f'{{"meta": {meta},\n"rows": [\n{rows}\n]}}\n'


def from_json(content: Mapping[str, object]) -> list[Row]:
    """The rows of a results file. Raises TypeError for a field that does not belong there."""
    rows = []
    for fields in content["rows"]:
        spread = tuple(fields["spread_us"])
        rows.append(Row(**{"tokens": None, "case": None, **fields, "spread_us": spread}))
    return rows


def metadata(facts, protocol: Mapping[str, object], commit: str | None) -> dict[str, object]:
    """What a reader needs to judge the figures; `facts` are the host layer's device facts."""
    names = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {name: importlib.metadata.version(name) for name in names}
    query = "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    return {
        "gpu": facts.name,
        "sm_count": facts.sm_count,
        "l2_bytes": facts.l2_bytes,
        "driver": facts.driver,
        "clocks": _output(["nvidia-smi", query, "--format=csv,noheader", f"--id={facts.index}"]),
        "versions": versions,
        "commit": commit or _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "protocol": dict(protocol),
    }


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
