"""Every interleaving of the weight ring in one CTA, with h from other CTAs as late as can be.

The producer issues the own up units and then the down groups, a step each, into stage step mod
`stages`; copies land in any order. Two consumers take units and groups in turn, and both wait for
and release every step. A unit is published when its consumer is through with it. The other CTAs
are the worst there can be: they give their h only after this CTA has published all of its units.
That this CTA ends nevertheless shows that no CTA waits for another one with its up units, so that
in the end all h is there, however many CTAs run.

Left out: the eight stages of a unit and the two of a group move as one step, a CTA has one column
block, both consumers release the last group too, and the slots of h (test_h_ring_model.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from model_checker import DONE, Process, Verdict, Violation, explore, put

RING, REGISTERS = "ring", "registers"  # where the consumer of a group waits for h with the weights
CONSUMERS = 2


@dataclass(frozen=True)
class Rules:
    """The sizes, and the protocol: each change of a flag is a way to break it."""

    units: int = 2
    groups: tuple[str, ...] = (RING, RING, RING)
    stages: int = 2
    down_last: bool = True  # the producer's order
    both_release: bool = True  # False: a consumer passes over the steps of the other one, unseen
    releases_after_use: bool = True
    loaders_wait_for_landed: bool = False  # as they do with two groups at most

    @property
    def steps(self) -> tuple[str | None, ...]:
        """The kind of each ring step: None for an up unit, else that of the group."""
        up: tuple[str | None, ...] = (None,) * self.units
        return (*up, *self.groups) if self.down_last else (*self.groups, *up)


@dataclass(frozen=True)
class State:
    """issued: steps in order; landed, released (by consumer), used: of each step; h: groups."""

    issued: int
    landed: tuple[bool, ...]
    released: tuple[tuple[bool, bool], ...]
    used: tuple[bool, ...]
    h: tuple[bool, ...]


def change(state: State, **fields: object) -> State:
    return State(**{**state.__dict__, **fields})


def passes(done: Iterable[bool], step: int, stages: int) -> bool:
    """A wait for the phase of `step` on its stage's barrier: only the parity of phases shows."""
    phases = sum(1 for s, is_done in enumerate(done) if is_done and s % stages == step % stages)
    return phases % 2 != (step // stages) % 2


def producer(rules: Rules) -> Process:
    def step(state: State, number: int) -> Iterable[tuple[State, object]]:
        if number == len(rules.steps):
            yield state, DONE
            return
        free = [all(pair) if rules.both_release else any(pair) for pair in state.released]
        before = number - rules.stages
        if before < 0 or passes(free, before, rules.stages):
            if before >= 0 and not (state.used[before] and free[before]):
                raise Violation(f"step {number} overwrites step {before}, which is in use")
            yield change(state, issued=number + 1), number + 1

    return Process("producer", 0, step)


def copies(rules: Rules) -> Process:
    def step(state: State, _: object) -> Iterable[tuple[State, object]]:
        if all(state.landed):
            yield state, DONE
        for s in range(state.issued):
            if not state.landed[s]:
                yield change(state, landed=put(state.landed, s, True)), 0

    return Process("copies", 0, step)


def consumer(rules: Rules, who: int) -> Process:
    """Local state: (step, what is next of it)."""
    kinds = rules.steps
    up = [s for s, kind in enumerate(kinds) if kind is None]
    down = [s for s, kind in enumerate(kinds) if kind is not None]

    def release(state: State, s: int) -> State:
        return change(state, released=put(state.released, s, put(state.released[s], who, True)))

    def step(state: State, local: tuple) -> Iterable[tuple[State, object]]:
        s, next_ = local
        if s == len(kinds):
            yield state, DONE
            return
        group = down.index(s) if s in down else None
        turn = group if group is not None else up.index(s)
        own = turn % CONSUMERS == who
        has_h = group is None or state.h[group]
        if not own and not rules.both_release:
            yield state, (s + 1, "wait")
        elif next_ == "wait":
            if own and kinds[s] == RING and not has_h:
                return
            if passes(state.landed, s, rules.stages):
                if own and not state.landed[s]:
                    raise Violation(f"step {s} is used before it has landed")
                yield state, (s, "use" if own and rules.releases_after_use else "release")
        elif next_ == "use":
            yield change(state, used=put(state.used, s, True)), (s, "release")
        elif next_ == "release":
            late = own and (kinds[s] == REGISTERS or not rules.releases_after_use)
            yield release(state, s), (s, "product") if late else (s + 1, "wait")
        elif has_h:  # product
            yield change(state, used=put(state.used, s, True)), (s + 1, "wait")

    return Process(f"consumer {who}", (0, "wait"), step)


def others(rules: Rules) -> Process:
    """The loaders and, behind them, all other CTAs: h of one group after the other."""

    def step(state: State, group: int) -> Iterable[tuple[State, object]]:
        published = all(u for u, kind in zip(state.used, rules.steps, strict=True) if kind is None)
        ready = all(state.landed) or not rules.loaders_wait_for_landed
        if group == len(rules.groups):
            yield state, DONE
        elif published and ready:
            yield change(state, h=put(state.h, group, True)), group + 1

    return Process("others", 0, step)


def check(rules: Rules) -> Verdict:
    n = len(rules.steps)
    no = (False,) * n
    start = State(0, no, ((False, False),) * n, no, (False,) * len(rules.groups))
    workers = [consumer(rules, who) for who in range(CONSUMERS)]
    return explore([start], [producer(rules), copies(rules), *workers, others(rules)])


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("units", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "groups",
    [
        (RING,),
        (REGISTERS,) * 3,
        (RING,) * 3,
        (RING, REGISTERS, RING),
        (REGISTERS, RING, RING, RING),
    ],
)
def test_every_cta_ends(groups, units, stages) -> None:
    verdict = check(Rules(units, groups, stages))
    assert verdict.proven, verdict


def test_two_groups_land_before_any_h() -> None:
    """Loaders may wait for that: by way of registers always, from the ring if it holds both."""
    for groups, stages, sound in ((REGISTERS, 1, True), (RING, 1, False), (RING, 2, True)):
        verdict = check(Rules(2, (groups,) * 2, stages, loaders_wait_for_landed=True))
        assert verdict.proven == sound, verdict


@pytest.mark.parametrize(
    "rules, fault",
    [
        (Rules(down_last=False), "stuck"),
        (Rules(3, (REGISTERS, RING, RING, RING), 3, both_release=False), "unsafe"),
        (Rules(releases_after_use=False), "unsafe"),
        (Rules(loaders_wait_for_landed=True), "stuck"),
    ],
    ids=["down first", "one releases", "early release", "loaders wait for three groups"],
)
def test_broken_rule_is_caught(rules, fault) -> None:
    assert getattr(check(rules), fault), fault
