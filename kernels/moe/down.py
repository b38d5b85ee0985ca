"""Phase 4: down-projection of stacked experts; two consumer warpgroups take groups in turn.

A WGMMA's 64 rows are 16 output columns of four experts and its 8 columns are (token, slot) pairs
of those experts; warp w of the warpgroup keeps the pairs of expert w, the diagonal blocks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import Shared, arrive_warp
from cute_moe.kernels.moe.spec import DOWN_COLS, MAX_CHUNKS, PAIRS
from cute_moe.kernels.moe.up import accumulators, block_sum, issue, skip_stages, tiled_mma


@cute.jit
def down_chunk(chunk: Int32, tid: Int32, own: Int32, group: Int32, operands, shared: Shared, spec):
    """One chunk of eight pairs against one group; partial sums of its pairs to shared memory."""
    mma, a, b, accs = operands
    blocks = cutlass.const_expr(spec.h_blocks)
    warp = tid >> 5
    lane = tid & 31
    column = 2 * (lane & 3)
    # What does not depend on h comes first: the last chunk's products end the launch.
    entries = [shared.chunk_rows[chunk * 8 + column + i] for i in range(2)]
    scale_base = (own * PAIRS + 4 * group + warp) * blocks
    weight_scale = [shared.down_scale[scale_base + block] for block in range(blocks)]
    cute.arch.mbarrier_wait(shared.h_ready + chunk, 0)
    if (chunk == 0) & (tid < 32):
        stamp(shared.trace, "h_go", spec)
    total = cute.make_rmem_tensor(4, Float32)
    total.fill(0.0)
    # Two terms need twice the accumulators, hence half of the blocks at a time.
    each = cutlass.const_expr(blocks // spec.terms)
    for first in cutlass.range_constexpr(0, blocks, each):
        issue(mma, accs, a, 4 * first, b[None, None, None, chunk % spec.h_slots], Int32(4 * first))
        scale = cute.make_rmem_tensor((2, each), Float32)
        for block in cutlass.range_constexpr(each):
            for i in cutlass.range_constexpr(2):
                h_scale = shared.h_scale[(chunk * blocks + first + block) * 8 + column + i]
                scale[i, block] = weight_scale[first + block] * h_scale
        cute.nvgpu.warpgroup.wait_group(0)
        for block in cutlass.range_constexpr(each):
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
def down_group(
    group: Int32, columns: Int32, step: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """All chunks of one group of four experts, for each own column block; the step after it."""
    mma = tiled_mma(spec)
    thread = mma.get_slice(tid)
    a = mma.make_fragment_A(thread.partition_A(shared.down_group))
    b = mma.make_fragment_B(thread.partition_B(shared.h))
    accs = accumulators(mma, spec.h_blocks // spec.terms, spec)
    first = shared.chunk_base[4 * group]
    last = shared.chunk_base[4 * group + 4]
    for own in cutlass.range(columns, unroll=1):
        stage = cute.arch.make_warp_uniform(step % spec.stages)
        for i in cutlass.range_constexpr(2):
            cute.arch.mbarrier_wait(shared.full + stage + i, (step // spec.stages) & 1)
        if (group == 0) & (tid < 32):
            stamp(shared.trace, "down_start", spec)
        operands = (mma, a[None, None, None, stage // 2], b, accs)
        for chunk in cutlass.range(first, last, unroll=1):
            uniform = cute.arch.make_warp_uniform(chunk)
            down_chunk(uniform, tid, own, group, operands, shared, spec)
        for i in cutlass.range_constexpr(2):
            arrive_warp(shared.empty + stage + i)
        step = step + 2
    if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
        for chunk in cutlass.range(first, last, unroll=1):
            arrive_warp(shared.h_free + chunk % spec.h_slots)
    return step


@cute.jit
def down_phase(
    columns: Int32, step: Int32, tid: Int32, half: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """This CTA's column blocks over all groups."""
    for group in cutlass.range((shared.meta[0] + 3) // 4, unroll=1):
        if (group & 1) == half:
            step = down_group(group, columns, step, tid, shared, spec)
        else:
            for _ in cutlass.range(columns, unroll=1):
                step = skip_stages(2, step, shared, spec)
