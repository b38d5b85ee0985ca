"""Phase 3: up-projection, SiLU(gate) * up and the hand-over of h; two consumer warpgroups.

The warpgroups take units in turn; both wait for and release every ring stage, so that the
parities that they wait for never alias.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_moe.kernels.device.ring import release_by_warps, stage_of, wait_full
from cute_moe.kernels.moe.lists import to_scale
from cute_moe.kernels.moe.memory import ACTIVE, CONSUMER_WARPS, PARITY, Shared, dtype_of
from cute_moe.kernels.moe.product import (
    BLOCK_MMAS,
    VALUES,
    Chain,
    Segment,
    accumulators,
    add_products,
    tiled_mma,
)
from cute_moe.kernels.moe.spec import BLOCK, MAX_TOKENS, MoeSpec
from cute_moe.kernels.moe.stream import paired_units, unit_scale_row


@cute.jit
def skip_stages(count, step: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Wait for and release `count` stages that the other warpgroup works on."""
    for _ in cutlass.range(count, unroll=1):
        wait_full(shared.weights, step)
        release_by_warps(shared.weights, step, CONSUMER_WARPS)
        step = step + 1


def unit_scales(own: Int32, part: int, shared: Shared, spec: MoeSpec) -> cute.Tensor:
    """Scales of the gate (part 0) or up rows of this CTA's own-th unit, as stored."""
    start = shared.up_scale + unit_scale_row(own, part, spec)
    ptr = cute.recast_ptr(start, dtype=dtype_of(spec.scales_up_dtype))
    return cute.make_tensor(ptr, cute.make_layout(spec.unit_scales))


def unit_factors(rows, block, column: Int32, shared: Shared, spec: MoeSpec):
    """What `add_products` takes for a block of 128 features: of gate and up rows, two tokens."""
    x_scale = [shared.x_scale[block * MAX_TOKENS + column + i] for i in range(2)]
    per_block = BLOCK // spec.scale_block_hidden
    factors = []
    for at in range(per_block):
        weight_scales = [to_scale(row[per_block * block + at]) for row in rows]
        factors.append([w * x for w in weight_scales for x in x_scale])
    return factors


class Unit(NamedTuple):
    """What the stages of one up unit share, in one thread."""

    a: cute.Tensor
    b: cute.Tensor
    rows: list[cute.Tensor]  # scales of the gate and of the up rows
    step: Int32  # of the ring, of its first stage
    stride: Int32  # ring steps from stage to stage: 2 where two units are streamed together
    column: Int32  # of the thread's first token


def unit_segment(unit: Unit, s, shared: Shared, spec: MoeSpec) -> Segment:
    """Stage s of a unit."""
    step = unit.step + s * unit.stride
    stage = cute.arch.make_warp_uniform(stage_of(shared.weights, step))
    return Segment(
        unit.a[None, None, None, stage],
        0,
        unit.b,
        BLOCK_MMAS * spec.stage_blocks * s,
        spec.stage_blocks,
        lambda: wait_full(shared.weights, step),
        lambda: release_by_warps(shared.weights, step, CONSUMER_WARPS),
    )


@cute.jit
def add_stage(unit: Unit, s, accs, total, shared: Shared, spec: cutlass.Constexpr):
    """Add the products of stage s to `total`."""
    blocks = cutlass.const_expr(spec.stage_blocks)
    chain = Chain(
        total,
        [unit_segment(unit, s, shared, spec)],
        lambda block: unit_factors(unit.rows, blocks * s + block, unit.column, shared, spec),
    )
    add_products(tiled_mma(spec), accs, [chain], release_first=True)


@cute.jit
def up_unit(
    own: Int32, step: Int32, count: Int32, place: Int32, tid: Int32, shared: Shared,
    spec: cutlass.Constexpr,
):  # fmt: skip
    """Gate and up sums of one unit: rmem fp32 [4], gate of two tokens, up of the same.

    step: of the first stage of the `count` units that are streamed together; this one is `place`
    among them (0 or 1), and the other one's stages are passed by.
    """
    mma = tiled_mma(spec)
    thread = mma.get_slice(tid)
    a = mma.make_fragment_A(thread.partition_A(shared.up))
    b = mma.make_fragment_B(thread.partition_B(shared.x))
    rows = [unit_scales(own, part, shared, spec) for part in range(2)]
    unit = Unit(a, b, rows, step + place, count, 2 * (tid & 3))
    total = cute.make_rmem_tensor(VALUES, Float32)
    total.fill(0.0)
    accs = accumulators(mma, spec.stage_blocks, spec)
    # Between the plain reads of the scales of this warpgroup's last unit and the bulk copies to
    # their place, which follow releases of stages of this unit: `unit_scale_slots`.
    cute.arch.fence_view_async_shared()
    for s in cutlass.range(spec.unit_stages, unroll=1):
        skip_stages(place, step + s * count, shared, spec)
        add_stage(unit, s, accs, total, shared, spec)
        skip_stages(count - 1 - place, step + s * count + 1, shared, spec)
    return total


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

    A unit makes its features for the tokens routed to its expert; a warp has 8 of them.
    """
    lane = tid & 31
    token = lane >> 2
    feature = (tid >> 5) * 8 + 2 * (lane & 3)
    pair = shared.pair_of[(unit // spec.units_per_expert) * MAX_TOKENS + token]
    first = unit % spec.units_per_expert * spec.unit_features
    place = (pair * spec.intermediate + first + feature) // 2
    if (pair < 0) | (feature >= spec.unit_features):
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
    tid: Int32, half: Int32, h_words: cute.Pointer, shared: Shared, spec: cutlass.Constexpr
):
    """All up units of this CTA; returns the ring step after them."""
    cta, _, _ = cute.arch.block_idx()
    units = shared.meta[ACTIVE] * spec.units_per_expert
    h_out = h_words + shared.meta[PARITY] * spec.h_words
    step = Int32(0)
    own = Int32(0)
    first = Int32(spec.first_unit(cta))
    while first < units:
        count = Int32(1)
        if own > 0:
            count = paired_units(first, units, spec)
        # The warpgroups have units in turn; of a pair, which begins with an odd one, one each.
        place = (own + half) & 1
        if place < count:
            unit = first + place * spec.grid
            word = h_place(unit, tid, shared, spec)
            total = up_unit(own + place, step, count, place, tid, shared, spec)
            publish_h(total, h_out, word)
        else:
            skip_stages(spec.unit_stages, step, shared, spec)
        step = step + count * spec.unit_stages
        own = own + count
        first = first + count * spec.grid
    return step
