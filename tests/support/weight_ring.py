"""The weight ring of one CTA, with h from other CTAs as late as can be, for the model checker.

The producer issues the own up units, all but the first one in pairs, a stage of each in turn, and
then the down groups, one stage after the other; copies land in any order. Two consumers take units
and runs of groups in turn, and both wait for and release every stage. Groups hold the stages of a
slice while all its chunks pass, each in a slot of h, which both consumers release; two groups with
one chunk each may hold the stages and slots of both. The other CTAs are the worst there can be:
they give their h only after this CTA has published all of its units. That this CTA ends
nevertheless shows that no CTA waits for another one with its up units, so that in the end all h is
there, however many CTAs run.

The sizes of the shape may be small ones; arrivals and choices are those of a `MoeSpec`. Loaders
stage one slot after the other (test_h_ring_model.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kernel_counts import weight_ring
from model_checker import DONE, Process, Verdict, Violation, explore, put

from cute_moe.kernels.moe.spec import HALVES, MoeSpec

RING, REGISTERS = "ring", "registers"  # where a group's weights wait for h


@dataclass(frozen=True)
class Rules:
    """The sizes, and the protocol: each change of a flag is a way to break it."""

    stages: int
    unit_stages: int
    scale_slots: int  # of up scales
    step_stages: int
    slice_steps: int
    slices: int
    columns: int  # blocks of the CTA
    arrivals: int  # that free a stage
    slot_arrivals: int  # that free a slot of h
    warps: int  # that arrive for a consumer
    slots_reused: bool
    run: int = 1  # groups that a consumer has in a row, with one chunk each worked off together
    units: int = 2
    chunks: tuple[int, ...] = (1, 1, 1)  # of each group
    slots: int = 16  # of h
    source: str = RING
    few: bool = False  # loaders wait until all weights have landed
    down_last: bool = True  # the producer's order
    acquires_all: bool = True  # False: of a step of two stages, the first one alone
    both_release: bool = True  # False: a consumer passes over the stages of the other one, unseen
    releases_after_use: bool = True
    skips_by_slice: bool = True  # False: all stages of the other's group, then all its slots
    last_is_passed_over: bool | None = None  # None: as the kernel chooses
    fences: bool = True

    @property
    def slice_stages(self) -> int:
        """Stages of a slice in all column blocks of the CTA."""
        return self.columns * self.slice_steps * self.step_stages

    @property
    def group_stages(self) -> int:
        return self.slices * self.slice_stages

    @property
    def up_stages(self) -> int:
        return self.units * self.unit_stages

    @property
    def unit_batches(self) -> list[range]:
        """Units that are streamed together: the first one alone, then pairs."""
        pairs = range(1, self.units, 2)
        return [range(min(self.units, 1)), *(range(u, min(u + 2, self.units)) for u in pairs)]

    @property
    def streamed(self) -> list[tuple[int, int]]:
        """(unit, stage of it) in the order of the stream."""
        stages = range(self.unit_stages)
        return [(u, s) for batch in self.unit_batches for s in stages for u in batch]

    @property
    def all_stages(self) -> int:
        return self.up_stages + len(self.chunks) * self.group_stages

    @property
    def first_up(self) -> int:
        return 0 if self.down_last else self.all_stages - self.up_stages

    @property
    def first_down(self) -> int:
        return self.up_stages if self.down_last else 0

    @property
    def turns(self) -> int:
        """Slots of h that are filled, one after the other."""
        return sum(self.chunks) * self.slices

    @property
    def passes_over_last(self) -> bool:
        """Nobody waits for the last group's stages, if they all fit the ring."""
        if self.last_is_passed_over is not None:
            return self.last_is_passed_over
        return self.group_stages <= self.stages

    def step_of(self, number: int) -> tuple[int, ...]:
        """The stages that are copied together with this one, whose barrier is the first's."""
        inside = number - self.first_down
        if self.first_up <= number < self.first_up + self.up_stages:
            return (number,)
        first = number - inside % self.step_stages
        return tuple(range(first, first + self.step_stages))


def rules(spec: MoeSpec, **options) -> Rules:
    return replace(Rules(**weight_ring(spec)), **options)


class State(NamedTuple):
    """issued: stages acquired, in order; landed: bits of them; published: bits of units; fenced:
    bits of units whose scales are read and fenced; turns of h there; freed, slots_freed: arrivals
    so far at each stage's and slot's barrier."""

    issued: int
    landed: int
    published: int
    fenced: int
    turns: int
    freed: tuple[int, ...]
    slots_freed: tuple[int, ...]


def is_free(number: int, size: int, freed: tuple[int, ...], arrivals: int) -> bool:
    """A wait for an empty place of a ring: only the parity of phases shows."""
    return freed[number % size] // arrivals % 2 == number // size % 2


def producer(rules: Rules) -> Process:
    """Acquires stage after stage. A step is copied once all its stages are acquired."""
    streamed = rules.streamed

    def step(state: State, number: int) -> Iterable[tuple[State, object]]:
        if number == rules.all_stages:
            yield state, DONE
            return
        step = rules.step_of(number)
        is_later = number != step[0]
        unseen = is_later and not rules.acquires_all
        if not unseen and not is_free(number, rules.stages, state.freed, rules.arrivals):
            return
        is_up = rules.first_up <= number < rules.first_up + rules.up_stages
        unit, part = streamed[number - rules.first_up] if is_up else (-1, -1)
        old_unit = unit - rules.scale_slots
        if part == 0 and old_unit >= 0 and not state.fenced >> old_unit & 1:
            raise Violation(f"scales of unit {old_unit} are overwritten while they are read")
        # What belongs to a step's first barrier is announced there: others' phases end at once.
        landed = state.landed | (1 << number if is_later else 0)
        yield state._replace(issued=number + 1, landed=landed), number + 1

    return Process("producer", 0, step)


def copies(rules: Rules) -> Process:
    everything = (1 << rules.all_stages) - 1

    def step(state: State, _: object) -> Iterable[tuple[State, object]]:
        if state.landed == everything:
            yield state, DONE
        for s in range(max(0, state.issued - 2 * rules.stages), state.issued):
            of_step = rules.step_of(s)
            if not state.landed >> s & 1 and state.issued > of_step[-1]:
                yield state._replace(landed=state.landed | 1 << s), 0

    return Process("copies", 0, step)


class Op(NamedTuple):
    """One thing that a consumer does; number: of a stage, a turn or a unit."""

    what: str
    number: int = 0


def of_units(rules: Rules, who: int) -> Iterator[Op]:
    number = rules.first_up
    for batch in rules.unit_batches:
        mine = [unit for unit in batch if unit % HALVES == who]
        if mine and mine[0] >= HALVES and rules.fences:
            yield Op("fence", mine[0] - HALVES)
        for _ in range(rules.unit_stages):
            for unit in batch:
                if unit in mine:
                    yield from (Op("wait", number), *use_and_release(rules, number))
                elif rules.both_release:
                    yield from (Op("wait", number), Op("release", number))
                number += 1
        yield from (Op("publish", unit) for unit in mine)


def use_and_release(rules: Rules, s: int) -> tuple[Op, Op]:
    ops = Op("use", s), Op("release", s)
    return ops if rules.releases_after_use else ops[::-1]


def of_group(rules: Rules, group: int, own: bool) -> Iterator[Op]:
    first = rules.first_down + group * rules.group_stages
    turn = sum(rules.chunks[:group]) * rules.slices
    chunks = rules.chunks[group]
    if own:
        make = from_registers if rules.source == REGISTERS else from_ring
        yield from make(rules, first, turn, chunks)
        return
    last = group == len(rules.chunks) - 1
    wanted = rules.both_release and not (last and rules.passes_over_last)
    parts = rules.slices if rules.skips_by_slice else 1
    stages, turns = rules.group_stages // parts, chunks * rules.slices // parts
    for part in range(parts):
        for s in range(first + part * stages, first + (part + 1) * stages) if wanted else ():
            yield from (Op("wait", s), Op("release", s))
        for t in range(turn + part * turns, turn + (part + 1) * turns):
            if rules.slots_reused:
                yield from (Op("wait_h", t), Op("release_h", t))


def of_run(rules: Rules, groups: range, own: bool) -> Iterator[Op]:
    """Groups that a consumer has in a row."""
    parts = [list(of_group(rules, group, own)) for group in groups]
    together = len(groups) > 1 and {rules.chunks[g] for g in groups} == {1} and rules.source == RING
    if own and together:
        # All products run before the first are added up and their operands are released.
        frees = ("release", "release_h")
        yield from (op for part in parts for op in part if op.what not in frees)
        yield from (op for part in parts for op in part if op.what in frees)
    else:
        yield from (op for part in parts for op in part)


def from_ring(rules: Rules, first: int, turn: int, chunks: int) -> Iterator[Op]:
    """Slice by slice, chunk by chunk, column block by column block."""
    block = rules.slice_stages // rules.columns
    for slice_ in range(rules.slices):
        for chunk in range(chunks):
            t = turn + slice_ * chunks + chunk
            for own in range(rules.columns):
                at = first + slice_ * rules.slice_stages + own * block
                yield Op("wait_h", t)
                yield from (Op("wait", s) for s in range(at, at + block))
                yield Op("use_h", t)
                for s in range(at, at + block):
                    ops = use_and_release(rules, s)
                    yield from ops if chunk + 1 == chunks else (Op("use", s),)
            if rules.slots_reused:
                yield Op("release_h", t)


def from_registers(rules: Rules, first: int, turn: int, chunks: int) -> Iterator[Op]:
    """A column block's weights at once, then all chunks; one slice."""
    block = rules.group_stages // rules.columns
    for own in range(rules.columns):
        stages = range(first + own * block, first + (own + 1) * block)
        yield from (Op("wait", s) for s in stages)
        yield from (op for s in stages for op in use_and_release(rules, s))
        for t in range(turn, turn + chunks):
            yield from (Op("wait_h", t), Op("use_h", t))
    if rules.slots_reused:
        yield from (Op("release_h", t) for t in range(turn, turn + chunks))


def do(rules: Rules, state: State, op: Op) -> State | None:
    """The state after an op, or None while it must wait."""
    n = op.number
    if op.what == "wait":
        same_stage = range(n % rules.stages, rules.all_stages, rules.stages)
        phases = sum(state.landed >> s & 1 for s in same_stage)
        return state if phases % 2 != n // rules.stages % 2 else None
    if op.what == "use":
        step = rules.step_of(n)
        if any(not state.landed >> s & 1 for s in step):
            raise Violation(f"stage {n} is used before it has landed")
        if state.issued > n + rules.stages:
            raise Violation(f"stage {n} is used while it is overwritten")
        return state
    if op.what == "release":
        at = n % rules.stages
        return state._replace(freed=put(state.freed, at, state.freed[at] + rules.warps))
    if op.what == "wait_h":
        return state if state.turns > n else None
    if op.what == "use_h":
        if state.turns > n + rules.slots:
            raise Violation(f"h of turn {n} is used while it is overwritten")
        return state
    if op.what == "release_h":
        at = n % rules.slots
        more = put(state.slots_freed, at, state.slots_freed[at] + rules.warps)
        return state._replace(slots_freed=more)
    if op.what == "fence":
        return state._replace(fenced=state.fenced | 1 << n)
    return state._replace(published=state.published | 1 << n)


def consumer(rules: Rules, who: int) -> Process:
    """Local state: the next op."""
    program = list(of_units(rules, who))
    for first in range(0, len(rules.chunks), rules.run):
        groups = range(first, min(first + rules.run, len(rules.chunks)))
        program += of_run(rules, groups, first // rules.run % HALVES == who)

    def step(state: State, at: int) -> Iterable[tuple[State, object]]:
        after = do(rules, state, program[at])
        if after is not None:
            yield after, at + 1 if at + 1 < len(program) else DONE

    return Process(f"consumer {who}", 0 if program else DONE, step)


def others(rules: Rules) -> Process:
    """The loaders and, behind them, all other CTAs: one slot of h after the other."""
    up, everything = (1 << rules.units) - 1, (1 << rules.all_stages) - 1

    def step(state: State, turn: int) -> Iterable[tuple[State, object]]:
        if turn == rules.turns:
            yield state, DONE
            return
        free = is_free(turn, rules.slots, state.slots_freed, rules.slot_arrivals)
        ready = state.landed == everything or not rules.few
        if state.published == up and ready and (free or not rules.slots_reused):
            yield state._replace(turns=turn + 1), turn + 1

    return Process("others", 0, step)


def check(rules: Rules) -> Verdict:
    start = State(0, 0, 0, 0, 0, (0,) * rules.stages, (0,) * rules.slots)
    workers = [consumer(rules, who) for who in range(HALVES)]
    return explore([start], [producer(rules), copies(rules), *workers, others(rules)])


def ends(rules: Rules) -> bool:
    """Whether a CTA of full size ends in one interleaving, the same for all others that wait for
    what this one waits for."""
    processes = [producer(rules), copies(rules), others(rules)]
    processes += [consumer(rules, who) for who in range(HALVES)]
    state = State(0, 0, 0, 0, 0, (0,) * rules.stages, (0,) * rules.slots)
    places = [process.start for process in processes]
    moves = True
    while moves:
        moves = False
        for i, process in enumerate(processes):
            found = next(iter(process.step(state, places[i])), None) if places[i] != DONE else None
            if found:
                state, places[i] = found
                moves = True
    return all(place == DONE for place in places)
