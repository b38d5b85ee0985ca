"""Phase 3: up-projection, SiLU(gate) * up and the hand-over of h; two consumer warpgroups.

The warpgroups take units in turn; both wait for and release every ring stage, so that the
parities that they wait for never alias.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_moe.kernels.device.quant import RESIDUAL
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import Shared, arrive_warp, k_blocks_per_stage
from cute_moe.kernels.moe.spec import MoeSpec


def tiled_mma(spec: MoeSpec, weights=warpgroup.OperandSource.SMEM):
    """One warpgroup's FP8 WGMMA, weights as A (64 rows), activations as B (8 columns a term)."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (64, 8 * spec.terms, 32),
        weights,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(op, cute.make_layout((1, 1, 1)))


def accumulators(mma: cute.TiledMma, blocks: int, spec: MoeSpec) -> list[cute.Tensor]:
    """One accumulator for every WGMMA of `blocks` blocks of 128."""
    shape = mma.partition_shape_C((64, 8 * spec.terms))
    return [mma.make_fragment_C(shape) for _ in range(4 * blocks)]


@cute.jit
def issue(
    mma: cute.TiledMma, accs, a: cute.Tensor, a_first: cutlass.Constexpr, b: cute.Tensor, b_first
):
    """Start one WGMMA (K = 32) into each accumulator; a, b: (MMA, 1, K / 32).

    None accumulates onto another: the FP8 accumulator keeps fewer bits than fp32. Each block of 128
    is a group of its own for `wait_group`.
    """
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for k in cutlass.range_constexpr(len(accs)):
        a_k, b_k = a[None, None, a_first + k], b[None, None, b_first + k]
        cute.gemm(mma, accs[k], a_k, b_k, accs[k])
        if cutlass.const_expr(k % 4 == 3):
            warpgroup.commit_group()


@cute.jit
def block_sum(accs, block: cutlass.Constexpr, i: cutlass.Constexpr) -> Float32:
    """Element i (0..3) of the fp32 sum over the four WGMMAs and the terms of a block of 128."""
    a, b, c, d = accs[4 * block : 4 * block + 4]
    total = (a[i] + b[i]) + (c[i] + d[i])
    if cutlass.const_expr(cute.size(a) == 8):
        rest = (a[4 + i] + b[4 + i]) + (c[4 + i] + d[4 + i])
        total = total + rest * Float32(1.0 / RESIDUAL)
    return total


@cute.jit
def skip_stages(count: cutlass.Constexpr, step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Wait for and release `count` stages that the other warpgroup works on."""
    for _ in cutlass.range(count, unroll=1):
        stage = step % spec.stages
        cute.arch.mbarrier_wait(shared.full + stage, (step // spec.stages) & 1)
        arrive_warp(shared.empty + stage)
        step = step + 1
    return step


@cute.jit
def up_unit(own: Int32, step: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Gate and up sums of one unit: (rmem fp32 [4]: gate of two tokens, up of the same, step)."""
    mma = tiled_mma(spec)
    thread = mma.get_slice(tid)
    a = mma.make_fragment_A(thread.partition_A(shared.up))
    b = mma.make_fragment_B(thread.partition_B(shared.x))
    accs = accumulators(mma, k_blocks_per_stage(), spec)
    total = cute.make_rmem_tensor(4, Float32)
    total.fill(0.0)
    column = 2 * (tid & 3)
    for s in cutlass.range(spec.unit_stages, unroll=1):
        stage = cute.arch.make_warp_uniform(step % spec.stages)
        cute.arch.mbarrier_wait(shared.full + stage, (step // spec.stages) & 1)
        if (own + s == 0) & (tid < 32):
            stamp(shared.trace, "first_tile", spec)
        issue(mma, accs, a[None, None, None, stage], 0, b, 8 * s)
        scale = cute.make_rmem_tensor((4, 2), Float32)
        for block in cutlass.range_constexpr(k_blocks_per_stage()):
            kb = 2 * s + block
            gate = shared.up_scale[2 * own * spec.k_blocks + kb].to(Float32)
            up = shared.up_scale[(2 * own + 1) * spec.k_blocks + kb].to(Float32)
            for i in cutlass.range_constexpr(2):
                x_scale = shared.x_scale[kb * 8 + column + i]
                scale[i, block] = gate * x_scale
                scale[2 + i, block] = up * x_scale
        warpgroup.wait_group(0)
        arrive_warp(shared.empty + stage)
        for block in cutlass.range_constexpr(k_blocks_per_stage()):
            for i in cutlass.range_constexpr(4):
                total[i] = total[i] + block_sum(accs, block, i) * scale[i, block]
        step = step + 1
    return total, step


@cute.jit
def silu_mul(gate: Float32, up: Float32) -> Float32:
    """SiLU(gate) * up."""
    sigmoid = cute.arch.rcp_approx(
        Float32(1.0) + cute.math.exp2(gate * Float32(-1.44269504), fastmath=True)
    )
    return gate * sigmoid * up


@cute.jit
def h_place(unit: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr) -> Int32:
    """Word of h that this thread of a warpgroup has of a unit, or -1: token lane / 4, two features.

    A unit makes 32 features for the tokens routed to its expert.
    """
    lane = tid & 31
    token = lane >> 2
    slot = shared.slot_of[(unit // spec.units_per_expert) * 8 + token]
    feature = (unit % spec.units_per_expert) * 32 + (tid >> 5) * 8 + 2 * (lane & 3)
    place = ((token * 8 + slot) * spec.intermediate + feature) // 2
    if slot < 0:
        place = Int32(-1)
    return place


@cute.jit
def publish_h(total: cute.Tensor, h_out: cute.Pointer, place: Int32):
    """Store h of a unit at word `place`.

    Each 32-bit word (two bf16) is its own ready flag, 0 meaning "not yet": +0.0 travels as -0.0.
    """
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0] = silu_mul(total[0], total[2])
    pair[1] = silu_mul(total[1], total[3])
    rounded = cute.make_rmem_tensor(2, BFloat16)
    rounded.store(pair.load().to(BFloat16))
    word = cute.recast_tensor(rounded, Int32)[0]
    # From (feature lane/4, tokens 2 (lane%4) + {0, 1}) to (token lane/4, two features).
    word = cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[word],
    )
    if (word & 0xFFFF) == 0:
        word = word | 0x8000
    if (word & Int32(-65536)) == 0:
        word = word | Int32(-(2**31))
    if place >= 0:
        cute.arch.store(h_out + place, word, sem="relaxed", scope="gpu")


@cute.jit
def up_phase(
    tid: Int32, group: Int32, h_words: cute.Pointer, shared: Shared, spec: cutlass.Constexpr
):
    """All up units of this CTA; returns the ring step after them."""
    cta, _, _ = cute.arch.block_idx()
    units = shared.meta[0] * spec.units_per_expert
    h_out = h_words + shared.meta[2] * spec.h_words
    step = Int32(0)
    own = Int32(0)
    for unit in cutlass.range(spec.first_unit(cta), units, spec.grid, unroll=1):
        if (own & 1) == group:
            place = h_place(unit, tid, shared, spec)
            total, step = up_unit(own, step, tid, shared, spec)
            publish_h(total, h_out, place)
        else:
            step = skip_stages(spec.unit_stages, step, shared, spec)
        own = own + 1
    return step
