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
from cute_moe.kernels.device.ring import (
    acquire_for_copy,
    arrive_warp,
    full_barrier,
    stage_of,
    wait_empty,
    wait_full,
)
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import (
    ACTIVE,
    LOADER_WARPS,
    ROWS,
    WARP,
    Shared,
    down_strides,
    swizzle_atom,
)
from cute_moe.kernels.moe.routing import early_expert
from cute_moe.kernels.moe.spec import ATOM_ROWS, BLOCK, STAGE_BYTES, MoeSpec

EARLY_STAGES = 2  # not awaited before the loaders may read few rows of h
FEW_ROWS = 2 * LOADER_WARPS  # read by the loaders in one go each


class Weights(NamedTuple):
    """TMA atoms and coordinate tensors of both weight tensors, and the scales of the up weights."""

    up_atom: cute.CopyAtom
    up: cute.Tensor
    down_atom: cute.CopyAtom
    down: cute.Tensor
    scales_up: cute.Tensor


def up_view(w: cute.Tensor, spec: MoeSpec):
    """w13 [E, 2N, K] as ((8 rows, halves, row groups), (128, K/128)) so that one box is one stage.

    Raw rows: the halves of all experts stand N K apart, so (half, expert) is one mode of 2E.
    Interleaved rows: the 16-row groups of all experts stand 16 K apart.
    """
    k, n, e = spec.hidden, spec.intermediate, spec.num_experts
    if spec.interleave_up:
        rows, strides = (8, 2 * e, n // 8), (k, n * k, 8 * k)
    else:
        rows, strides = (8, 2, e * n // 8), (k, 8 * k, 16 * k)
    layout = cute.make_layout((rows, (BLOCK, k // BLOCK)), stride=(strides, (1, BLOCK)))
    return cute.make_tensor(w.iterator, layout)


def up_box(spec: MoeSpec):
    """TMA tile of the up weights: 8 gate rows, 8 up rows and so on by the blocks of a stage."""
    return (8, 2, spec.rows // 16), (BLOCK, spec.stage_blocks)


def up_tile(expert, unit, stage, spec: MoeSpec):
    """Which tile of the up weights a stage of a unit is: (rows, features)."""
    part = unit % spec.units_per_expert
    if spec.interleave_up:
        return (0, expert, part), (0, stage)
    return (0, 0, expert * spec.units_per_expert + part), (0, stage)


def up_box_layout(spec: MoeSpec):
    """Where an up box lands."""
    shape = (spec.rows, BLOCK * spec.stage_blocks)
    return cute.tile_to_shape(swizzle_atom(), shape, (0, 1))


def down_view(w: cute.Tensor, spec: MoeSpec):
    """w2 [E, K, N] as ((8, K/8), features, E): features (128, N/128), or plain where 128 does
    not divide N: a box past the end is filled with zeros."""
    k, n, e = spec.hidden, spec.intermediate, spec.num_experts
    features, strides = ((BLOCK, n // BLOCK), (1, BLOCK)) if spec.whole_blocks else (n, 1)
    layout = cute.make_layout(((8, k // 8), features, e), stride=((n, 8 * n), strides, k * n))
    return cute.make_tensor(w.iterator, layout)


def down_box(spec: MoeSpec):
    """TMA tile of the down weights of one expert: the columns of a block by a step, or by 128."""
    rows = (ATOM_ROWS, spec.column_atoms)
    return (rows, (BLOCK, spec.step_blocks), 1) if spec.whole_blocks else (rows, BLOCK, 1)


def down_tile(expert, block, step, box, spec: MoeSpec):
    """Which tile of the down weights a box of a step is: (columns, features, expert)."""
    features = (0, step) if spec.whole_blocks else step * spec.step_blocks + box
    return (0, block), features, expert


def down_box_layout(spec: MoeSpec):
    """Where a down box lands: (columns, features, 1 expert), dense."""
    blocks = spec.step_blocks if spec.whole_blocks else 1
    return cute.tile_to_shape(swizzle_atom(), (spec.columns, BLOCK * blocks, 1), (1, 0, 2))


@cute.jit
def first_expert(found, shared: Shared, spec: cutlass.Constexpr):
    """Expert of this CTA's first unit, from token 0 alone where possible: (expert, has one)."""
    cta, _, _ = cute.arch.block_idx()
    rank = Int32(spec.first_unit(cta) // spec.units_per_expert)
    expert, has = early_expert(found, rank, spec)
    if not has:
        cute.arch.mbarrier_wait(shared.lists, 0)
        has = Boolean(rank < shared.meta[ACTIVE])
        if has:
            expert = shared.experts[rank]
    return expert, has


def unit_scale_row(own, half, spec: MoeSpec):
    """Bytes from `up_scale` to the gate (half 0) or up scales of this CTA's own-th unit."""
    row_bytes = -(-spec.unit_scale_bytes // 16) * 16
    return (own % spec.unit_scale_slots * 2 + half) * row_bytes


@cute.jit
def copy_unit_scales(weights: Weights, own: Int32, unit: Int32, expert: Int32, step, shared, spec):
    """The scales of a unit's gate and up rows, by bulk copies on the barrier of `step`."""
    dtype = weights.scales_up.element_type
    atom = cute.make_copy_atom(
        cpasync.CopyBulkG2SOp(), dtype, num_bits_per_copy=8 * spec.unit_scale_bytes
    )
    row = cute.make_layout(spec.unit_scales)
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(2):
            source = scale_source(unit, expert, half, spec)
            target = cute.recast_ptr(shared.up_scale + unit_scale_row(own, half, spec), dtype=dtype)
            cute.copy(
                atom,
                cute.make_tensor((weights.scales_up.iterator + source).align(16), row),
                cute.make_tensor(target.align(16), row),
                mbar_ptr=full_barrier(shared.weights, step),
            )


@cute.jit
def store_unit_scales(weights: Weights, own: Int32, unit: Int32, expert: Int32, shared, spec):
    """The same by plain loads, where a row of scales is no multiple of 16 bytes.

    Before the arrival that announces the unit's first stage, which publishes the stores.
    """
    dtype = weights.scales_up.element_type
    for half in cutlass.range_constexpr(2):
        source = weights.scales_up.iterator + scale_source(unit, expert, half, spec)
        target = cute.recast_ptr(shared.up_scale + unit_scale_row(own, half, spec), dtype=dtype)
        for i in cutlass.range(cute.arch.lane_idx(), spec.unit_scales, WARP, unroll=1):
            value = cute.make_tensor(source + i, cute.make_layout(1))[0]
            cute.make_tensor(target + i, cute.make_layout(1))[0] = value
    cute.arch.sync_warp()


def scale_source(unit, expert, half, spec: MoeSpec):
    """Element of the up scales at which the row of a unit's gate or up rows starts."""
    feature = unit % spec.units_per_expert * spec.unit_features
    blocks = spec.intermediate // spec.scale_block
    return ((expert * 2 + half) * blocks + feature // spec.scale_block) * spec.unit_scales


def up_stages(shared: Shared, spec: MoeSpec) -> cute.Tensor:
    """The ring as targets of up boxes: (rows, features of a stage, stages)."""
    box = up_box_layout(spec).outer
    layout = cute.append(box, cute.make_layout(spec.stages, stride=STAGE_BYTES))
    return cute.make_tensor(_swizzled(shared.ring), layout)


def down_targets(shared: Shared, spec: MoeSpec) -> cute.Tensor:
    """The ring as targets of down boxes: (columns, features, 1, box, expert, stages)."""
    box = down_box_layout(spec).outer
    boxes = 1 if spec.whole_blocks else spec.step_blocks
    block_stride = down_strides(spec)[1]
    rest = cute.make_layout(
        (boxes, spec.group, spec.stages), stride=(block_stride, cute.cosize(box), STAGE_BYTES)
    )
    layout = cute.make_layout((*box.shape, *rest.shape), stride=(*box.stride, *rest.stride))
    return cute.make_tensor(_swizzled(shared.ring), layout)


def _swizzled(ptr: cute.Pointer) -> cute.Pointer:
    return cute.recast_ptr(ptr, swizzle_atom().inner, ptr.dtype)


@cute.jit
def copy_unit_stage(
    weights: Weights, src, dst, own: Int32, unit: Int32, expert: Int32, s: Int32, step: Int32,
    shared: Shared, spec: cutlass.Constexpr,
):  # fmt: skip
    """Stage s of this CTA's own-th unit, as ring step `step`; with the first one its scales."""
    bulk_scales = cutlass.const_expr(spec.unit_scale_bytes % 16 == 0)
    num_bytes = Int32(spec.up_stage_bytes)
    if s == 0:
        if cutlass.const_expr(bulk_scales):
            num_bytes = Int32(spec.up_stage_bytes + 2 * spec.unit_scale_bytes)
        else:
            wait_empty(shared.weights, step)
            store_unit_scales(weights, own, unit, expert, shared, spec)
    acquire_for_copy(shared.weights, step, num_bytes)
    cute.copy(
        weights.up_atom,
        src[(None, *up_tile(expert, unit, s, spec))],
        dst[None, stage_of(shared.weights, step)],
        tma_bar_ptr=full_barrier(shared.weights, step),
        cache_policy=Int64(EVICT_FIRST),
    )
    if cutlass.const_expr(bulk_scales):
        if s == 0:
            copy_unit_scales(weights, own, unit, expert, step, shared, spec)


@cute.jit
def stream_up(weights: Weights, found, shared: Shared, spec: cutlass.Constexpr):
    """Issue every up unit of this CTA; returns the number of ring steps taken.

    The first unit alone, since its expert may be known before the lists; then units in pairs, a
    stage of one and a stage of the other in turn, so that both warpgroups work at a time; what is
    left over alone. found: of token 0, what `early_expert` takes.
    """
    cta, _, _ = cute.arch.block_idx()
    tiles = cute.local_tile(weights.up, up_box(spec), (None, None))
    stages = up_stages(shared, spec)
    dst, src = cpasync.tma_partition(
        weights.up_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(stages, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    expert, has = first_expert(found, shared, spec)
    stamp(shared.trace, "first_copy", spec)
    unit = Int32(spec.first_unit(cta))
    step = Int32(0)
    if has:
        for s in cutlass.range(spec.unit_stages, unroll=1):
            copy_unit_stage(weights, src, dst, Int32(0), unit, expert, s, step, shared, spec)
            step = step + 1
    cute.arch.mbarrier_wait(shared.lists, 0)
    units = shared.meta[ACTIVE] * spec.units_per_expert
    own = Int32(1)
    for first in cutlass.range(unit + spec.grid, units, 2 * spec.grid, unroll=1):
        count = paired_units(first, units, spec)
        for s in cutlass.range(spec.unit_stages, unroll=1):
            for i in cutlass.range(count, unroll=1):
                each = first + i * spec.grid
                expert = shared.experts[each // spec.units_per_expert]
                copy_unit_stage(weights, src, dst, own + i, each, expert, s, step, shared, spec)
                step = step + 1
        own = own + 2
    return step


@cute.jit
def paired_units(first: Int32, units: Int32, spec: cutlass.Constexpr) -> Int32:
    """How many units are streamed together, `first` being the second, fourth, ... of a CTA."""
    count = Int32(1)
    if first + spec.grid < units:
        count = Int32(2)
    return count


@cute.jit
def copy_step(
    weights: Weights, src, dst, first: Int32, left: Int32, block: Int32, number: Int32, step,
    shared: Shared, spec: cutlass.Constexpr,
):  # fmt: skip
    """Step `number` of the `left` experts from `first` on, of one column block, as ring step."""
    acquire_for_copy(shared.weights, step, left * spec.down_box_bytes)
    if cutlass.const_expr(spec.step_stages == 2):
        acquire_for_copy(shared.weights, step + 1, 0)  # its bytes are announced with the first's
    stage = stage_of(shared.weights, step)
    boxes = cutlass.const_expr(1 if spec.whole_blocks else spec.step_blocks)
    for i in cutlass.range(left, unroll=1):
        expert = shared.experts[first + i]
        for box in cutlass.range_constexpr(boxes):
            cute.copy(
                weights.down_atom,
                src[(None, *down_tile(expert, block, number, box, spec))],
                dst[None, box, i, stage],
                tma_bar_ptr=full_barrier(shared.weights, step),
                cache_policy=Int64(EVICT_FIRST),
            )


@cute.jit
def stream_down(weights: Weights, step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Issue this CTA's column blocks of every active expert; the step after them.

    Group by group, slice by slice, column block by column block.
    """
    cta, _, _ = cute.arch.block_idx()
    tiles = cute.local_tile(weights.down, down_box(spec), (None, None, None))
    dst, src = cpasync.tma_partition(
        weights.down_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(down_targets(shared, spec), 0, 3),
        cute.group_modes(tiles, 0, 3),
    )
    active = shared.meta[ACTIVE]
    for first in cutlass.range(0, active, spec.group, unroll=1):
        left = cutlass.min(active - first, spec.group)
        for slice_ in cutlass.range(spec.slices, unroll=1):
            for block in cutlass.range(cta, spec.column_blocks, spec.grid, unroll=1):
                for s in cutlass.range(spec.slice_steps, unroll=1):
                    number = slice_ * spec.slice_steps + s
                    copy_step(weights, src, dst, first, left, block, number, step, shared, spec)
                    step = step + spec.step_stages
    return step


@cute.jit
def few_rows(shared: Shared, spec: cutlass.Constexpr):
    """Whether h is so little that its loaders wait for the weights first.

    All down weights of the CTA must then fit the ring, since they land without any h; and there
    must be some, or nobody would ever say that they have landed.
    """
    cta, _, _ = cute.arch.block_idx()
    groups = (shared.meta[ACTIVE] + spec.group - 1) // spec.group
    own = (spec.column_blocks - cta + spec.grid - 1) // spec.grid
    fits = groups * own * spec.steps * spec.step_stages <= spec.stages
    items = shared.meta[ROWS] * spec.slices
    return fits & (items > 0) & (items <= FEW_ROWS)


@cute.jit
def produce(weights: Weights, found, shared: Shared, spec: cutlass.Constexpr):
    """The producer warp's whole life; found: of token 0, what `early_expert` takes."""
    step = stream_up(weights, found, shared, spec)
    stamp(shared.trace, "up_issued", spec)
    arrive_warp(shared.gate)
    cute.arch.mbarrier_wait(shared.lists, 0)
    step = stream_down(weights, step, shared, spec)
    stamp(shared.trace, "down_issued", spec)
    first = cutlass.max(step - spec.stages, 0)
    enough = step - 1
    if few_rows(shared, spec):
        enough = cutlass.max(enough - EARLY_STAGES, first)
    for s in cutlass.range(first, step, unroll=1):
        wait_full(shared.weights, s)
        if s == enough:
            arrive_warp(shared.landed)
    stamp(shared.trace, "landed", spec)
