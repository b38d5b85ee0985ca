"""A kernel that does nothing but pass values between CTAs through barriers, and its host model.

In a round each thread publishes its state, crosses the barrier of the mode, reads the state of
another thread of another CTA and goes on with state * MULTIPLIER + value + round. One value that
is a round old, or new, changes the state for good, and no two orders of values give the same.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_moe.kernels.device.barrier import (
    ALL_THREADS,
    SLOT_WORDS,
    Threads,
    arrive,
    colstripe_barrier,
    expert_barrier,
    grid_barrier,
    partial_barrier,
    signal,
    sync_group,
    wait,
    wait_parity,
)

LANES = 32  # Threads per CTA that exchange values: a power of two.
MULTIPLIER = 1664525
# A round's cells are written again four rounds later, when everybody has read them in any mode.
BUFFERS = 4
SLOTS = 256
MODES = ("grid", "expert", "stripe", "uneven", "split", "signal", "watch")


@dataclass(frozen=True)
class RelaySpec:
    """`mode`: grid, expert, stripe, uneven (two groups, one warp of two), split, signal, watch.

    `group` is the number of CTAs per barrier in modes expert and stripe; it divides `ctas`.
    """

    mode: str
    ctas: int
    group: int = 0

    @property
    def first_group(self) -> int:
        """CTAs in the smaller of the two groups of mode uneven."""
        return self.ctas // 3

    @property
    def threads(self) -> Threads:
        """Mode uneven leaves warp 0 out."""
        return Threads(32, LANES, named_barrier=1) if self.mode == "uneven" else ALL_THREADS


@cute.jit
def members(spec: cutlass.Constexpr):
    """The CTAs that share a barrier with this one: own index, number, first CTA and stride."""
    cta, _, _ = cute.arch.block_idx()
    index, count, base, stride = cta, Int32(spec.ctas), Int32(0), 1
    if cutlass.const_expr(spec.mode == "expert"):
        index, count = cta % spec.group, Int32(spec.group)
        base = cta - index
    if cutlass.const_expr(spec.mode == "stripe"):
        stride = spec.ctas // spec.group
        index, count, base = cta // stride, Int32(spec.group), cta % stride
    if cutlass.const_expr(spec.mode == "uneven"):
        count = Int32(spec.first_group)
        if cta >= spec.first_group:
            base, count = Int32(spec.first_group), Int32(spec.ctas - spec.first_group)
        index = cta - base
    return index, count, base, stride


@cute.jit
def cross_split(slots: cute.Pointer, number: Int32, spec: cutlass.Constexpr):
    """Arrive, now and then cross a whole barrier on another slot, then wait."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    sync_group(ALL_THREADS)
    ticket = (Int32(0), Int32(0))
    if tid == 0:
        ticket = arrive(slots, spec.ctas, cta == number % spec.ctas)
    if number % 4 == 1:
        partial_barrier(slots, Int32(1), spec.ctas, Int32(spec.ctas - 1))
    if tid == 0:
        wait(slots, ticket)
    sync_group(ALL_THREADS)


@cute.jit
def cross_watch(slots: cute.Pointer, number: Int32, spec: cutlass.Constexpr):
    """One CTA, another in each round, only watches; two slots in turn."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    slot = slots + (number % 2) * SLOT_WORDS
    sync_group(ALL_THREADS)
    if tid == 0:
        if cta == number % spec.ctas:
            wait_parity(slot, number // 2 + 1)
        else:
            wait(slot, arrive(slot, spec.ctas - 1, cta == (number + 1) % spec.ctas))
    sync_group(ALL_THREADS)


@cute.jit
def cross_signal(slots: cute.Pointer, number: Int32, spec: cutlass.Constexpr):
    """Everybody signals without a ticket and waits by the number of the round."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    sync_group(ALL_THREADS)
    if tid == 0:
        signal(slots, spec.ctas, cta == 0)
        wait_parity(slots, number + 1)
    sync_group(ALL_THREADS)


@cute.jit
def cross(slots: cute.Pointer, number: Int32, spec: cutlass.Constexpr):
    """The barrier of the mode, for round `number` since the slots were zeroed."""
    if cutlass.const_expr(spec.mode == "grid"):
        grid_barrier(slots)
    if cutlass.const_expr(spec.mode == "expert"):
        expert_barrier(slots, spec.group)
    if cutlass.const_expr(spec.mode == "stripe"):
        colstripe_barrier(slots, spec.ctas // spec.group, spec.group)
    if cutlass.const_expr(spec.mode == "uneven"):
        _, count, base, _ = members(spec)
        which = Int32(7)
        if base != 0:
            which = Int32(200)
        partial_barrier(slots, which, count, base + count - 1, spec.threads)
    if cutlass.const_expr(spec.mode == "split"):
        cross_split(slots, number, spec)
    if cutlass.const_expr(spec.mode == "signal"):
        cross_signal(slots, number, spec)
    if cutlass.const_expr(spec.mode == "watch"):
        cross_watch(slots, number, spec)


@cute.kernel
def relay_kernel(
    slots: cute.Tensor,
    cells: cute.Tensor,  # (BUFFERS, ctas, LANES)
    states: cute.Tensor,  # (ctas, LANES)
    first_round: Int32,
    rounds: Int32,
    spec: cutlass.Constexpr,
):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    if tid >= spec.threads.first:
        lane = tid - spec.threads.first
        index, count, base, stride = members(spec)
        others = count - 1
        if others == 0:
            others = Int32(1)
        state = states[cta, lane]
        for number in cutlass.range(first_round, first_round + rounds, unroll=1):
            buffer = number % BUFFERS
            silent = Int32(-1)
            if cutlass.const_expr(spec.mode == "watch"):
                silent = number % spec.ctas
            if cta != silent:
                cells[buffer, cta, lane] = state
            # Some CTA is late in most rounds, another one each time.
            if (number * 40503 + cta * 2749) % 64 == 0:
                cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(200)])
            cross(slots.iterator, number, spec)
            source = base + ((index + 1 + number % others) % count) * stride
            value = Int32(0)
            if source != silent:
                value = cells[buffer, source, (lane + 1 + number) % LANES]
            state = state * MULTIPLIER + value + number
        states[cta, lane] = state


@cute.jit
def launch_relay(
    slots: cute.Tensor,
    cells: cute.Tensor,
    states: cute.Tensor,
    first_round: Int32,
    rounds: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    relay_kernel(slots, cells, states, first_round, rounds, spec).launch(
        grid=[spec.ctas, 1, 1],
        block=[spec.threads.first + LANES, 1, 1],
        stream=stream,
        cooperative=True,
        min_blocks_per_mp=1,
    )


def build_relay(spec: RelaySpec, options: str):
    """Compile: arguments slots, cells, states (all int32), first_round, rounds."""

    def fake(*shape: int):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(Int32, shape, stride_order=order, assumed_align=16)

    return cute.compile(
        launch_relay,
        fake(SLOTS * SLOT_WORDS),
        fake(BUFFERS, spec.ctas, LANES),
        fake(spec.ctas, LANES),
        Int32(0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        spec,
        options=options,
    )


def model_relay(spec: RelaySpec, states: np.ndarray, rounds: int) -> np.ndarray:
    """What `states` [ctas, LANES] uint32 become after rounds 0 .. rounds - 1."""
    cta = np.arange(spec.ctas)
    index, count, base, stride = cta, np.full(spec.ctas, spec.ctas), 0 * cta, 1
    if spec.mode == "expert":
        index, count, base = cta % spec.group, 0 * cta + spec.group, cta - cta % spec.group
    if spec.mode == "stripe":
        stride = spec.ctas // spec.group
        index, count, base = cta // stride, 0 * cta + spec.group, cta % stride
    if spec.mode == "uneven":
        base = np.where(cta < spec.first_group, 0, spec.first_group)
        count = np.where(base == 0, spec.first_group, spec.ctas - spec.first_group)
        index = cta - base
    others = np.maximum(count - 1, 1)
    lane = np.arange(LANES)
    for number in range(rounds):
        source = base + (index + 1 + number % others) % count * stride
        value = states[source][:, (lane + 1 + number) % LANES]
        if spec.mode == "watch":
            value[source == number % spec.ctas] = 0
        states = states * np.uint32(MULTIPLIER) + value + np.uint32(number)
    return states
