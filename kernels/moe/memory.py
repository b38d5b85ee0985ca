"""Shared memory of the MoE kernel: one dataclass of views, allocated once per CTA."""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_moe.kernels.moe.spec import (
    BLOCK,
    DOWN_COLS,
    GROUP,
    MAX_CHUNKS,
    PAIRS,
    STAGE_BYTES,
    UNIT_ROWS,
    MoeSpec,
)

LOADER_WARPS = 8
CONSUMER_WARPS = 8
FEW_CHUNKS = 2  # so few are loaded at the end, in one go; they have at most two groups
NUM_META = 4  # active experts, chunks, parity; one unused word for alignment

# Fields of an entry of `rows`: pair, place in its chunk, chunk, arrivals of a lane on the chunk.
PAIR_MASK = 0xFF
PLACE_SHIFT, CHUNK_SHIFT, ARRIVALS_SHIFT = 8, 12, 16


def dtype_of(name: str):
    """The DSL's type of a dtype that a spec names."""
    return {"bfloat16": BFloat16, "float32": Float32}[name]


def swizzle_atom():
    """The 8 x 128-byte shared-memory atom that TMA writes and WGMMA reads."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)


def up_layout(spec: MoeSpec):
    """Ring as up tiles: (64 rows, 256 features, stages)."""
    return cute.tile_to_shape(swizzle_atom(), (UNIT_ROWS, 256, spec.stages), (0, 1, 2))


def down_box_layout(spec: MoeSpec):
    """Ring as down boxes: (16 columns, N, 1 expert, two a stage)."""
    return cute.tile_to_shape(
        swizzle_atom(), (16, spec.intermediate, 1, 2 * spec.stages), (1, 0, 2, 3)
    )


def down_group_layout(spec: MoeSpec):
    """Ring as groups of experts: (4 x 16 columns, N, stage pairs); the bytes of four down boxes."""
    shape = (GROUP * DOWN_COLS, spec.intermediate, spec.stages // 2)
    return cute.tile_to_shape(swizzle_atom(), shape, (1, 0, 2))


@dataclass(frozen=True)
class Shared:
    """Views of shared memory, flat where no shape is given; then eight mbarriers, and the trace."""

    up: cute.Tensor  # ring, (64, 256, stages) e4m3
    down_box: cute.Tensor  # the same bytes, (16, N, 1, 2 stages)
    down_group: cute.Tensor  # the same bytes, (64, N, stages / 2)
    ring: cute.Pointer  # the same bytes
    x: cute.Tensor  # (8 tokens x terms, K) e4m3, swizzled
    x_octets: cute.Pointer  # int64, the bytes of x
    h: cute.Tensor  # (8 pairs x terms, N, slots) e4m3, swizzled
    h_octets: cute.Pointer
    x_scale: cute.Tensor  # [K/128][8] fp32
    h_scale: cute.Tensor  # [chunks][N/128][8] fp32
    up_scale: cute.Tensor  # [own units][gate, up][K/128], as stored
    down_scale: cute.Tensor  # [own column blocks][expert index][N/128] fp32
    partial: cute.Tensor  # [own column blocks][pair][16] fp32
    weight: cute.Tensor  # [pair] fp32
    pick: cute.Tensor  # [pair] expert id
    mask: cute.Tensor  # [expert id] bit t: token t uses it
    index: cute.Tensor  # [expert id] position in `experts`
    experts: cute.Tensor  # [active] expert id
    slot_of: cute.Tensor  # [active][8 tokens] slot k or -1
    chunk_base: cute.Tensor  # [active + 1] first chunk of the expert's group
    pos_base: cute.Tensor  # [active] pairs before the expert in its group
    row_base: cute.Tensor  # [active] pairs before its group | pairs of the group << 8
    chunk_rows: cute.Tensor  # [chunks][8] pair | position in group << 8, or -1
    rows: cute.Tensor  # [row] by chunk and place: fields as above
    meta: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    h_ready: cute.Pointer
    h_free: cute.Pointer
    lists: cute.Pointer
    scales: cute.Pointer
    gate: cute.Pointer
    landed: cute.Pointer
    trace: cute.Pointer  # int64 [grid][events] in global memory, behind the epochs


def allocate(trace: cute.Pointer, spec: MoeSpec) -> Shared:
    """Lay out shared memory (the same addresses in every thread)."""
    sm = SmemAllocator()

    def words(dtype, n):
        return cute.make_tensor(sm.allocate_array(dtype, n, byte_alignment=16), cute.make_layout(n))

    def swizzled(ptr, layout):
        return cute.make_tensor(cute.recast_ptr(ptr, layout.inner, Float8E4M3FN), layout.outer)

    ring = sm.allocate_array(Float8E4M3FN, spec.stages * STAGE_BYTES, byte_alignment=1024)
    rows = 8 * spec.terms
    x = sm.allocate_array(Float8E4M3FN, rows * spec.hidden, byte_alignment=1024)
    h_shape = (rows, spec.intermediate, spec.h_slots)
    h = sm.allocate_array(Float8E4M3FN, math.prod(h_shape), byte_alignment=1024)
    x_layout = cute.tile_to_shape(swizzle_atom(), (rows, spec.hidden), (0, 1))
    h_layout = cute.tile_to_shape(swizzle_atom(), h_shape, (0, 1, 2))
    h_ready = 2 * spec.stages
    h_free = h_ready + MAX_CHUNKS
    lists = h_free + spec.h_slots
    bars = sm.allocate_array(Int64, lists + 4, byte_alignment=16)
    return Shared(
        up=swizzled(ring, up_layout(spec)),
        down_box=swizzled(ring, down_box_layout(spec)),
        down_group=swizzled(ring, down_group_layout(spec)),
        ring=ring,
        x=swizzled(x, x_layout),
        x_octets=cute.recast_ptr(x, dtype=Int64),
        h=swizzled(h, h_layout),
        h_octets=cute.recast_ptr(h, dtype=Int64),
        x_scale=words(Float32, spec.k_blocks * 8),
        h_scale=words(Float32, MAX_CHUNKS * spec.h_blocks * 8),
        up_scale=words(dtype_of(spec.scales_up_dtype), spec.max_own_units * 2 * spec.k_blocks),
        down_scale=words(Float32, spec.max_own_columns * PAIRS * spec.h_blocks),
        partial=words(Float32, spec.max_own_columns * PAIRS * DOWN_COLS),
        weight=words(Float32, PAIRS),
        pick=words(Int32, PAIRS),
        mask=words(Int32, spec.num_experts),
        index=words(Int32, spec.num_experts),
        experts=words(Int32, PAIRS),
        slot_of=words(Int32, PAIRS * 8),
        chunk_base=words(Int32, PAIRS + 1),
        pos_base=words(Int32, PAIRS),
        row_base=words(Int32, PAIRS),
        chunk_rows=words(Int32, MAX_CHUNKS * 8),
        rows=words(Int32, PAIRS),
        meta=words(Int32, NUM_META),
        full=bars,
        empty=bars + spec.stages,
        h_ready=bars + h_ready,
        h_free=bars + h_free,
        lists=bars + lists,
        scales=bars + lists + 1,
        gate=bars + lists + 2,
        landed=bars + lists + 3,
        trace=trace,
    )


@cute.jit
def init_stream_barriers(shared: Shared, spec: cutlass.Constexpr):
    """Initialise the mbarriers that the producer warp uses; that warp, which then needs no other.

    One lane with constant addresses, here and in `init_barriers`: the instruction takes uniform
    registers only, so that an init per lane becomes a loop over the lanes.
    """
    with cute.arch.elect_one():
        for s in cutlass.range_constexpr(spec.stages):
            cute.arch.mbarrier_init(shared.full + s, 1)
            cute.arch.mbarrier_init(shared.empty + s, CONSUMER_WARPS)
        cute.arch.mbarrier_init(shared.lists, 32)
        cute.arch.mbarrier_init(shared.gate, 1)
        cute.arch.mbarrier_init(shared.landed, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def init_barriers(shared: Shared, spec: cutlass.Constexpr):
    """Initialise all other mbarriers; one warp, before the barrier that the others wait at."""
    with cute.arch.elect_one():
        # Writers arrive one by one, each for its own stores: the happens-before is then plain to
        # race checkers too, which do not follow a warp barrier into one lane's arrival.
        for c in cutlass.range_constexpr(MAX_CHUNKS):
            cute.arch.mbarrier_init(shared.h_ready + c, 16 * LOADER_WARPS)
        for c in cutlass.range_constexpr(spec.h_slots):
            cute.arch.mbarrier_init(shared.h_free + c, CONSUMER_WARPS // 2)
        cute.arch.mbarrier_init(shared.scales, 32)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def arrive_warp(bar: cute.Pointer):
    """One arrival for the calling warp, after the work of all of its lanes."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bar)


def k_blocks_per_stage() -> int:
    """Quantisation blocks of one up stage."""
    return STAGE_BYTES // UNIT_ROWS // BLOCK
