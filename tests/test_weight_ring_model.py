"""Every interleaving of the weight ring in one CTA, with h from other CTAs as late as can be.

The producer issues the own up units and then the down groups, one step after the other, into stage
step mod `stages`; copies land in any order. Two consumers take units and groups in turn, and both
wait for and release every step. A unit is published when its consumer is through with it. The
other CTAs are the worst there can be: they give their h only after this CTA has published all of
its units. That this CTA ends nevertheless shows that no CTA waits for another one with its up
units, so that in the end all h is there, however many CTAs run.

A step is two stages of the kernel, what a group takes in a column block; all other counts are
those of a `MoeSpec`. Left out: that the two stages of a step move one by one, and the slots of h
(test_h_ring_model.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from kernel_counts import CONSUMERS, weight_ring
from model_checker import DONE, Process, Verdict, Violation, explore, put

from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.spec import MoeSpec

RING, REGISTERS = "ring", "registers"  # where the consumer of a group waits for h with the weights


class Step(NamedTuple):
    """What a ring step brings: a part of up unit `turn`, or (kind) a column block of a group."""

    turn: int
    kind: str | None = None


@dataclass(frozen=True)
class Rules:
    """The sizes, and the protocol: each change of a flag is a way to break it."""

    units: int
    chunks: tuple[int, ...]  # of h, for each group
    stages: int
    unit_steps: int
    columns: int
    arrivals: int  # that free a stage
    warps: int  # that arrive for a consumer
    register_groups: int  # with so many groups at most, all weights wait in registers
    early_chunks: int  # with so many at most, loaders wait until all weights have landed
    kinds: str | None = None  # of all groups; None: as the kernel chooses
    down_last: bool = True  # the producer's order
    both_release: bool = True  # False: a consumer passes over the steps of the other one, unseen
    releases_after_use: bool = True

    def kind_of(self, group: int) -> str:
        in_ring = len(self.chunks) > self.register_groups and self.chunks[group] == 1
        return self.kinds or (RING if in_ring else REGISTERS)

    @property
    def steps(self) -> tuple[Step, ...]:
        up = tuple(Step(unit) for unit in range(self.units) for _ in range(self.unit_steps))
        groups = range(len(self.chunks))
        down = tuple(Step(g, self.kind_of(g)) for g in groups for _ in range(self.columns))
        return up + down if self.down_last else down + up

    @property
    def loaders_wait_for_landed(self) -> bool:
        return sum(self.chunks) <= self.early_chunks

    @property
    def last_group_is_skipped(self) -> bool:
        """Nobody waits for its stages, if they all fit the ring: its consumer alone looks at it."""
        return self.columns <= self.stages


def rules(spec: MoeSpec, units: int = 2, chunks: tuple[int, ...] = (1, 1, 1)) -> Rules:
    return Rules(units, chunks, **weight_ring(spec))


class State(NamedTuple):
    """issued: steps, in order; landed, used: bits of steps; free: arrivals so far at each stage's
    barrier; h: groups, in order."""

    issued: int
    landed: int
    used: int
    free: tuple[int, ...]
    h: int


def passes(phases: int, step: int, stages: int) -> bool:
    """A wait for the phase of `step` on its stage's barrier: only the parity of phases shows."""
    return phases % 2 != (step // stages) % 2


def producer(rules: Rules) -> Process:
    last = len(rules.steps)

    def step(state: State, number: int) -> Iterable[tuple[State, object]]:
        if number == last:
            yield state, DONE
            return
        before, stage = number - rules.stages, number % rules.stages
        if before < 0 or passes(state.free[stage] // rules.arrivals, before, rules.stages):
            if before >= 0 and not state.used >> before & 1:
                raise Violation(f"step {number} overwrites step {before}, which is in use")
            yield state._replace(issued=number + 1), number + 1

    return Process("producer", 0, step)


def copies(rules: Rules) -> Process:
    everything = (1 << len(rules.steps)) - 1

    def step(state: State, _: object) -> Iterable[tuple[State, object]]:
        if state.landed == everything:
            yield state, DONE
        for s in range(state.issued):
            if not state.landed >> s & 1:
                yield state._replace(landed=state.landed | 1 << s), 0

    return Process("copies", 0, step)


def consumer(rules: Rules, who: int) -> Process:
    """Local state: (step, what is next of it)."""
    steps, stages = rules.steps, rules.stages
    phases = [sum(1 << s for s in range(i, len(steps), stages)) for i in range(stages)]

    def is_own(s: int) -> bool:
        return steps[s].turn % CONSUMERS == who

    def is_passed_over(s: int) -> bool:
        last = steps[s].kind is not None and steps[s].turn == len(rules.chunks) - 1
        skipped = last and rules.last_group_is_skipped or not rules.both_release
        return skipped and not is_own(s)

    def at(s: int) -> object:
        """The place before step `s`, or before the next one that this consumer looks at."""
        while s < len(steps) and is_passed_over(s):
            s += 1
        return (s, "wait") if s < len(steps) else DONE

    def use(state: State, s: int) -> State:
        return state._replace(used=state.used | 1 << s)

    def step(state: State, local: tuple) -> Iterable[tuple[State, object]]:
        s, next_ = local
        stage, kind, own = s % stages, steps[s].kind, is_own(s)
        has_h = kind is None or state.h > steps[s].turn
        if next_ == "wait":
            if own and kind == RING and not has_h:
                return
            if passes((state.landed & phases[stage]).bit_count(), s, stages):
                if own and not state.landed >> s & 1:
                    raise Violation(f"step {s} is used before it has landed")
                yield state, (s, "use" if own and rules.releases_after_use else "release")
        elif next_ == "use":
            yield use(state, s), (s, "release")
        elif next_ == "release":
            late = own and (kind == REGISTERS or not rules.releases_after_use)
            after = state._replace(free=put(state.free, stage, state.free[stage] + rules.warps))
            yield after, (s, "product") if late else at(s + 1)
        elif has_h:  # product
            yield use(state, s), at(s + 1)

    return Process(f"consumer {who}", at(0), step)


def others(rules: Rules) -> Process:
    """The loaders and, behind them, all other CTAs: h of one group after the other."""
    up = sum(1 << s for s, step in enumerate(rules.steps) if step.kind is None)
    everything = (1 << len(rules.steps)) - 1

    def step(state: State, group: int) -> Iterable[tuple[State, object]]:
        ready = state.landed == everything or not rules.loaders_wait_for_landed
        if group == len(rules.chunks):
            yield state, DONE
        elif state.used & up == up and ready:
            yield state._replace(h=group + 1), group + 1

    return Process("others", 0, step)


def check(rules: Rules) -> Verdict:
    start = State(0, 0, 0, (0,) * rules.stages, 0)
    workers = [consumer(rules, who) for who in range(CONSUMERS)]
    return explore([start], [producer(rules), copies(rules), *workers, others(rules)])


SPECS = [
    *(MoeSpec(grid=grid, stages=stages) for grid in (132, 78) for stages in (2, 4, 6)),
    MoeSpec(grid=16),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.grid} SMs, {spec.stages} stages")
@pytest.mark.parametrize("units", [0, 1, 3])
@pytest.mark.parametrize("chunks", [(1,), (2, 1), (1, 1, 1), (1, 2, 1), (2, 1, 1, 1)], ids=str)
def test_every_cta_ends(spec, units, chunks) -> None:
    verdict = check(rules(spec, units, chunks))
    assert verdict.proven, verdict


def test_two_groups_land_before_any_h() -> None:
    """Loaders may wait for that: by way of registers always, from the ring if it holds both."""
    sound = rules(MoeSpec(), chunks=(1, 1))
    assert sound.loaders_wait_for_landed and sound.kind_of(0) == REGISTERS
    for kinds, stages, ends in ((REGISTERS, 1, True), (RING, 1, False), (RING, 2, True)):
        verdict = check(replace(sound, kinds=kinds, stages=stages))
        assert verdict.proven == ends, verdict


BASE = rules(MoeSpec())
BROKEN = {
    "down first": (replace(BASE, down_last=False), "stuck"),
    "one releases": (
        replace(BASE, units=3, both_release=False, arrivals=BASE.arrivals // CONSUMERS),
        "unsafe",
    ),
    "one is enough": (replace(BASE, arrivals=BASE.arrivals // CONSUMERS), "unsafe"),
    "one warp is enough": (replace(BASE, arrivals=1), "stuck"),
    "more arrivals than warps": (replace(BASE, arrivals=BASE.arrivals + 1), "stuck"),
    "early release": (replace(BASE, releases_after_use=False), "unsafe"),
    "loaders wait for four groups": (
        replace(BASE, chunks=(1,) * 4, early_chunks=4, kinds=RING),
        "stuck",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name) -> None:
    broken, fault = BROKEN[name]
    verdict = check(broken)
    assert getattr(verdict, fault), verdict


def test_a_count_of_the_kernel_is_a_count_of_the_model(monkeypatch) -> None:
    monkeypatch.setattr(memory, "CONSUMER_WARPS", memory.CONSUMER_WARPS // CONSUMERS)
    verdict = check(rules(MoeSpec()))
    assert verdict.unsafe, verdict


def test_what_is_broken_is_sound_otherwise() -> None:
    assert check(BASE).proven and check(replace(BASE, units=3)).proven
