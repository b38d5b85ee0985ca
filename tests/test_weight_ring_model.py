"""Every interleaving of the weight ring in one CTA; support/weight_ring.py says what that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from moe_shapes import SHAPES, spec_of
from weight_ring import REGISTERS, Rules, check, ends, rules

from cute_moe.kernels.moe import memory
from cute_moe.kernels.moe.spec import HALVES, MoeSpec

# Small sizes of every kind: one or two stages a step, one or several steps a slice, one or several
# slices, one or two column blocks, weights in registers.
SMALL = {
    "as in one group of registers": {"source": REGISTERS},
    "ring": {},
    "two stages a step": {"step_stages": 2, "unit_stages": 2},
    "two steps a slice": {"slice_steps": 2},
    "three slices": {"slices": 3, "slots": 2, "slots_reused": True},
    "three slices, one slot": {"slices": 3, "slots": 1, "slots_reused": True},
    "two slices of two stages": {
        "slices": 2, "step_stages": 2, "unit_stages": 2, "slots": 2, "slots_reused": True,
    },
    "two column blocks": {"columns": 2, "slots": 2, "slots_reused": True},
    "two column blocks in registers": {
        "columns": 2, "slots": 2, "slots_reused": True, "source": REGISTERS,
    },
    "two groups at once": {"run": 2, "slots": 2, "slots_reused": True},
    "two column blocks, two slices": {"columns": 2, "slices": 2, "slots": 2, "slots_reused": True},
}  # fmt: skip
CASES = [(0, (1,)), (0, (1, 2, 1)), (0, (1, 1, 1, 1)), (3, (2, 1))]  # units, chunks


def small(**options) -> Rules:
    """A ring of four stages, whose units have one."""
    sizes = {"stages": 4, "unit_stages": 1, "step_stages": 1, "slice_steps": 1, "slices": 1}
    found = rules(MoeSpec(), **{**sizes, "columns": 1, "slots_reused": False, "run": 1, **options})
    return replace(found, scale_slots=options.get("scale_slots", scale_slots_for(found)))


def scale_slots_for(rules: Rules) -> int:
    """What a `MoeSpec` of these sizes has."""
    return MoeSpec._scale_slots(rules, rules.stages)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("units, chunks", CASES, ids=str)
def test_every_cta_ends(name, units, chunks) -> None:
    sound = small(units=units, chunks=chunks, **SMALL[name])
    if sound.source == REGISTERS and sound.slots_reused and max(chunks, default=0) > sound.slots:
        pytest.skip("such a group takes its weights from the ring")
    verdict = check(sound)
    assert verdict.proven, verdict


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("unit_stages", [1, 2, 3, 5])
def test_up_scales_are_read_and_fenced_before_the_next_ones_come(unit_stages, stages) -> None:
    """With a pair of slots less than `MoeSpec.unit_scale_slots` they are not."""
    sound = small(units=7, chunks=(), unit_stages=unit_stages, stages=stages)
    assert check(sound).proven
    fewer = check(replace(sound, scale_slots=sound.scale_slots - 2))
    assert fewer.unsafe and "scales of unit" in fewer.unsafe


def test_few_rows_wait_for_all_weights_if_the_ring_holds_them() -> None:
    for stages, enough in ((2, True), (1, False)):
        verdict = check(small(stages=stages, chunks=(1, 1), few=True))
        assert verdict.proven == enough, verdict


def full_size(name: str, **options) -> Iterator[Rules]:
    """A shape with some chunks a group, from the ring and, where it can be, from registers."""
    spec = spec_of(name, **options)
    for chunks in ((1,) * 5, (2, 1, 2), (5, 1)):
        found = rules(spec, chunks=chunks, slots=spec.h_slots)
        yield found
        if spec.weights_in_registers and spec.slices == 1 and max(chunks) <= spec.h_slots:
            yield replace(found, source=REGISTERS)


@pytest.mark.parametrize("grid", [132, 78])
@pytest.mark.parametrize("activations", ["fp8", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_ends(name, activations, grid) -> None:
    for sound in full_size(name, activations=activations, grid=grid):
        assert ends(sound), sound


def test_the_largest_shape_would_not_end_otherwise() -> None:
    """More slices a group than slots and stages: all stages first, then all slots, is stuck."""
    for sound in full_size("Mixtral-8x7B"):
        assert ends(sound) and not ends(replace(sound, skips_by_slice=False))


SLICES = small(slices=4, slots=1, slots_reused=True, stages=2, chunks=(1, 1))
STEPS = small(slice_steps=2, stages=4, chunks=(1, 1, 1))
DOUBLE = small(step_stages=2, unit_stages=2, stages=4, units=3)
UNITS = small(units=3, stages=2)
BROKEN = {
    "down first": (small(down_last=False, stages=2), "unsafe"),
    "one releases": (
        replace(UNITS, both_release=False, arrivals=UNITS.arrivals // HALVES, stages=1),
        "unsafe",
    ),
    "one is enough": (replace(UNITS, arrivals=UNITS.arrivals // HALVES), "unsafe"),
    "one warp is enough": (replace(UNITS, arrivals=1), "stuck"),
    "more arrivals than warps": (replace(UNITS, arrivals=UNITS.arrivals + 1), "stuck"),
    "early release": (replace(STEPS, releases_after_use=False), "unsafe"),
    "the second stage of a step is not awaited": (replace(DOUBLE, acquires_all=False), "unsafe"),
    "a slice that the ring does not hold": (replace(STEPS, stages=1, chunks=(2,)), "stuck"),
    # The one that has the group waits for a slot that the other one releases behind all stages.
    "all stages are skipped, then all slots": (replace(SLICES, skips_by_slice=False), "stuck"),
    "one release of a slot is enough": (
        replace(SLICES, slot_arrivals=SLICES.warps, chunks=(2, 1)),
        "unsafe",
    ),
    "the last group is passed over, though refilled": (
        replace(SLICES, last_is_passed_over=True),
        "stuck",
    ),
    "two groups hold the one slot": (
        small(run=2, slots=1, slots_reused=True, chunks=(1, 1)),
        "stuck",
    ),
    "two groups hold more than the ring": (small(run=2, stages=1, chunks=(1, 1)), "stuck"),
    "nobody fences the scales": (small(units=5, chunks=(), stages=1, fences=False), "unsafe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name) -> None:
    broken, fault = BROKEN[name]
    verdict = check(broken)
    assert getattr(verdict, fault), verdict


@pytest.mark.parametrize("sound", [SLICES, STEPS, DOUBLE, UNITS, replace(SLICES, chunks=(2, 1))])
def test_what_is_broken_is_sound_otherwise(sound) -> None:
    verdict = check(sound)
    assert verdict.proven, verdict


def test_a_count_of_the_kernel_is_a_count_of_the_model(monkeypatch) -> None:
    monkeypatch.setattr(memory, "CONSUMER_WARPS", memory.CONSUMER_WARPS // HALVES)
    verdict = check(small(units=3, stages=2))
    assert verdict.unsafe, verdict
