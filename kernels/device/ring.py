"""Rings of shared-memory stages between writers and readers, with two mbarriers a stage.

Use s of a ring (a *step*) has stage s mod `stages`. A writer waits until the step's stage is empty,
fills it and arrives on `full`; a reader waits for that, reads and arrives on `empty`. Whoever waits
sees only the parity of a barrier's phases, so every writer must arrive at every step and every
reader release every step, in order: then nobody is two phases ahead or behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Ring:
    """full, empty: [stages] mbarriers; writers, readers: arrivals that complete a phase of them."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]
    writers: cutlass.Constexpr[int]
    readers: cutlass.Constexpr[int]


# Functions, not methods: the compiler takes an object whose methods a loop calls for one that the
# loop changes, and its numbers for run-time values.


def stage_of(ring: Ring, step):
    """The stage of a step."""
    return step % ring.stages


def phase_of(ring: Ring, step):
    """Parity of the phase in which the step's stage is filled."""
    return (step // ring.stages) & 1


def full_barrier(ring: Ring, step):
    """The barrier that a bulk copy into the step's stage completes on."""
    return ring.full + stage_of(ring, step)


def init_ring(ring: Ring, reused: bool = True):
    """Initialise the mbarriers, by one lane, which fences afterwards.

    Unless it is `reused`, no stage is filled twice, and nobody waits for an empty one.
    """
    for s in range(ring.stages):
        cute.arch.mbarrier_init(ring.full + s, ring.writers)
        if reused:
            cute.arch.mbarrier_init(ring.empty + s, ring.readers)


def wait_empty(ring: Ring, step):
    """Wait until the stage of `step` may be written."""
    cute.arch.mbarrier_wait(ring.empty + stage_of(ring, step), phase_of(ring, step) ^ 1)


def wait_full(ring: Ring, step):
    """Wait until the stage of `step` has been written."""
    cute.arch.mbarrier_wait(full_barrier(ring, step), phase_of(ring, step))


@cute.jit
def acquire_for_copy(ring: Ring, step: Int32, num_bytes: Int32):
    """Wait for an empty stage and announce `num_bytes` of bulk copies: its only writer."""
    if cutlass.const_expr(ring.writers != 1):
        raise ValueError(f"writers: expected 1 for bulk copies, got {ring.writers}")
    wait_empty(ring, step)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full_barrier(ring, step), num_bytes)


def fill_by_lanes(ring: Ring, step, lanes: int, count: int = 1):
    """Arrive as one of `lanes` writing lanes, each after its own stores; each counts `count`."""
    _expect("writers", lanes * count, ring.writers)
    cute.arch.mbarrier_arrive(full_barrier(ring, step), arrive_count=count)


@cute.jit
def pass_by_warps(ring: Ring, step, warps: cutlass.Constexpr):
    """Arrive for a warp, one of `warps` writers, that has nothing to write in this step.

    By one lane: arrivals of many lanes on one barrier take their turns.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full_barrier(ring, step), arrive_count=ring.writers // warps)


def release_by_warps(ring: Ring, step, warps: int):
    """One arrival for the calling warp, one of `warps` that read, after all of its lanes' reads."""
    _expect("readers", warps, ring.readers)
    arrive_warp(ring.empty + stage_of(ring, step))


@cute.jit
def arrive_warp(bar: cute.Pointer):
    """One arrival for the calling warp, after the work of all of its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bar)


def _expect(name: str, got: int, want: int):
    """Trace-time check that as many arrive as the barrier counts."""
    if got != want:
        raise ValueError(f"{name}: expected {want} arrivals a step, got {got}")
