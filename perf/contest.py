"""Contestants of one interleaved run: what they launch, how their outputs are checked, their rows.

Every mode of the benchmark is a module with `measure(options, advance) -> list[Row]`, which calls
`advance(description, steps)` before each of its steps, `steps` in all; plain `print` may be used
for remarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import protocol as p
import torch

from cute_moe.shapes import DEFAULT_SHAPE, SHAPES, LayerShape
from cute_moe.timing import capture

OURS = "cute_moe"  # also the first part of the names of our variants
SKIPPED: dict[str, str] = {}  # why peers of the running mode did not take part; bench.py stores it
Launch = Callable[[], object]
Advance = Callable[[str, int], None]


def skip(peer: str, error: Exception) -> None:
    """Notes why a peer cannot take part, and prints it once."""
    reason = f"{type(error).__name__}: {error}"
    if SKIPPED.get(peer) != reason:
        print(f"{peer}: skipped, {reason}")
    SKIPPED[peer] = reason


@dataclass(frozen=True)
class Options:
    """The command line, as all modes see it; `peers` None stands for all that can be found."""

    tokens: tuple[int, ...] | None = None
    quick: bool = False
    replays: int = p.REPLAYS
    copies: int = p.COPIES
    peers: tuple[str, ...] | None = None
    shape_name: str = DEFAULT_SHAPE

    @property
    def shape(self) -> LayerShape:
        """Of the layer."""
        return SHAPES[self.shape_name]

    def wants(self, peer: str) -> bool:
        """Whether a peer of that name is to take part."""
        return self.peers is None or peer in self.peers


class Named(Protocol):
    """A case that modes with a list of them measure; `quick` ones take part in a quick run."""

    name: str
    quick: bool


Case = TypeVar("Case", bound=Named)


def each(cases: Sequence[Case], options: Options, advance: Advance) -> Iterator[Case]:
    """The cases to measure, each announced and without what the last one left in torch's cache."""
    chosen = [case for case in cases if case.quick or not options.quick]
    for case in chosen:
        advance(case.name, len(chosen))
        torch.cuda.empty_cache()
        yield case


@dataclass(frozen=True)
class Contestant:
    """Launches of one graph, and how their outputs are poisoned and checked.

    `check()` returns protocol.OK, protocol.NOTHING_TO_CHECK or what is wrong.
    """

    launches: Sequence[Launch]
    poison: Callable[[], object]
    check: Callable[[], str]


@dataclass(frozen=True)
class Result:
    """µs per launch of every replay, and what the check said afterwards."""

    times: list[float]
    check: str


def take_turns(contestants: Mapping[str, Contestant], replays: int) -> dict[str, Result]:
    """Captures one graph for each contestant, poisons the outputs, replays in turn, checks.

    Capturing runs every launch once, so only the poison tells a replay from no replay at all. The
    first launch of a replay finds none of its data in the L2 cache. A peer that cannot be captured
    is skipped; an error of ours or of a base is raised.
    """
    graphs = {}
    stream = torch.cuda.current_stream()
    for name, contestant in contestants.items():
        try:
            graphs[name] = capture(contestant.launches)
        except Exception as error:
            torch.cuda.set_stream(stream)  # a capture that failed leaves its own stream behind
            if name.startswith(OURS) or name in p.BASES:
                raise
            skip(name, error)
    for name in graphs:
        contestants[name].poison()
    times = p.interleave({name: graph.replay for name, graph in graphs.items()}, replays)
    results = {}
    for name, spans in times.items():
        count = len(contestants[name].launches)
        results[name] = Result([us / count for us in spans], contestants[name].check())
    return results


def eager(contestants: Mapping[str, Contestant], replays: int) -> dict[str, Result]:
    """The same launches without a graph, in turn: wall time of host and GPU together."""
    for contestant in contestants.values():
        contestant.poison()
    launches = {name: contestant.launches for name, contestant in contestants.items()}
    times = p.interleave_eager(launches, replays)
    return {name: Result(found, contestants[name].check()) for name, found in times.items()}


def rows(results: Mapping[str, Result], **fields) -> list[p.Row]:
    """One row per contestant of a run; `fields` are those of `Row` that all of them share."""
    base = results.get(p.base_of(results))
    made = []
    for name, result in results.items():
        us, spread = p.summary(result.times)
        own = {"us": us, "spread_us": spread, "check": result.check}
        made.append(p.Row(contestant=name, of_floor=_ratio(result, base), **fields, **own))
    return made


def _ratio(result: Result, base: Result | None) -> float | None:
    """Median over the turns of the ratio to `base` in the same turn: a drift of clocks cancels."""
    if base is None or base is result:
        return None
    pairs = zip(result.times, base.times, strict=True)
    return round(statistics.median(own / other for own, other in pairs), 4)
