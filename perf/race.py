"""Contestants of one interleaved run: what they launch, how their outputs are checked, their rows.

Every mode of the benchmark is a module with `measure(options, advance) -> list[Row]`, which calls
`advance(description, steps)` before each of its steps, `steps` in all; plain `print` may be used
for remarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import protocol as p

from cute_moe.timing import capture

OURS = "cute_moe"
Launch = Callable[[], object]
Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Options:
    """The command line, as all modes see it; `peers` None stands for all that can be found."""

    tokens: tuple[int, ...] | None = None
    quick: bool = False
    replays: int = p.REPLAYS
    copies: int = p.COPIES
    peers: tuple[str, ...] | None = None

    def wants(self, peer: str) -> bool:
        """Whether a peer of that name is to take part."""
        return self.peers is None or peer in self.peers


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


def race(contestants: Mapping[str, Contestant], replays: int) -> dict[str, Result]:
    """Captures one graph for each contestant, poisons the outputs, replays in turn, checks.

    Capturing runs every launch once, so only the poison tells a replay from no replay at all. The
    first launch of a replay finds none of its data in the L2 cache. A peer that cannot be captured
    is skipped with a printed reason.
    """
    graphs = {}
    for name, contestant in contestants.items():
        try:
            graphs[name] = capture(contestant.launches)
        except Exception as error:
            if name in (OURS, *p.BASES):
                raise
            print(f"{name}: skipped, {type(error).__name__}: {error}")
    for name in graphs:
        contestants[name].poison()
    times = p.interleave({name: graph.replay for name, graph in graphs.items()}, replays)
    results = {}
    for name, spans in times.items():
        count = len(contestants[name].launches)
        results[name] = Result([us / count for us in spans], contestants[name].check())
    return results


def eager(contestant: Contestant, replays: int) -> Result:
    """The same launches without a graph: wall time of host and GPU together."""
    contestant.poison()
    times = p.eager_microseconds(contestant.launches, replays)
    return Result(times, contestant.check())


def rows(results: Mapping[str, Result], **fields) -> list[p.Row]:
    """One row per contestant of a run; `fields` are those of `Row` that all of them share."""
    base = next((results[name] for name in p.BASES if name in results), None)
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
