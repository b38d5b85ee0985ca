"""Traces of the MoE kernel: recording a variant that stamps its events, and the files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from cute_moe.host.compile import compile_cached
from cute_moe.host.scratch import Region, ScratchLayout
from cute_moe.kernels.moe.spec import EVENTS, MoeSpec
from cute_moe.timing import capture


@dataclass(frozen=True)
class Trace:
    """Names of the events and their times, integers [CTAs, events] in ns, 0 = did not happen.

    `floor_us` is the time of the memory floor for the same launch, if known; `meta` says where and
    when. Raises ValueError unless names and array fit together and at least one event happened.
    """

    names: tuple[str, ...]
    array: np.ndarray
    floor_us: float | None = None
    title: str = "timeline"
    meta: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape, kind = self.array.shape, self.array.dtype
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names: expected different names, got {list(self.names)}")
        if kind.kind not in "iu" or len(shape) != 2 or shape[1] != len(self.names):
            raise ValueError(
                f"array: expected integers [CTAs, {len(self.names)}], got {kind} {list(shape)}"
            )
        if not (self.array > 0).any() or (self.array < 0).any():
            raise ValueError("array: expected times in ns, 0 where none, got no or negative times")

    def microseconds(self, name: str) -> np.ndarray:
        """Times of one event on all CTAs since the earliest time of the trace; nan where none."""
        if name not in self.names:
            return np.full(len(self.array), np.nan)
        ns = self.array[:, self.names.index(name)]
        since = (ns - self.array[self.array > 0].min()) / 1e3
        return np.where(ns > 0, since, np.nan)

    @property
    def last(self) -> float:
        """The latest time of all, in µs."""
        return float(self.array.max() - self.array[self.array > 0].min()) / 1e3

    @property
    def tick_ns(self) -> int:
        """Greatest common divisor of all differences: how finely the timer ticks at best."""
        times = self.array[self.array > 0]
        return int(np.gcd.reduce(times - times.min()))


def to_json(trace: Trace) -> str:
    """A trace as JSON, one CTA a line: ns since 1 ns before the first event, 0 where none."""
    head = {"meta": dict(trace.meta), "title": trace.title, "floor_us": trace.floor_us}
    head["names"] = list(trace.names)
    start = trace.array[trace.array > 0].min() - 1
    since = np.where(trace.array > 0, trace.array - start, 0)
    rows = ",\n".join(json.dumps(row) for row in since.tolist())
    return json.dumps(head, ensure_ascii=False)[:-1] + f', "array": [\n{rows}\n]}}\n'


def read(path: Path) -> Trace:
    """A trace from a JSON file with `names`, `array` and perhaps `floor_us`, `title` and `meta`.

    Raises ValueError for another kind of file, KeyError where names or array are missing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a trace as JSON, got another file") from error
    array = np.array(content["array"])
    optional = {key: content[key] for key in ("floor_us", "meta") if key in content}
    return Trace(tuple(content["names"]), array, title=content.get("title", path.stem), **optional)


def record(
    calls: Sequence[Sequence[torch.Tensor]], spec: MoeSpec, replays: int = 3
) -> tuple[tuple[str, ...], torch.Tensor]:
    """Run `calls` in one CUDA graph and return (event names, stamps of the last replay).

    calls: the six inputs of `mono_moe` and an output, each; options are those of `spec`.
    stamps: int64 [calls, grid, events] on the CPU, ns of the global timer; 0 = did not happen.
    The stores of the stamps are part of what is measured.
    """
    from cute_moe.kernels.moe.kernel import build

    spec = replace(spec, trace=EVENTS)
    function = compile_cached(spec, lambda options: build(spec, options))
    layout = ScratchLayout([Region(n, size, zeroed=True) for n, size in spec.scratch_regions])
    pads = [layout.allocate(calls[0][0].device) for _ in calls]
    used = sum(size for _, size in spec.scratch_regions)
    launches = [
        lambda call=call, pad=pad[:used]: function(*call, pad, None, None)
        for call, pad in zip(calls, pads, strict=True)
    ]
    graph = capture(launches)
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    stamps = torch.stack([layout.view(pad, "trace").view(torch.int64) for pad in pads]).cpu()
    return EVENTS, stamps.view(len(calls), spec.grid, len(EVENTS))
