"""The copies of the sort: each token of a chunk, read once, goes to the k rows of its items."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from cute_moe.kernels.device.policy import EVICT_FIRST
from cute_moe.kernels.dispatch.rows import row_start, vector_at, vector_registers, zero_row
from cute_moe.kernels.dispatch.spec import LINE, WARP, SortSpec


@cute.jit
def copy_rows(
    src: cute.Tensor, out: cute.Tensor, rows: cute.Tensor, first: Int32, end: Int32, k: Int32,
    spec: cutlass.Constexpr,
):  # fmt: skip
    """Copy tokens first .. end - 1 through registers, by a whole CTA; dropped items give zeros.

    CTAs with the same chunk (grid y) share out the columns. rows: as in `Tables.row`.
    """
    tid, _, _ = cute.arch.thread_idx()
    _, part, _ = cute.arch.block_idx()
    _, parts, _ = cute.arch.grid_dim()
    vectors = src.shape[1] // spec.vector
    share = (vectors + parts - 1) // parts
    column = cutlass.min(part * share, vectors)
    width = cutlass.min(share, vectors - column)
    data, zero = vector_registers(spec.vector), vector_registers(spec.vector)
    zero.fill(0)
    i = tid
    while i < width * (end - first):
        token = i // width
        vector = column + i % width
        cute.autovec_copy(vector_at(row_start(src, first + token), vector, spec.vector), data)
        for j in cutlass.range(k, unroll=1):
            row = rows[token * k + j]
            if row >= 0:
                cute.autovec_copy(data, vector_at(row_start(out, row), vector, spec.vector))
            else:
                cute.autovec_copy(zero, vector_at(row_start(out, ~row), vector, spec.vector))
        i = i + spec.threads


@cute.jit
def zero_dropped(out: cute.Tensor, rows: cute.Tensor, items: Int32, spec: cutlass.Constexpr):
    """Zero the rows of dropped items among the first `items`, a warp each; all warps but one."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    item = tid // WARP - 1
    while item < items:
        row = rows[item]
        if row < 0:
            zero_row(out, ~row, lane, Int32(WARP), spec.vector)
        item = item + spec.threads // WARP - 1


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory that bulk copies fill and empty; one thread issues all of them.

    A row is moved in pieces of equal size, a piece in a stage. All stages are filled in one burst,
    then stored to all their rows, then filled again: reads and writes that mix cost DRAM time.
    """

    full: cute.Pointer  # a barrier for every stage
    data: cute.Pointer
    piece: Int32  # bytes of a stage
    pieces: Int32  # of a row
    stages: Int32


def make_ring(sm: SmemAllocator, row_bytes: Int32, spec: SortSpec) -> Ring:
    """Allocate the ring, for rows of `row_bytes`."""
    full = sm.allocate_array(Int64, spec.stages, byte_alignment=16)
    data = sm.allocate_array(Uint8, spec.ring_bytes, byte_alignment=LINE)
    most = spec.ring_bytes // 4 // LINE * LINE
    fewest = (row_bytes + most - 1) // most
    piece = (row_bytes + fewest * LINE - 1) // (fewest * LINE) * LINE
    pieces = (row_bytes + piece - 1) // piece
    return Ring(full, data, piece, pieces, cutlass.min(spec.ring_bytes // piece, spec.stages))


@cute.jit
def start_ring(ring: Ring, src: cute.Tensor, first: Int32, end: Int32):
    """Initialise the barriers, and fill the ring with the first pieces of tokens first .. end - 1.

    That much of the copies needs no ranks, so it runs beside the sort.
    """
    for stage in cutlass.range(ring.stages, unroll=1):
        cute.arch.mbarrier_init(ring.full + stage, 1)
    cute.arch.mbarrier_init_fence()
    burst = cutlass.min(ring.stages, (end - first) * ring.pieces)
    fill(ring, src, first, Int32(0), burst)


@cute.jit
def extent(ring: Ring, part: Int32, row_bytes: Int32):
    """(first byte, bytes) of a part of a row."""
    offset = part * ring.piece
    return offset, cutlass.min(ring.piece, row_bytes - offset)


@cute.jit
def after(ring: Ring, token: Int32, part: Int32):
    """(token, part of its row) of the piece behind the given one."""
    part = part + 1
    if part == ring.pieces:
        token, part = token + 1, Int32(0)
    return token, part


@cute.jit
def fill(ring: Ring, src: cute.Tensor, token: Int32, part: Int32, count: Int32):
    """Load `count` pieces, from a part of a token on, into the stages from 0 on."""
    for stage in cutlass.range(count, unroll=1):
        offset, nbytes = extent(ring, part, src.shape[1])
        full = ring.full + stage
        target = ring.data + stage * ring.piece
        source = row_start(src, token) + offset
        cute.arch.mbarrier_arrive_and_expect_tx(full, nbytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[
                target.toint(),
                source.toint(),
                nbytes,
                full.toint(),
                Int64(EVICT_FIRST),
            ],
        )
        token, part = after(ring, token, part)


@cute.jit
def copy_by_ring(
    ring: Ring, src: cute.Tensor, out: cute.Tensor, rows: cute.Tensor, first: Int32, end: Int32,
    k: Int32,
):  # fmt: skip
    """What `copy_rows` does, without the dropped items, after `start_ring`."""
    left = (end - first) * ring.pieces
    turn, token, part = Int32(0), Int32(0), Int32(0)
    while left > 0:
        burst = cutlass.min(ring.stages, left)
        if turn > 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            fill(ring, src, first + token, part, burst)
        for stage in cutlass.range(burst, unroll=1):
            offset, nbytes = extent(ring, part, src.shape[1])
            cute.arch.mbarrier_wait(ring.full + stage, turn & 1)
            source = ring.data + stage * ring.piece
            for j in cutlass.range(k, unroll=1):
                row = rows[token * k + j]
                if row >= 0:
                    target = row_start(out, row) + offset
                    cute.arch.inline_ptx(
                        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint "
                        "[{$r0}], [{$r1}], {$r2}, {$r3};",
                        read_only_args=[
                            target.toint(),
                            source.toint(),
                            nbytes,
                            Int64(EVICT_FIRST),
                        ],
                    )
            cute.arch.cp_async_bulk_commit_group()
            token, part = after(ring, token, part)
        left = left - burst
        turn = turn + 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)
