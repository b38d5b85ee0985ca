"""Phase 4: down-projection of stacked experts; two consumer warpgroups take groups in turn.

A WGMMA's 64 rows are the output columns of a group's experts and its 8 columns are pairs of those
experts. A thread keeps, of each of its two rows, the pairs of that row's expert. The weights come
from registers where h is awaited last or several chunks share them, else from the ring.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu.warpgroup import OperandSource

from cute_moe.kernels.device.ring import release_by_warps, stage_of, wait_full
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.lists import scale_slot
from cute_moe.kernels.moe.memory import (
    ACTIVE,
    CONSUMER_WARPS,
    COUNT_SHIFT,
    EXPERT_SHIFT,
    FIRST_MASK,
    PAIR_MASK,
    WARP,
    Shared,
    down_strides,
)
from cute_moe.kernels.moe.product import (
    ACCUMULATED,
    VALUES,
    Chain,
    Segment,
    accumulators,
    add_products,
    tiled_mma,
)
from cute_moe.kernels.moe.spec import (
    ATOM_ROWS,
    BLOCK,
    CHUNK_ROWS,
    MMA_ROWS,
    STAGE_BYTES,
    MoeSpec,
)
from cute_moe.kernels.moe.up import skip_stages

REGISTER_GROUPS = 2  # with so many groups at most, all weights wait in registers for h


class Group(NamedTuple):
    """What the products of one group share, in one thread."""

    number: Int32
    tid: Int32  # in the warpgroup
    first_chunk: Int32
    chunks: Int32
    first_step: Int32  # of the ring
    columns: Int32  # column blocks of this CTA


@cute.jit
def load_weights(stage: Int32, tid: Int32, a: cute.Tensor, first: cutlass.Constexpr, shared, spec):
    """Read a step's weights from its stage to the registers of a warpgroup.

    a: fragment ((4, 2, 2), 1, K / 32) e4m3 of all steps of a group; first: K / 32 of this one.
    """
    words = cute.recast_tensor(a, Int32)
    lane = tid & 31
    column = lane & 7
    atom_stride, block_stride = down_strides(spec)
    source = shared.ring + stage * STAGE_BYTES
    source = source + (2 * (tid >> 5) + ((lane >> 3) & 1)) * atom_stride + column * BLOCK
    for k in cutlass.range_constexpr(4 * spec.step_blocks):
        chunk16 = 2 * (k % 4) + (lane >> 4)
        address = source + k // 4 * block_stride + ((chunk16 ^ column) << 4)
        w = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address.toint()],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * (first + k) + i] = w[i]


@cute.jit
def row_scales(own: Int32, slice_: Int32, group: Group, shared: Shared, spec):
    """Weight scales of a slice for the thread's two rows: [row][scale], Float32 each."""
    cta, _, _ = cute.arch.block_idx()
    first_column = (cta + own * spec.grid) * spec.columns
    base = scale_slot(group.number, spec)
    found = []
    for r in cutlass.range_constexpr(2):
        expert, column = row_place(group.tid, r, spec)
        row = Int32(0)
        if cutlass.const_expr(spec.down_scale_rows > 1):
            size = cutlass.const_expr(spec.scale_block_hidden)
            row = (first_column + column) // size - first_column // size
        at = (own * spec.group + expert) * spec.down_scale_rows + row
        at = base + at * spec.row_down_scales + slice_ * spec.slice_h_scales
        found.append([shared.down_scale[at + i] for i in range(spec.slice_h_scales)])
    return found


def row_place(tid, r: int, spec):
    """Of row r (0, 1) of a thread: (expert in the group, first column of its atom).

    Rows of no expert count as those of the last one: their products are dropped.
    """
    atom = 2 * (tid >> 5) + r
    expert = cutlass.min(atom // spec.column_atoms, spec.group - 1)
    return expert, (atom - expert * spec.column_atoms) * ATOM_ROWS


def slice_factors(scales, slot: Int32, block: int, column: Int32, shared: Shared, spec: MoeSpec):
    """What `add_products` takes for a block of 128 features of h: of two columns, two pairs."""
    per_block = BLOCK // spec.h_block
    factors = []
    for at in range(block * per_block, (block + 1) * per_block):
        where = (slot * spec.slice_h_scales + at) * CHUNK_ROWS + column
        h_scale = [shared.h_scale[where + i] for i in range(2)]
        factors.append([scales[r][at] * h for r in range(2) for h in h_scale])
    return factors


@cute.jit
def slice_chain(
    chunk: Int32, own: Int32, slice_: Int32, slot: Int32, total, scales, source, group: Group,
    shared: Shared, spec: cutlass.Constexpr,
):  # fmt: skip
    """One chunk's slice times the steps of one column block, to be added to `total`.

    source: (mma, a, b, accs, in_registers). From the ring, the last chunk frees the stages.
    """
    _, a, b, _, in_registers = source
    column = 2 * (group.tid & 3)
    h = b[None, None, None, slot]
    segments = []
    if cutlass.const_expr(in_registers):
        segments.append(Segment(a, 0, h, 0, spec.slice_blocks, lambda: None, lambda: None))
    else:
        last = chunk + 1 == group.chunks
        for s in cutlass.range_constexpr(spec.slice_steps):
            number = (slice_ * group.columns + own) * spec.slice_steps + s
            step = group.first_step + number * spec.step_stages
            stage = cute.arch.make_warp_uniform(stage_of(shared.weights, step))
            segments.append(
                Segment(
                    a[None, None, None, stage],
                    0,
                    h,
                    4 * spec.step_blocks * s,
                    spec.step_blocks,
                    lambda step=step: wait_step(step, shared, spec),
                    lambda step=step: release_if(last, step, shared, spec),
                )
            )
    if (group.number == 0) & (group.tid < WARP):
        stamp(shared.trace, "down_start", spec)
    return Chain(
        total,
        segments,
        lambda block: slice_factors(scales, slot, block, column, shared, spec),
    )


@cute.jit
def add_slice(
    chunk: Int32, own: Int32, slice_: Int32, slot: Int32, total, scales, source, group: Group,
    shared: Shared, spec: cutlass.Constexpr,
):  # fmt: skip
    """Products of one chunk's slice with the steps of one column block, added to `total`."""
    mma, _, _, accs, _ = source
    chain = slice_chain(chunk, own, slice_, slot, total, scales, source, group, shared, spec)
    add_products(mma, accs, [chain])


def wait_step(step: Int32, shared: Shared, spec: MoeSpec):
    """Wait until the stages of a step, from ring step `step` on, have landed."""
    for i in range(spec.step_stages):
        wait_full(shared.weights, step + i)


def release_step(step: Int32, shared: Shared, spec: MoeSpec):
    """Free the stages of a step."""
    for i in range(spec.step_stages):
        release_by_warps(shared.weights, step + i, CONSUMER_WARPS)


@cute.jit
def release_if(last, step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Free the stages of a step behind its last chunk."""
    if last:
        release_step(step, shared, spec)


@cute.jit
def partial_places(chunk: Int32, own: Int32, group: Group, shared: Shared, spec) -> list[Int32]:
    """Where the thread's four sums of a chunk belong in `partial`: [row][column]; -1: nowhere.

    Only the pairs that meet their own expert count.
    """
    lane = group.tid & 31
    entry = group.first_chunk + chunk
    places = []
    for r in cutlass.range_constexpr(2):
        expert, column = row_place(group.tid, r, spec)
        for i in cutlass.range_constexpr(2):
            fields = shared.chunk_rows[entry * CHUNK_ROWS + 2 * (lane & 3) + i]
            place = (own * spec.pairs + (fields & PAIR_MASK)) * spec.columns
            place = place + column + (lane >> 2)
            if ((fields >> EXPERT_SHIFT) != expert) | (column >= spec.columns):
                place = Int32(-1)
            places.append(place)
    return places


@cute.jit
def start_total(places, slice_: Int32, shared: Shared, spec: cutlass.Constexpr) -> cute.Tensor:
    """The sums of the slices so far, so that their bits do not depend on the cut into slices."""
    total = cute.make_rmem_tensor(VALUES, Float32)
    total.fill(0.0)
    if cutlass.const_expr(spec.slices > 1):
        for i in cutlass.range_constexpr(VALUES):
            if (slice_ > 0) & (places[i] >= 0):
                total[i] = shared.partial[places[i]]
    return total


@cute.jit
def store_total(total: cute.Tensor, places, shared: Shared):
    """Keep the sums of a chunk."""
    for i in cutlass.range_constexpr(VALUES):
        if places[i] >= 0:
            shared.partial[places[i]] = total[i]


@cute.jit
def make_source(
    tid: Int32, where: cutlass.Constexpr, shared: Shared, spec: cutlass.Constexpr,
    blocks: cutlass.Constexpr = 0,
):  # fmt: skip
    """(mma, weights, h as B, accumulators, in registers) of a warpgroup."""
    mma = tiled_mma(spec, where)
    thread = mma.get_slice(tid)
    b = mma.make_fragment_B(thread.partition_B(shared.h))
    in_registers = cutlass.const_expr(where == OperandSource.RMEM)
    if cutlass.const_expr(in_registers):
        features = cutlass.const_expr(spec.steps * spec.step_blocks * BLOCK)
        a = mma.make_fragment_A(mma.partition_shape_A((MMA_ROWS, features)))
    else:
        a = mma.make_fragment_A(thread.partition_A(shared.down))
    most = cutlass.const_expr(max(blocks * spec.terms, ACCUMULATED))
    accs = accumulators(mma, blocks or spec.slice_blocks, spec, most)
    return mma, a, b, accs, in_registers


@cute.jit
def release_slot(turn: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Free a slot of h, if any is ever used again."""
    if cutlass.const_expr(spec.slots_reused):
        release_by_warps(shared.h_slots, turn, CONSUMER_WARPS)


@cute.jit
def skip_slots(first: Int32, count: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Wait for and release slots that the other warpgroup reads, if any is ever used again."""
    if cutlass.const_expr(spec.slots_reused):
        for turn in cutlass.range(first, first + count, unroll=1):
            wait_full(shared.h_slots, turn)
            release_slot(turn, shared, spec)


@cute.jit
def skip_group(group: Group, stages_too, shared: Shared, spec: cutlass.Constexpr):
    """Wait for and release what the other warpgroup reads of its group; stages only if wanted.

    Slice by slice: the other one may wait, with the stages of a slice, for a slot that is free
    only when this one has released it, and the stages behind them do not come before that.
    """
    stages = spec.slice_steps * spec.step_stages * group.columns
    for slice_ in cutlass.range(spec.slices, unroll=1):
        if stages_too:
            skip_stages(stages, group.first_step + slice_ * stages, shared, spec)
        first = group.first_chunk * spec.slices + slice_ * group.chunks
        skip_slots(first, group.chunks, shared, spec)


@cute.jit
def down_group_from_ring(group: Group, shared: Shared, spec: cutlass.Constexpr):
    """All chunks of one group, slice by slice: each for every own column block."""
    source = make_source(group.tid, OperandSource.SMEM, shared, spec)
    first = group.first_chunk * spec.slices
    for slice_ in cutlass.range(spec.slices, unroll=1):
        for chunk in cutlass.range(group.chunks, unroll=1):
            turn = first + slice_ * group.chunks + chunk
            slot = cute.arch.make_warp_uniform(stage_of(shared.h_slots, turn))
            for own in cutlass.range(group.columns, unroll=1):
                # What depends on neither h nor weights comes first.
                scales = row_scales(own, slice_, group, shared, spec)
                places = partial_places(chunk, own, group, shared, spec)
                total = start_total(places, slice_, shared, spec)
                wait_full(shared.h_slots, turn)
                if (turn == 0) & (group.tid < WARP):
                    stamp(shared.trace, "h_go", spec)
                add_slice(chunk, own, slice_, slot, total, scales, source, group, shared, spec)
                if (turn == 0) & (group.tid < WARP):
                    stamp(shared.trace, "first_product", spec)
                store_total(total, places, shared)
            release_slot(turn, shared, spec)


@cute.jit
def down_two_groups_from_ring(one: Group, two: Group, shared: Shared, spec: cutlass.Constexpr):
    """The only chunks of two groups in a row: the products of both run before the first are added.

    Of one slice and one column block each.
    """
    none = Int32(0)
    source = make_source(one.tid, OperandSource.SMEM, shared, spec, 2 * spec.slice_blocks)
    mma, _, _, accs, _ = source
    chains = []
    kept = []
    for group in (one, two):
        scales = row_scales(none, none, group, shared, spec)
        places = partial_places(none, none, group, shared, spec)
        total = start_total(places, none, shared, spec)
        turn = group.first_chunk
        slot = cute.arch.make_warp_uniform(stage_of(shared.h_slots, turn))
        chain = slice_chain(none, none, none, slot, total, scales, source, group, shared, spec)
        ready = chain.segments[0].before
        chain.segments[0] = chain.segments[0]._replace(
            before=lambda turn=turn, ready=ready: (wait_full(shared.h_slots, turn), ready())
        )
        chains.append(chain)
        kept.append((total, places, turn))
    add_products(mma, accs, chains)
    for total, places, turn in kept:
        store_total(total, places, shared)
        release_slot(turn, shared, spec)


@cute.jit
def down_group_from_registers(group: Group, shared: Shared, spec: cutlass.Constexpr):
    """All chunks of one group, of one slice each, for every own column block.

    The weights wait in registers for h: their stages are free at once, several chunks share the
    reading, and where h comes last the products need not read them from shared memory.
    """
    source = make_source(group.tid, OperandSource.RMEM, shared, spec)
    _, a, _, _, _ = source
    for own in cutlass.range(group.columns, unroll=1):
        scales = row_scales(own, Int32(0), group, shared, spec)
        first_step = group.first_step + own * spec.steps * spec.step_stages
        for s in cutlass.range_constexpr(spec.steps):
            step = first_step + s * spec.step_stages
            wait_step(step, shared, spec)
            if (group.number == 0) & (group.tid < WARP) & (s == 0):
                stamp(shared.trace, "down_start", spec)
            stage = cute.arch.make_warp_uniform(stage_of(shared.weights, step))
            load_weights(stage, group.tid, a, 4 * spec.step_blocks * s, shared, spec)
        cute.arch.fence_view_async_shared()  # Plain reads, then the next copies to these stages.
        for s in cutlass.range_constexpr(spec.steps):
            release_step(first_step + s * spec.step_stages, shared, spec)
        for chunk in cutlass.range(group.chunks, unroll=1):
            turn = group.first_chunk + chunk
            slot = cute.arch.make_warp_uniform(stage_of(shared.h_slots, turn))
            places = partial_places(chunk, own, group, shared, spec)
            total = start_total(places, Int32(0), shared, spec)
            wait_full(shared.h_slots, turn)
            if (turn == 0) & (group.tid < WARP):
                stamp(shared.trace, "h_go", spec)
            add_slice(chunk, own, Int32(0), slot, total, scales, source, group, shared, spec)
            if (turn == 0) & (group.tid < WARP):
                stamp(shared.trace, "first_product", spec)
            store_total(total, places, shared)
    for chunk in cutlass.range(group.chunks, unroll=1):
        release_slot(group.first_chunk + chunk, shared, spec)


@cute.jit
def group_of(number: Int32, groups: Int32, step: Int32, columns: Int32, tid: Int32, shared, spec):
    """Group `number`, whose first step is ring step `step`; the last one if there is none."""
    chunks = shared.group_chunks[cutlass.min(number, groups - 1)]
    return Group(number, tid, chunks & FIRST_MASK, chunks >> COUNT_SHIFT, step, columns)


@cute.jit
def down_group(group: Group, groups: Int32, shared: Shared, spec: cutlass.Constexpr):
    """One group, its weights by way of registers or from the ring."""
    few = (group.chunks <= spec.h_slots) & ((groups <= REGISTER_GROUPS) | (group.chunks > 1))
    if cutlass.const_expr(spec.weights_in_registers and spec.slices == 1):
        if few:
            down_group_from_registers(group, shared, spec)
        else:
            down_group_from_ring(group, shared, spec)
    else:
        down_group_from_ring(group, shared, spec)


@cute.jit
def down_phase(
    columns: Int32, step: Int32, tid: Int32, half: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """This CTA's column blocks over all groups; the warpgroups take them in turn, in runs."""
    groups = (shared.meta[ACTIVE] + spec.group - 1) // spec.group
    # Nobody waits for the stages of the last group to be free, if they all fit the ring.
    ring_steps = cutlass.const_expr(spec.steps * spec.step_stages)  # of a group, a column block
    refilled = cutlass.const_expr(ring_steps * spec.max_own_blocks > spec.stages)
    run = cutlass.const_expr(spec.groups_at_once)
    for number in cutlass.range(0, groups, run, unroll=1):
        if number % spec.scale_batch == 0:
            wait_full(shared.scale_slots, number // spec.scale_batch)
        count = cutlass.min(groups - number, run)
        if (number // run & 1) == half:
            together = False
            if cutlass.const_expr(run == 2):
                one = group_of(number, groups, step, columns, tid, shared, spec)
                two = group_of(number + 1, groups, step + ring_steps, columns, tid, shared, spec)
                together = (count == 2) & (groups > REGISTER_GROUPS)
                together = together & (one.chunks == 1) & (two.chunks == 1)
                if together:
                    down_two_groups_from_ring(one, two, shared, spec)
            if not together:
                for i in cutlass.range(count, unroll=1):
                    first = step + i * ring_steps * columns
                    group = group_of(number + i, groups, first, columns, tid, shared, spec)
                    down_group(group, groups, shared, spec)
        else:
            for i in cutlass.range(count, unroll=1):
                first = step + i * ring_steps * columns
                group = group_of(number + i, groups, first, columns, tid, shared, spec)
                skip_group(group, refilled | (number + i + 1 < groups), shared, spec)
        step = step + count * ring_steps * columns
        if (number + run) % spec.scale_batch == 0:
            release_by_warps(shared.scale_slots, number // spec.scale_batch, CONSUMER_WARPS)
