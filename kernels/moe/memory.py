"""Shared memory of the MoE kernel: one dataclass of views, allocated once per CTA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_moe.kernels.device.ring import Ring, init_ring
from cute_moe.kernels.moe.spec import (
    ATOM_ROWS,
    BLOCK,
    CHUNK_ROWS,
    HALVES,
    MAX_TOKENS,
    MMA_ROWS,
    SCALE_BATCHES,
    STAGE_BYTES,
    MoeSpec,
)

WARP = 32
HALF_WARPS = 4  # of a consumer warpgroup
CONSUMER_WARPS = HALVES * HALF_WARPS
LOADER_WARPS = 8
ATOM_BYTES = ATOM_ROWS * BLOCK

# Words of `meta`.
ACTIVE, PARITY, ROWS, CHUNKS = range(4)

# Fields of an entry of `rows`: the pair that h is stored under, place in its chunk, chunk.
PAIR_MASK = 0xFF
PLACE_SHIFT, CHUNK_SHIFT = 8, 12
# Fields of an entry of `chunk_rows`: pair, position of its expert in the group.
EXPERT_SHIFT = 8
# Fields of `group_rows` and `group_chunks`: first, number.
COUNT_SHIFT = 16
FIRST_MASK = 0xFFFF

_TYPES = {"e4m3": Float8E4M3FN, "uint8": Uint8, "int32": Int32, "int64": Int64, "float32": Float32}


def dtype_of(name: str):
    """The DSL's type of a dtype that a spec names; an e8m0 scale is seen as its exponent byte."""
    return {
        "bfloat16": BFloat16,
        "float32": Float32,
        "float8_e8m0fnu": Uint8,
        "int32": Int32,
        "int64": Int64,
    }[name]


def swizzle_atom():
    """The 8 x 128-byte shared-memory atom that TMA writes and WGMMA reads."""
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)


def _stages_of_blocks(blocks: int, atom_stride: int, block_stride: int, spec: MoeSpec):
    """The ring as A operands: (64 rows, 128 features a block, stages); strides in bytes.

    Where a stage holds fewer rows, the last ones are bytes of something else, whose products are
    dropped: rows of A do not mix.
    """
    rows, features = (ATOM_ROWS, MMA_ROWS // ATOM_ROWS), (BLOCK, blocks)
    strides = ((BLOCK, atom_stride), (1, block_stride), STAGE_BYTES)
    return cute.make_layout((rows, features, spec.stages), stride=strides)


def up_layout(spec: MoeSpec):
    """Stages of up units: blocks of 128 features, one after the other."""
    return _stages_of_blocks(spec.stage_blocks, ATOM_BYTES, spec.rows * BLOCK, spec)


def down_strides(spec: MoeSpec) -> tuple[int, int]:
    """Bytes between atoms and between blocks in a stage of down weights.

    Boxes of several blocks land as [expert][atom][block]; boxes of one block are put down as
    [block][expert][atom]. Atoms lie equally far apart either way.
    """
    if spec.whole_blocks:
        return spec.step_blocks * ATOM_BYTES, ATOM_BYTES
    return ATOM_BYTES, spec.group * spec.column_atoms * ATOM_BYTES


def down_layout(spec: MoeSpec):
    """Stages of down steps."""
    return _stages_of_blocks(spec.step_blocks, *down_strides(spec), spec)


@dataclass(frozen=True)
class Shared:
    """Views of shared memory, flat where no shape is given; rings; three mbarriers; the trace."""

    up: cute.Tensor  # ring, (64, features of a stage, stages) e4m3
    down: cute.Tensor  # the same bytes, (64, features of a step, stages)
    ring: cute.Pointer  # the same bytes
    x: cute.Tensor  # (8 tokens x terms, K) e4m3, swizzled
    x_octets: cute.Pointer  # int64, the bytes of x
    h: cute.Tensor  # (8 pairs x terms, features of a slice, slots) e4m3, swizzled
    h_octets: cute.Pointer
    x_scale: cute.Tensor  # [K/128][8] fp32
    h_scale: cute.Tensor  # [slot][scale of a slice][8] fp32
    up_scale: cute.Pointer  # [slot][gate, up] rows of scales as stored, 16-byte aligned each
    down_scale: cute.Tensor  # [group of the batches][own block][expert][row][scale] fp32
    partial: cute.Tensor  # [own block][pair][columns] fp32
    weight: cute.Tensor  # [pair] fp32
    pick: cute.Tensor  # [pair] expert id, or -1
    count: cute.Tensor  # [expert id] pairs
    index: cute.Tensor  # [expert id] position in `experts`
    experts: cute.Tensor  # [active] expert id
    pair_of: cute.Tensor  # [active][8 tokens] the pair that h is stored under, or -1
    first_place: cute.Tensor  # [active] pairs before the expert in its group
    group_rows: cute.Tensor  # [group] its rows in `rows`
    group_chunks: cute.Tensor  # [group] its chunks
    chunk_rows: cute.Tensor  # [chunk][8] fields as above, or -1
    rows: cute.Tensor  # [row] fields as above, by chunk and place
    meta: cute.Tensor
    weights: Ring  # stages of weights
    h_slots: Ring  # slots of h
    scale_slots: Ring  # down scales of a batch of groups
    lists: cute.Pointer
    gate: cute.Pointer
    landed: cute.Pointer
    trace: cute.Pointer  # int64 [grid][events] in global memory, behind the epochs


def allocate(trace: cute.Pointer, spec: MoeSpec) -> Shared:
    """Lay out shared memory (the same addresses in every thread)."""
    sm = SmemAllocator()
    found = {}
    for name, kind, count in spec.shared_regions:
        align = 1024 if kind == "e4m3" else 16
        found[name] = sm.allocate_array(_TYPES[kind], count, byte_alignment=align)
    sizes = {name: count for name, _, count in spec.shared_regions}

    def swizzled(name, layout):
        inner = swizzle_atom().inner
        return cute.make_tensor(cute.recast_ptr(found[name], inner, Float8E4M3FN), layout)

    def tiles(*shape):
        return cute.tile_to_shape(swizzle_atom(), shape, tuple(range(len(shape)))).outer

    def flat(name):
        return cute.make_tensor(found[name], cute.make_layout(sizes[name]))

    weights, h_slots, scale_slots, lists, gate, landed = _make_rings(found["barriers"], spec)
    views = ("x_scale", "h_scale", "down_scale", "partial", "weight", "pick", "count", "index",
             "experts", "pair_of", "first_place", "group_rows", "group_chunks", "chunk_rows",
             "rows", "meta")  # fmt: skip
    rows = CHUNK_ROWS * spec.terms
    return Shared(
        up=swizzled("ring", up_layout(spec)),
        down=swizzled("ring", down_layout(spec)),
        ring=found["ring"],
        x=swizzled("x", tiles(MAX_TOKENS * spec.terms, spec.hidden)),
        x_octets=cute.recast_ptr(found["x"], dtype=Int64),
        h=swizzled("h", tiles(rows, spec.slice_blocks * BLOCK, spec.h_slots)),
        h_octets=cute.recast_ptr(found["h"], dtype=Int64),
        up_scale=found["up_scale"],
        **{name: flat(name) for name in views},
        weights=weights,
        h_slots=h_slots,
        scale_slots=scale_slots,
        lists=lists,
        gate=gate,
        landed=landed,
        trace=trace,
    )


def _make_rings(bars: cute.Pointer, spec: MoeSpec):
    """(weights, slots of h, down scales, lists, gate, landed)."""

    def ring(first, stages, writers, readers):
        return Ring(bars + first, bars + (first + stages), stages, writers, readers)

    h_first = 2 * spec.stages
    scales_first = h_first + 2 * spec.h_slots
    last = scales_first + 2 * SCALE_BATCHES
    return (
        ring(0, spec.stages, 1, CONSUMER_WARPS),
        ring(h_first, spec.h_slots, WARP * LOADER_WARPS, CONSUMER_WARPS),
        ring(scales_first, SCALE_BATCHES, WARP, CONSUMER_WARPS),
        bars + last,
        bars + (last + 1),
        bars + (last + 2),
    )


@cute.jit
def init_stream_barriers(shared: Shared, spec: cutlass.Constexpr):
    """Initialise the mbarriers that the producer warp uses; that warp, which then needs no other.

    One lane with constant addresses, here and in `init_barriers`: the instruction takes uniform
    registers only, so that an init per lane becomes a loop over the lanes.
    """
    with cute.arch.elect_one():
        init_ring(shared.weights)
        cute.arch.mbarrier_init(shared.lists, WARP)
        cute.arch.mbarrier_init(shared.gate, 1)
        cute.arch.mbarrier_init(shared.landed, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def init_barriers(shared: Shared, spec: cutlass.Constexpr):
    """Initialise all other mbarriers; one warp, before the barrier that the others wait at."""
    with cute.arch.elect_one():
        # Writing lanes arrive one by one, each for its own stores: the happens-before is then plain
        # to race checkers too, which do not follow a warp barrier into one lane's arrival.
        init_ring(shared.h_slots, reused=spec.slots_reused)
        init_ring(shared.scale_slots)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
