"""Explicit-state model checker: every interleaving of a few processes over shared memory.

A process is a function `step(shared, local)` that lists its possible next `(shared, local)` pairs,
each one atomic step; an empty list means that it is blocked until others change `shared`. A process
whose local state is DONE has ended. States are hashable and must contain all that matters: two
ways to the same state are explored once. Steps interleave as in a sequentially consistent memory,
so a protocol must argue separately that its flags order the data around them.

Safety is what `invariant` and `Violation` say. Liveness is "from every reachable state the end of
all processes can be reached": it finds dead-locks and live-locks, whatever the scheduler does.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

DONE = "done"

Shared = Hashable
Local = Hashable
Step = Callable[[Shared, Local], Iterable[tuple[Shared, Local]]]


def put(values: tuple, index: int, value: object) -> tuple:
    """`values` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])


class Violation(Exception):
    """Raised by a step that breaks a safety rule, such as using a stale word."""


@dataclass(frozen=True)
class Process:
    """One process: a name for traces, its first local state, and its step function."""

    name: str
    start: Local
    step: Step


@dataclass
class Verdict:
    """What `explore` found; `unsafe` and `stuck` say what is wrong, None means proven absent.

    `ends` are the shared states in which all processes have ended. `trace` leads to the first
    fault: the name of the process that stepped and the (shared, locals) state after it.
    """

    states: int = 0
    unsafe: str | None = None
    stuck: str | None = None
    ends: set[Shared] = field(default_factory=set)
    trace: list[tuple[str, tuple]] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """No reachable state is unsafe, and none is cut off from the end."""
        return self.unsafe is None and self.stuck is None

    def __str__(self) -> str:
        steps = "\n".join(f"  {name}: {state}" for name, state in self.trace)
        return f"{self.states} states, unsafe: {self.unsafe}, stuck: {self.stuck}\n{steps}"


class _Graph:
    """The states found so far, numbered, with the edges between them."""

    def __init__(self, processes: Sequence[Process], limit: int) -> None:
        self.processes, self.limit = processes, limit
        self.number: dict[tuple, int] = {}
        self.states: list[tuple] = []
        self.parents: list[tuple[int, str]] = []
        self.sources: list[list[int]] = []

    def add(self, state: tuple, parent: int, name: str) -> None:
        """Note an edge from state number `parent` (-1: an initial state) to `state`."""
        found = self.number.get(state)
        if found is None:
            found = self.number[state] = len(self.states)
            self.states.append(state)
            self.parents.append((parent, name))
            self.sources.append([])
            if found >= self.limit:
                raise RuntimeError(f"more than {self.limit} states: make the model smaller")
        if parent >= 0:
            self.sources[found].append(parent)

    def expand(self, index: int) -> None:
        """Add all successors of state number `index`."""
        shared, places = self.states[index]
        for i, process in enumerate(self.processes):
            if places[i] != DONE:
                before, after = places[:i], places[i + 1 :]
                for new_shared, place in process.step(shared, places[i]):
                    self.add((new_shared, (*before, place, *after)), index, process.name)

    def trace(self, index: int) -> list[tuple[str, tuple]]:
        """The steps that lead to state number `index`."""
        steps = []
        while index >= 0:
            parent, name = self.parents[index]
            steps.append((name, self.states[index]))
            index = parent
        return steps[::-1]

    def ended(self) -> list[int]:
        """Numbers of the states in which every process has ended."""
        done = (DONE,) * len(self.processes)
        return [i for i, (_, places) in enumerate(self.states) if places == done]

    def cut_off(self, ends: list[int]) -> int | None:
        """Number of the first state from which no end can be reached, or None."""
        alive = bytearray(len(self.states))
        pending = list(ends)
        for index in pending:
            alive[index] = 1
        while pending:
            for source in self.sources[pending.pop()]:
                if not alive[source]:
                    alive[source] = 1
                    pending.append(source)
        first = alive.find(0)
        return None if first < 0 else first


def explore(
    initial: Iterable[Shared],
    processes: Sequence[Process],
    invariant: Callable[[Shared, tuple[Local, ...]], str | None] | None = None,
    limit: int = 1_000_000,
) -> Verdict:
    """Explore all interleavings of `processes` from every shared state in `initial`.

    `invariant(shared, locals)` returns what is wrong with a state, or None. An unsafe state ends
    the search. Raises RuntimeError beyond `limit` states.
    """
    graph = _Graph(processes, limit)
    for shared in initial:
        graph.add((shared, tuple(process.start for process in processes)), -1, "start")
    index = 0
    while index < len(graph.states):
        fault = invariant(*graph.states[index]) if invariant else None
        if fault is None:
            try:
                graph.expand(index)
            except Violation as violation:
                fault = str(violation)
        if fault is not None:
            return Verdict(len(graph.states), unsafe=fault, trace=graph.trace(index))
        index += 1
    ends = graph.ended()
    verdict = Verdict(len(graph.states), ends={graph.states[i][0] for i in ends})
    dead = graph.cut_off(ends)
    if dead is not None:
        verdict.stuck = f"no end can be reached from {graph.states[dead]}"
        verdict.trace = graph.trace(dead)
    return verdict


def explore_launches(
    initial: Iterable[Shared],
    launches: Sequence[Callable[[Iterable[Shared]], Verdict]],
    boundary: Callable[[Shared], Shared] = lambda shared: shared,
) -> Verdict:
    """Every sequence of `launches`, of any length and in any order, one after the other.

    Each launch explores from a set of shared states. A launch starts when all of the one before
    has ended; `boundary` maps a shared state across that. The search stops at the first fault or
    when no launch leaves a shared state behind that has not been a start already: then the
    result holds for any number of launches. `states` counts all of them.
    """
    known: set[Shared] = set()
    fresh = set(initial)
    total = Verdict()
    while fresh:
        known |= fresh
        ends: set[Shared] = set()
        for launch in launches:
            verdict = launch(fresh)
            total.states += verdict.states
            if not verdict.proven:
                verdict.states = total.states
                return verdict
            ends |= {boundary(shared) for shared in verdict.ends}
        fresh = ends - known
    total.ends = known
    return total
