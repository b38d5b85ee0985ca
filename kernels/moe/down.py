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
from cute_moe.kernels.moe.spec import DOWN_COLS, PAIRS
from cute_moe.kernels.moe.up import accumulators, block_sum, issue, skip_stages, tiled_mma


@cute.jit
def down_chunk(
    chunk: Int32, tid: Int32, scale_base: Int32, operands, shared: Shared, spec: cutlass.Constexpr
):
    """One chunk of eight pairs against one group; partial sums of its pairs to shared memory."""
    mma, a, b, accs = operands
    blocks = cutlass.const_expr(len(accs) // 4)
    warp = tid >> 5
    lane = tid & 31
    column = 2 * (lane & 3)
    # What does not depend on h comes first: the last chunk's products end the launch.
    entries = [shared.chunk_rows[chunk * 8 + column + i] for i in range(2)]
    weight_scale = [shared.down_scale[scale_base + block] for block in range(blocks)]
    cute.arch.mbarrier_wait(shared.h_ready + chunk, 0)
    if (chunk == 0) & (tid < 32):
        stamp(shared.trace, "h_go", spec)
    issue(mma, accs, a, b[None, None, None, chunk], Int32(0))
    scale = cute.make_rmem_tensor((2, blocks), Float32)
    for block in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(2):
            h_scale = shared.h_scale[(chunk * blocks + block) * 8 + column + i]
            scale[i, block] = weight_scale[block] * h_scale
    cute.nvgpu.warpgroup.wait_group(0)
    if (chunk == 0) & (tid < 32):
        stamp(shared.trace, "first_product", spec)
    total = cute.make_rmem_tensor(4, Float32)
    total.fill(0.0)
    for block in cutlass.range_constexpr(blocks):
        for i in cutlass.range_constexpr(4):
            total[i] = total[i] + block_sum(accs, block, i) * scale[i & 1, block]
    for i in cutlass.range_constexpr(2):
        if (entries[i] >> 8) == warp:
            base = (entries[i] & 0xFF) * DOWN_COLS + (lane >> 2)
            shared.partial[base] = total[i]
            shared.partial[base + 8] = total[2 + i]


@cute.jit
def down_group(
    group: Int32, own: Int32, step: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """All chunks of one group of four experts; returns the ring step after it."""
    mma = tiled_mma()
    thread = mma.get_slice(tid)
    a = mma.make_fragment_A(thread.partition_A(shared.down_group))
    b = mma.make_fragment_B(thread.partition_B(shared.h))
    accs = accumulators(mma, spec.h_blocks)
    stage = cute.arch.make_warp_uniform(step % spec.stages)
    for i in cutlass.range_constexpr(2):
        cute.arch.mbarrier_wait(shared.full + stage + i, (step // spec.stages) & 1)
    if (group == 0) & (tid < 32):
        stamp(shared.trace, "down_start", spec)
    scale_base = (own * PAIRS + 4 * group + (tid >> 5)) * spec.h_blocks
    operands = (mma, a[None, None, None, stage // 2], b, accs)
    first = shared.chunk_base[4 * group]
    last = shared.chunk_base[4 * group + 4]
    for chunk in cutlass.range(first, last, unroll=1):
        down_chunk(cute.arch.make_warp_uniform(chunk), tid, scale_base, operands, shared, spec)
    for i in cutlass.range_constexpr(2):
        arrive_warp(shared.empty + stage + i)
    return step + 2


@cute.jit
def down_column(
    own: Int32, step: Int32, tid: Int32, half: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """One column block over all groups; returns the ring step after it."""
    for group in cutlass.range((shared.meta[0] + 3) // 4, unroll=1):
        if (group & 1) == half:
            step = down_group(group, own, step, tid, shared, spec)
        else:
            step = skip_stages(2, step, shared, spec)
    return step
