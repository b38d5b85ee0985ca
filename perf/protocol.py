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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from cute_moe import reference
from cute_moe.shapes import DEFAULT_SHAPE, SHAPES, LayerShape

ROOT = Path(__file__).resolve().parent.parent
SHAPE = SHAPES[DEFAULT_SHAPE]  # of the programs that know one only
TOP_K = SHAPE.top_k
MAX_ERROR = 1.5e-2  # of the layer, relative Frobenius error against its block-FP8 reference
MAX_ERROR_BF16 = 1e-2  # the same against the fp32 layer, with bf16 activations
LAUNCHES = 24
REPLAYS = 30
COPIES = 12  # weight copies: 11 launches lie between two uses of one, 277 MB at M = 1
WARM_UP_REPLAYS = 5
ROUTINGS = ("uniform", "skewed", "same")
COLD_FACTOR = 4  # least ratio of the bytes between two uses of an expert to the L2 cache
BASES = ("floor", "copy")  # what the others of one run are compared with, the first that is there
CACHES = ("cold", "warm", "eager")
OK, NOTHING_TO_CHECK = "ok", "none"
DRAM_MARGIN = 1.02  # a measured rate may exceed the nominal one by as much as clocks and timers err
DESCRIBE = ("describe", "--always", "--dirty", "--exclude=*")  # the commit, no tag
L2_BYTES_PER_CYCLE = 64  # what one SM can take from the L2 cache


@dataclass(frozen=True)
class Row:
    """One measured figure: µs per launch (median), [p10, p90], bytes that a launch must move.

    `case` names rows without tokens, `shape` that of a layer, by its key in `SHAPES`; `experts`
    is the mean number of distinct experts a launch;
    `cache` is "cold", "warm" (data may come from L2) or "eager" (no graph, host time included);
    `reuse_bytes` is the least number of bytes that a graph reads between two uses of the same
    data (0 where that has no meaning); `of_floor` the median ratio to the run's one of BASES.
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
    of_floor: float | None = None
    shape: str | None = None

    def __post_init__(self) -> None:
        if self.cache not in CACHES or self.routing not in (*ROUTINGS, "none"):
            raise ValueError(f"cache, routing: expected one of {CACHES} and {ROUTINGS}: {self}")
        if (self.tokens is None) == (self.case is None):
            raise ValueError(f"tokens, case: expected one of them, got {self}")

    @property
    def passed(self) -> bool:
        """Whether the output was right, or there is none."""
        return self.check in (OK, NOTHING_TO_CHECK)


@dataclass(frozen=True)
class Limits:
    """Bytes per µs that a GPU can move at most: from DRAM, and from the L2 cache to its SMs."""

    dram: float
    l2: float


def limits_of(facts) -> Limits:
    """Limits of a GPU (`facts` of the host layer), from its memory's and its SMs' top clocks."""
    from cuda.bindings import driver

    names = ("MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH", "CLOCK_RATE")
    kinds = [getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") for name in names]
    values = [driver.cuDeviceGetAttribute(kind, facts.index)[1] for kind in kinds]
    memory_khz, bus_bits, sm_khz = values
    return Limits(
        dram=2 * memory_khz * 1e3 * bus_bits / 8 * 1e-6,  # two transfers a cycle
        l2=facts.sm_count * L2_BYTES_PER_CYCLE * sm_khz * 1e3 * 1e-6,
    )


def guarded(row: Row, limits: Limits) -> Row:
    """The row, with a failed check when no memory is as fast as it claims.

    A cold row must read all its bytes from DRAM; others may find them in the L2 cache.
    """
    most = DRAM_MARGIN * limits.dram if row.cache == "cold" else limits.l2
    if row.bytes <= most * row.us:
        return row
    rate = row.bytes / row.us if row.us else float("inf")
    text = f"impossible: {rate * 1e-6:.1f} TB/s, the memory gives {most * 1e-6:.1f}"
    return replace(row, check=text)


def base_of(names: Collection[str]) -> str:
    """The one of BASES that a run with these contestants is compared with."""
    return next((name for name in BASES if name in names), BASES[0])


def summary(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median and (p10, p90), in the unit of `times`, to three decimals."""
    low, middle, high = (round(float(v), 3) for v in np.percentile(times, (10, 50, 90)))
    return middle, (low, high)


def name_of(shape: LayerShape) -> str | None:
    """The name that a shape is known by, if any."""
    return next((name for name, known in SHAPES.items() if known == shape), None)


def draw_logits(
    tokens: int,
    routing: str,
    launches: int,
    generator: torch.Generator,
    shape: LayerShape,
) -> list[torch.Tensor]:
    """Router logits bf16 [tokens, E] for every launch, on the generator's device.

    uniform: every expert is as likely; skewed: Zipf popularity, the popular experts being the
    same in all launches; same: all tokens have the same experts, other ones in every launch
    where there are enough. Raises ValueError for another routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {ROUTINGS}, got {routing!r}")
    options = {"generator": generator, "device": generator.device}
    e, k = shape.num_experts, shape.top_k
    order = torch.randperm(e, **options)
    result = []
    for launch in range(launches):
        logits = torch.randn(tokens, e, **options)
        if routing == "skewed":
            logits -= 1.5 * torch.log(torch.arange(1, e + 1, device=generator.device))[order]
        elif routing == "same":
            chosen = torch.arange(launch * k, (launch + 1) * k, device=generator.device)
            logits[:, order[chosen % e]] += 20.0
        result.append(logits.to(torch.bfloat16))
    return result


def active_experts(logits: torch.Tensor, top_k: int) -> list[int]:
    """Distinct experts of one launch in order of first appearance, as the kernel reads them."""
    ids, _ = reference.route(logits, top_k)
    return list(dict.fromkeys(ids.flatten().tolist()))


def mean_experts(lists: Sequence[Sequence[int]]) -> float:
    """Distinct experts per launch."""
    return round(sum(map(len, lists)) / len(lists), 2)


def reuse_bytes(lists: Sequence[Sequence[int]], copies: int, shape: LayerShape) -> int:
    """Least bytes read between two uses of the same weights in a graph that repeats for ever.

    A launch reads w_up of all its experts in order, then w_down; copy = launch % copies.
    """
    ends: dict[tuple[int, int, bool], int] = {}
    position, least = 0, None
    for launch, experts in enumerate([*lists, *lists]):
        copy = launch % len(lists) % copies
        for is_down, size in ((False, shape.up_bytes), (True, shape.down_bytes)):
            for expert in experts:
                key = (copy, expert, is_down)
                if key in ends:
                    distance = position - ends[key]
                    least = distance if least is None else min(least, distance)
                position += size
                ends[key] = position
    return least or 0


def l2_cleaner() -> Callable[[], object]:
    """A call that reads COLD_FACTOR times the L2 cache: it holds other data then, and none dirty.

    Without it a contestant pays for what the one before it left to be written back.
    """
    nbytes = COLD_FACTOR * torch.cuda.get_device_properties("cuda").L2_cache_size
    memory = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda")
    return memory.sum


def turns(names: Collection[str], replays: int) -> Iterator[list[str]]:
    """The contestants of each turn, warm-up first: A B C, B C A, C A B, ...

    None always runs behind the same other one.
    """
    order = list(names)
    for turn in range(WARM_UP_REPLAYS + replays):
        first = turn % len(order)
        yield order[first:] + order[:first]


def interleave(
    contestants: Mapping[str, Callable[[], object]], replays: int
) -> dict[str, list[float]]:
    """µs of each call, the contestants taking turns, GPU time by events.

    Before each call, outside the time, the L2 cache is cleaned.
    """
    clean = l2_cleaner()
    spans = {name: [] for name in contestants}
    for order in turns(contestants, replays):
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            clean()
            start.record()
            contestants[name]()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    times = {n: [a.elapsed_time(b) * 1e3 for a, b in pairs] for n, pairs in spans.items()}
    return {name: found[WARM_UP_REPLAYS:] for name, found in times.items()}


def interleave_eager(
    contestants: Mapping[str, Sequence[Callable[[], object]]], replays: int
) -> dict[str, list[float]]:
    """Wall µs per call, without a graph, the contestants taking turns.

    Host and GPU together: one wait after all calls of a contestant.
    """
    times = {name: [] for name in contestants}
    for order in turns(contestants, replays):
        for name in order:
            torch.cuda.synchronize()
            started = time.perf_counter()
            for call in contestants[name]:
                call()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) * 1e6 / len(contestants[name]))
    return {name: found[WARM_UP_REPLAYS:] for name, found in times.items()}


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
    """The rows of a results file. Raises TypeError for a field that does not belong there.

    Rows of a layer that name no shape are of the default one.
    """
    rows = []
    for fields in content["rows"]:
        spread = tuple(fields["spread_us"])
        row = Row(**{"tokens": None, "case": None, **fields, "spread_us": spread})
        if row.op == "moe" and row.tokens and row.shape is None:
            row = replace(row, shape=DEFAULT_SHAPE)
        rows.append(row)
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
        "commit": commit or _output(["git", "-C", str(ROOT), *DESCRIBE]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "protocol": dict(protocol),
    }


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
