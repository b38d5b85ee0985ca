"""Rows of the input through a ring in shared memory: one warp issues bulk copies, the others scan.

A bulk copy begins and ends at multiples of 16 bytes, so the one of a row (or of several whole
rows) that begins elsewhere takes up to 15 more bytes on either side, all of them in 16-byte
granules that hold an element of the row: no copy touches memory that the tensor does not. It lands
at the place within 128 bytes that it has in memory: a copy whose source and destination differ
modulo 128 runs at three quarters of the DRAM's speed.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from cute_moe.kernels.argmin.order import widened, wins
from cute_moe.kernels.argmin.spec import LINE_BYTES, STAGE_STRIDE


class Ring(NamedTuple):
    """The stages and their mbarriers."""

    data: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class Source(NamedTuple):
    """What a CTA reads: `rows` rows of `width` elements, `stride` elements apart."""

    start: cute.Pointer
    rows: Int32
    width: Int32
    stride: Int64
    depth: Int32  # rows of a stage; they are whole and contiguous if there is more than one


@cute.jit
def make_ring(smem: SmemAllocator, spec: cutlass.Constexpr) -> Ring:
    """Allocate the ring and initialise its barriers; all threads call it and then synchronise."""
    tid, _, _ = cute.arch.thread_idx()
    data = smem.allocate_array(Uint8, spec.stages * STAGE_STRIDE, byte_alignment=128)
    full = smem.allocate_array(Int64, 2 * spec.stages, byte_alignment=16)
    empty = full + spec.stages
    if tid == 0:
        for s in cutlass.range_constexpr(spec.stages):
            cute.arch.mbarrier_init(full + s, 1)
            cute.arch.mbarrier_init(empty + s, spec.threads // 32)
        cute.arch.mbarrier_init_fence()
    return Ring(data, full, empty)


@cute.jit
def issue_copies(ring: Ring, source: Source, spec: cutlass.Constexpr):
    """The producer warp's whole life."""
    item = source.start.dtype.width // 8
    steps = (source.rows + source.depth - 1) // source.depth
    for step in cutlass.range(steps, unroll=1):
        stage = step % spec.stages
        rows = cutlass.min(source.rows - step * source.depth, source.depth)
        address = (source.start + Int64(step * source.depth) * source.stride).toint()
        place = Int32(address & (LINE_BYTES - 1))
        shift = place & 15
        nbytes = (Int32((rows - 1) * source.stride) + source.width) * item
        nbytes = (nbytes + shift + 15) & ~15
        cute.arch.mbarrier_wait(ring.empty + stage, ((step // spec.stages) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, nbytes)
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[
                    ring.data + stage * STAGE_STRIDE + (place - shift),
                    address - shift,
                    nbytes,
                    ring.full + stage,
                ],
            )


@cute.jit
def scan_stream(
    ring: Ring,
    source: Source,
    offsets: list,
    x: Int32,
    worker: Int32,
    workers: Int32,
    marks,
    spec: cutlass.Constexpr,
):
    """A scanning thread's whole life: `marks` (best, row of it), for its columns x + offsets."""
    best, at = marks
    item = source.start.dtype.width // 8
    data = cute.recast_ptr(ring.data, dtype=source.start.dtype)
    steps = (source.rows + source.depth - 1) // source.depth
    for step in cutlass.range(steps, unroll=1):
        stage = step % spec.stages
        first = step * source.depth
        rows = cutlass.min(source.rows - first, source.depth)
        place = Int32((source.start + Int64(first) * source.stride).toint() & (LINE_BYTES - 1))
        cute.arch.mbarrier_wait(ring.full + stage, (step // spec.stages) & 1)
        base = data + (stage * (STAGE_STRIDE // item) + place // item + x)
        for r in cutlass.range(worker, rows, workers, unroll=1):
            row = base + r * Int32(source.stride)
            values = []
            for c in cutlass.range_constexpr(spec.columns):
                values.append(cute.make_tensor(row + offsets[c], cute.make_layout(1))[0])
            for c in cutlass.range_constexpr(spec.columns):
                value = widened(values[c], spec)
                take = wins(value, best[c], spec)
                best[c] = cutlass.select_(take, value, best[c])
                at[c] = cutlass.select_(take, first + r, at[c])
        cute.arch.fence_view_async_shared()  # Plain reads, then the next copy into this stage.
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty + stage)
