"""Phase 4: down-projection of stacked experts; two consumer warpgroups take groups in turn.

A WGMMA's 64 rows are 16 output columns of four experts and its 8 columns are (token, slot) pairs
of those experts; warp w of the warpgroup keeps the pairs of expert w, the diagonal blocks. The
weights come from registers where h is awaited last or several chunks share them, else from the
ring.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu.warpgroup import OperandSource

from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import Shared, arrive_warp
from cute_moe.kernels.moe.spec import DOWN_COLS, GROUP, MAX_CHUNKS, PAIRS, STAGE_BYTES
from cute_moe.kernels.moe.up import accumulators, block_sum, issue, skip_stages, tiled_mma

REGISTER_GROUPS = 2  # with so many groups at most, all weights wait in registers for h


@cute.jit
def load_weights(stage: Int32, tid: Int32, a: cute.Tensor, shared: Shared):
    """Read a group's weights, the two stages from `stage` on, to the registers of a warpgroup.

    a: fragment ((4, 2, 2), 1, N / 32) e4m3. The stages hold [expert][2][N/128][8 columns][128].
    """
    words = cute.recast_tensor(a, Int32)
    lane = tid & 31
    column = lane & 7
    first = shared.ring + stage * STAGE_BYTES + (tid >> 5) * (STAGE_BYTES // 2)
    first = first + ((lane >> 3) & 1) * (STAGE_BYTES // 4) + column * 128
    for k in cutlass.range_constexpr(cute.size(words) // 4):
        chunk16 = 2 * (k % 4) + (lane >> 4)
        source = first + k // 4 * 1024 + ((chunk16 ^ column) << 4)
        w = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[source.toint()],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * k + i] = w[i]


@cute.jit
def wait_for_weights(group: Int32, step: Int32, tid: Int32, shared: Shared, spec):
    """Wait until the two stages of a group, from `step` on, have landed."""
    for i in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(shared.full + step % spec.stages + i, (step // spec.stages) & 1)
    if (group == 0) & (tid < 32):
        stamp(shared.trace, "down_start", spec)


@cute.jit
def release_weights(step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Free the two stages of a group."""
    for i in cutlass.range_constexpr(2):
        arrive_warp(shared.empty + step % spec.stages + i)


@cute.jit
def down_chunk(
    chunk: Int32, tid: Int32, own: Int32, group: Int32, operands, step, shared: Shared, spec
):
    """One chunk of eight pairs against one group; partial sums of its pairs to shared memory.

    step: ring step of the group's weights, waited for after h; None if they are in registers.
    """
    mma, a, b, accs = operands
    blocks = cutlass.const_expr(spec.h_blocks)
    warp = tid >> 5
    lane = tid & 31
    column = 2 * (lane & 3)
    # What depends on neither h nor weights comes first: the last chunk's products end the launch.
    entries = [shared.chunk_rows[chunk * 8 + column + i] for i in range(2)]
    scale_base = (own * PAIRS + GROUP * group + warp) * blocks
    weight_scale = [shared.down_scale[scale_base + block] for block in range(blocks)]
    cute.arch.mbarrier_wait(shared.h_ready + chunk, 0)
    if (chunk == 0) & (tid < 32):
        stamp(shared.trace, "h_go", spec)
    if cutlass.const_expr(step is not None):
        wait_for_weights(group, step, tid, shared, spec)
    total = cute.make_rmem_tensor(4, Float32)
    total.fill(0.0)
    # Two terms need twice the accumulators, hence half of the blocks at a time.
    each = cutlass.const_expr(len(accs) // 4)
    for first in cutlass.range_constexpr(0, blocks, each):
        issue(mma, accs, a, 4 * first, b[None, None, None, chunk % spec.h_slots], Int32(4 * first))
        scale = cute.make_rmem_tensor((2, each), Float32)
        for block in cutlass.range_constexpr(each):
            for i in cutlass.range_constexpr(2):
                h_scale = shared.h_scale[(chunk * blocks + first + block) * 8 + column + i]
                scale[i, block] = weight_scale[first + block] * h_scale
        for block in cutlass.range_constexpr(each):
            cute.nvgpu.warpgroup.wait_group(each - 1 - block)
            for i in cutlass.range_constexpr(4):
                total[i] = total[i] + block_sum(accs, block, i) * scale[i & 1, block]
    if (chunk == 0) & (tid < 32):
        stamp(shared.trace, "first_product", spec)
    for i in cutlass.range_constexpr(2):
        if (entries[i] >> 8) == warp:
            base = (own * PAIRS + (entries[i] & 0xFF)) * DOWN_COLS + (lane >> 2)
            shared.partial[base] = total[i]
            shared.partial[base + 8] = total[2 + i]


@cute.jit
def make_operands(tid: Int32, source: cutlass.Constexpr, shared: Shared, spec: cutlass.Constexpr):
    """(mma, h as B, accumulators) of a warpgroup; source: where the weights, A, are read."""
    mma = tiled_mma(spec, source)
    b = mma.make_fragment_B(mma.get_slice(tid).partition_B(shared.h))
    return mma, b, accumulators(mma, spec.h_blocks // spec.terms, spec)


@cute.jit
def down_group_from_registers(
    group: Int32, columns: Int32, step: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """All chunks of one group of four experts, for each own column block; the step after it.

    The weights wait in registers for h: their stages are free at once, several chunks share the
    reading, and where h comes last the products need not read them from shared memory.
    """
    mma, b, accs = make_operands(tid, OperandSource.RMEM, shared, spec)
    a = mma.make_fragment_A(mma.partition_shape_A((GROUP * DOWN_COLS, spec.intermediate)))
    first = shared.chunk_base[GROUP * group]
    last = shared.chunk_base[GROUP * group + GROUP]
    for own in cutlass.range(columns, unroll=1):
        wait_for_weights(group, step, tid, shared, spec)
        load_weights(cute.arch.make_warp_uniform(step % spec.stages), tid, a, shared)
        cute.arch.fence_view_async_shared()  # Plain reads, then the next copy into these stages.
        release_weights(step, shared, spec)
        for chunk in cutlass.range(first, last, unroll=1):
            uniform = cute.arch.make_warp_uniform(chunk)
            down_chunk(uniform, tid, own, group, (mma, a, b, accs), None, shared, spec)
        step = step + 2
    if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
        for chunk in cutlass.range(first, last, unroll=1):
            arrive_warp(shared.h_free + chunk % spec.h_slots)
    return step


@cute.jit
def down_group_from_ring(
    group: Int32, columns: Int32, step: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """The only chunk of one group, for each own column block; the step after it.

    WGMMA reads the weights from the ring: where they come last, the way through registers is one
    more pass through shared memory between them and the products.
    """
    mma, b, accs = make_operands(tid, OperandSource.SMEM, shared, spec)
    a = mma.make_fragment_A(mma.get_slice(tid).partition_A(shared.down_group))
    chunk = cute.arch.make_warp_uniform(shared.chunk_base[GROUP * group])
    for own in cutlass.range(columns, unroll=1):
        stage = cute.arch.make_warp_uniform(step % spec.stages)
        weights = a[None, None, None, stage // 2]
        down_chunk(chunk, tid, own, group, (mma, weights, b, accs), step, shared, spec)
        release_weights(step, shared, spec)
        step = step + 2
    if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
        arrive_warp(shared.h_free + chunk % spec.h_slots)
    return step


@cute.jit
def down_phase(
    columns: Int32, step: Int32, tid: Int32, half: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """This CTA's column blocks over all groups."""
    groups = (shared.meta[0] + GROUP - 1) // GROUP
    # Nobody waits for the stages of the last group to be free, if they all fit the ring.
    refilled = cutlass.const_expr(2 * spec.max_own_columns > spec.stages)
    for group in cutlass.range(groups, unroll=1):
        if (group & 1) == half:
            base = shared.chunk_base[GROUP * group]
            if (groups > REGISTER_GROUPS) & (base + 1 == shared.chunk_base[GROUP * group + GROUP]):
                step = down_group_from_ring(group, columns, step, tid, shared, spec)
            else:
                step = down_group_from_registers(group, columns, step, tid, shared, spec)
        elif refilled | (group + 1 < groups):
            for _ in cutlass.range(columns, unroll=1):
                step = skip_stages(2, step, shared, spec)
