"""Every interleaving of the ring of down scales: a slot has those of a batch of groups.

One warp loads batch after batch; both consumers wait for a batch before its first group, whoever's
it is, and release it behind its last one. Groups and arrivals are few; the rest is a `MoeSpec`'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from kernel_counts import scale_ring
from model_checker import DONE, Process, Verdict, Violation, explore, put
from moe_shapes import SHAPES, spec_of

from cute_moe.kernels.moe.lists import scale_slot
from cute_moe.kernels.moe.spec import HALVES, SCALE_BATCHES, MoeSpec

# held[slot]: batch; filled[slot], freed[slot]: arrivals so far.
Shared = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Rules:
    """The sizes, and the protocol: each change of a flag is a way to break it."""

    slots: int  # of scales
    stages: int  # of the barriers
    lanes: int
    ready_arrivals: int
    warps: int
    free_arrivals: int
    groups: int = 9
    batch: int = 2
    both: bool = True  # False: a consumer passes over batches without a group of its own
    release_behind: int = 1  # groups of a batch behind which it is released, from the last one

    @property
    def batches(self) -> int:
        return -(-self.groups // self.batch)


SOUND = Rules(**scale_ring(MoeSpec()))


def loader(rules: Rules) -> Process:
    def step(shared: Shared, local: tuple) -> Iterable[tuple[Shared, object]]:
        held, filled, freed = shared
        batch, stored = local
        stage, slot = batch % rules.stages, batch % rules.slots
        if batch == rules.batches:
            yield shared, DONE
        elif stored:
            after = put(filled, stage, filled[stage] + rules.lanes)
            yield (held, after, freed), (batch + 1, False)
        elif freed[stage] // rules.free_arrivals % 2 == batch // rules.stages % 2:
            yield (put(held, slot, batch), filled, freed), (batch, True)

    return Process("loader", (0, False), step)


def consumer(rules: Rules, half: int) -> Process:
    program: list[tuple] = []
    for number in range(rules.groups):
        batch, place = divmod(number, rules.batch)
        members = range(batch * rules.batch, min((batch + 1) * rules.batch, rules.groups))
        looks = rules.both or any(g % HALVES == half for g in members)
        if place == 0 and looks:
            program.append(("wait", batch))
        if number % HALVES == half:
            program.append(("read", batch))
        if place == rules.batch - rules.release_behind and looks:
            program.append(("release", batch))

    def step(shared: Shared, ops: tuple) -> Iterable[tuple[Shared, object]]:
        held, filled, freed = shared
        (what, batch), rest = ops[0], ops[1:] or DONE
        stage, slot = batch % rules.stages, batch % rules.slots
        if what == "wait":
            if filled[stage] // rules.ready_arrivals % 2 != batch // rules.stages % 2:
                yield shared, rest
        elif what == "release":
            yield (held, filled, put(freed, stage, freed[stage] + rules.warps)), rest
        elif held[slot] != batch:
            raise Violation(f"batch {batch}: found scales of batch {held[slot]}")
        else:
            yield shared, rest

    return Process(f"consumer {half}", tuple(program) or DONE, step)


def check(rules: Rules) -> Verdict:
    start = ((-1,) * rules.slots, (0,) * rules.stages, (0,) * rules.stages)
    return explore([start], [loader(rules), *(consumer(rules, h) for h in range(HALVES))])


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("groups", range(12))
def test_every_group_finds_its_scales(groups, batch) -> None:
    verdict = check(replace(SOUND, groups=groups, batch=batch))
    assert verdict.proven, verdict


BROKEN = {
    "one consumer is enough": (replace(SOUND, free_arrivals=SOUND.warps), "unsafe"),
    "more arrivals than warps": (replace(SOUND, free_arrivals=SOUND.free_arrivals + 1), "stuck"),
    "fewer lanes than arrivals": (replace(SOUND, lanes=SOUND.lanes - 1), "stuck"),
    "fewer slots than barriers": (replace(SOUND, slots=SOUND.slots - 1), "unsafe"),
    "released before the last group": (
        replace(SOUND, release_behind=3, batch=3, groups=12),
        "unsafe",
    ),
    "batches of the other one are passed over": (replace(SOUND, both=False, batch=1), "stuck"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name) -> None:
    broken, fault = BROKEN[name]
    verdict = check(broken)
    assert getattr(verdict, fault), verdict


def test_what_is_broken_is_sound_otherwise() -> None:
    assert check(SOUND).proven and check(replace(SOUND, batch=3, groups=12)).proven


@pytest.mark.parametrize("name", SHAPES)
def test_groups_lie_where_their_batch_does(name) -> None:
    """A group's scales are its part of its batch's slot, and nothing is as large as to overlap."""
    spec = spec_of(name)
    room = {n: count for n, _, count in spec.shared_regions}["down_scale"]
    batch_room = spec.scale_batch * spec.group_down_scales
    assert room == SCALE_BATCHES * batch_room
    for number in range(4 * SCALE_BATCHES * spec.scale_batch):
        batch, place = divmod(number, spec.scale_batch)
        first = batch % SCALE_BATCHES * batch_room
        assert scale_slot(number, spec) == first + place * spec.group_down_scales
