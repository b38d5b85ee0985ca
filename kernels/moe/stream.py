"""The weight stream: one producer warp walks this CTA's up units, then its down groups, by TMA.

The ring never drains between the two: down weights depend on the routing alone.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_moe.kernels.device.policy import EVICT_FIRST
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import FEW_CHUNKS, Shared, arrive_warp
from cute_moe.kernels.moe.routing import is_packed, pop_best, sort_candidates
from cute_moe.kernels.moe.spec import GROUP, STAGE_BYTES

EARLY_STAGES = 2  # not awaited before the loaders may read few chunks of h


class Weights(NamedTuple):
    """TMA atoms and coordinate tensors of both weight tensors, and the scales of the up weights."""

    up_atom: cute.CopyAtom
    up: cute.Tensor
    down_atom: cute.CopyAtom
    down: cute.Tensor
    scales_up: cute.Tensor


@cute.jit
def acquire(shared: Shared, step: Int32, num_bytes: Int32, spec: cutlass.Constexpr):
    """Wait until the stage of ring step `step` is free, then announce `num_bytes`."""
    stage = step % spec.stages
    cute.arch.mbarrier_wait(shared.empty + stage, ((step // spec.stages) & 1) ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(shared.full + stage, num_bytes)


@cute.jit
def first_expert(raw: cute.Tensor, shared: Shared, spec: cutlass.Constexpr):
    """Expert of this CTA's first unit, from token 0 alone where possible: (expert, has one).

    raw: this lane's logits of token 0.
    """
    cta, _, _ = cute.arch.block_idx()
    rank = spec.first_unit(cta) // spec.units_per_expert
    expert = Int32(0)
    has = Boolean(True)
    if rank < spec.top_k:
        keys, experts = sort_candidates(raw)
        for _ in cutlass.range(rank + 1, unroll=1):
            _, expert = pop_best(keys, experts, is_packed(raw))
    else:
        cute.arch.mbarrier_wait(shared.lists, 0)
        has = Boolean(rank < shared.meta[0])
        if has:
            expert = shared.experts[rank]
    return expert, has


@cute.jit
def copy_unit_scales(
    weights: Weights, unit: Int32, expert: Int32, stage: Int32, shared: Shared, spec
):
    """The scales of a unit's gate and up rows; they complete on the barrier of `stage`."""
    cta, _, _ = cute.arch.block_idx()
    dtype = weights.scales_up.element_type
    atom = cute.make_copy_atom(
        cpasync.CopyBulkG2SOp(), dtype, num_bits_per_copy=8 * spec.unit_scale_bytes
    )
    own = unit // spec.grid
    block = unit % spec.units_per_expert * 32 // 128
    row = cute.make_layout(spec.k_blocks)
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(2):
            source = (expert * 2 + half) * spec.h_blocks + block
            cute.copy(
                atom,
                cute.make_tensor(
                    (weights.scales_up.iterator + source * spec.k_blocks).align(16), row
                ),
                cute.make_tensor(
                    (shared.up_scale.iterator + (own * 2 + half) * spec.k_blocks).align(16), row
                ),
                mbar_ptr=shared.full + stage,
            )


@cute.jit
def stream_up(weights: Weights, raw: cute.Tensor, shared: Shared, spec: cutlass.Constexpr):
    """Issue every up unit of this CTA; returns the number of ring steps taken."""
    cta, _, _ = cute.arch.block_idx()
    tiles = cute.local_tile(weights.up, up_box(spec), (None, None))
    dst, src = cpasync.tma_partition(
        weights.up_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared.up, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    per_expert = cutlass.const_expr(spec.units_per_expert)
    expert, has = first_expert(raw, shared, spec)
    stamp(shared.trace, "first_copy", spec)
    unit = Int32(spec.first_unit(cta))
    step = Int32(0)
    while has:
        for s in cutlass.range(spec.unit_stages, unroll=1):
            num_bytes = Int32(STAGE_BYTES)
            if s == 0:
                num_bytes = Int32(STAGE_BYTES + 2 * spec.unit_scale_bytes)
            acquire(shared, step, num_bytes, spec)
            stage = step % spec.stages
            part = unit % per_expert
            if cutlass.const_expr(spec.interleave_up):
                coord = ((0, expert, part), (0, s))
            else:
                coord = ((0, 0, expert * per_expert + part), (0, s))
            cute.copy(
                weights.up_atom,
                src[(None, *coord)],
                dst[None, stage],
                tma_bar_ptr=shared.full + stage,
                cache_policy=Int64(EVICT_FIRST),
            )
            if s == 0:
                copy_unit_scales(weights, unit, expert, stage, shared, spec)
            step = step + 1
        unit = unit + spec.grid
        cute.arch.mbarrier_wait(shared.lists, 0)
        has = Boolean(unit // per_expert < shared.meta[0])
        if has:
            expert = shared.experts[unit // per_expert]
    return step


def up_box(spec):
    """TMA tile of the up weights: 4 x (8 gate rows, 8 up rows) by two blocks of 128."""
    return (8, 2, 4), (128, 2)


@cute.jit
def stream_down(weights: Weights, step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Issue this CTA's column blocks of every active expert, two experts a stage; the step after.

    All column blocks of a group of four experts come before the next group.
    """
    cta, _, _ = cute.arch.block_idx()
    tiles = cute.local_tile(weights.down, ((8, 2), (128, spec.h_blocks), 1), (None, None, None))
    dst, src = cpasync.tma_partition(
        weights.down_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared.down_box, 0, 3),
        cute.group_modes(tiles, 0, 3),
    )
    active = shared.meta[0]
    for group in cutlass.range((active + GROUP - 1) // GROUP, unroll=1):
        for column in cutlass.range(cta, spec.column_blocks, spec.grid, unroll=1):
            for pair in cutlass.range(2 * group, 2 * group + 2, unroll=1):
                left = cutlass.max(cutlass.min(active - 2 * pair, 2), 0)
                acquire(shared, step, left * (STAGE_BYTES // 2), spec)
                stage = step % spec.stages
                for i in cutlass.range(left, unroll=1):
                    expert = shared.experts[2 * pair + i]
                    cute.copy(
                        weights.down_atom,
                        src[None, (0, column), (0, 0), expert],
                        dst[None, 2 * stage + i],
                        tma_bar_ptr=shared.full + stage,
                        cache_policy=Int64(EVICT_FIRST),
                    )
                step = step + 1
    return step


@cute.jit
def produce(weights: Weights, raw: cute.Tensor, shared: Shared, spec: cutlass.Constexpr):
    """The producer warp's whole life; raw: this lane's logits of token 0."""
    step = stream_up(weights, raw, shared, spec)
    stamp(shared.trace, "up_issued", spec)
    arrive_warp(shared.gate)
    cute.arch.mbarrier_wait(shared.lists, 0)
    step = stream_down(weights, step, shared, spec)
    stamp(shared.trace, "down_issued", spec)
    first = cutlass.max(step - spec.stages, 0)
    enough = step - 1
    if shared.meta[1] <= FEW_CHUNKS:
        enough = cutlass.max(enough - EARLY_STAGES, first)
    for s in cutlass.range(first, step, unroll=1):
        cute.arch.mbarrier_wait(shared.full + s % spec.stages, (s // spec.stages) & 1)
        if s == enough:
            arrive_warp(shared.landed)
    stamp(shared.trace, "landed", spec)
