"""The two kernels of argmin and argmax.

Scan: the input as [outer, reduce, inner]; every thread scans its steps of the reduction, the
winners of a CTA's workers are merged on chip and stored as places, or, where several CTAs share a
reduction, as pairs (place, key) from which the combine kernel picks. Every merge takes the lower
key, then the lower place, so its order does not matter and results are the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cute_moe.kernels.argmin.order import (
    NO_KEY,
    NO_PLACE,
    first_of,
    make_marks,
    sort_key,
    widened,
)
from cute_moe.kernels.argmin.scan import Track, scan_columns, scan_row
from cute_moe.kernels.argmin.share import Board, make_board, share_lanes, share_tree
from cute_moe.kernels.argmin.spec import CombineSpec, ScanSpec, Walk
from cute_moe.kernels.argmin.stream import Source, issue_copies, make_ring, scan_stream

DTYPES = {"float32": Float32, "int32": Int32, "bfloat16": BFloat16, "float16": Float16}


class Seat(NamedTuple):
    """A thread's part of the work; `active`: it has one (others scan nothing, store nothing)."""

    active: Boolean
    outer: Int64
    tile: Int32
    x: Int32
    worker: Int32
    split: Int32


@cute.jit
def take_seat(walk: Walk) -> Seat:
    """Tiles change fastest over the CTAs, then splits: CTAs that run together read neighbours."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    rest = cta // walk.tiles
    row = tid // walk.tx
    z = row // walk.ty
    outer = Int64(rest // walk.splits) * walk.tz + z
    active = (z < walk.tz) & (outer < walk.outer)
    outer = Int64(cutlass.select_(active, outer, Int64(0)))
    return Seat(active, outer, cta % walk.tiles, tid % walk.tx, row % walk.ty, rest % walk.splits)


@cute.jit
def own_steps(begin: Int64, end: Int64, seat: Seat, walk: Walk) -> Int32:
    """How many of the steps begin + worker, begin + worker + ty, ... lie below `end`, a chunk's."""
    left = Int32(cutlass.min(end - begin, walk.chunk)) - seat.worker
    steps = (cutlass.max(left, 0) + walk.ty - 1) // walk.ty
    return Int32(cutlass.select_(seat.active, steps, Int32(0)))


@cute.jit
def store(out: cute.Pointer, where: Int64, key: Int32, place: Int64, seat: Seat, walk: Walk):
    """Store the place; if CTAs share the reduction, in [splits][outputs], followed by the keys."""
    if walk.splits > 1:
        outputs = walk.outer * walk.inner
        keys = cute.recast_ptr(out + outputs * walk.splits, dtype=Int32)
        where = where + outputs * seat.split
        cute.make_tensor(keys + where, cute.make_layout(1))[0] = key
    cute.make_tensor(out + where, cute.make_layout(1))[0] = place


class Columns(NamedTuple):
    """A thread's columns: the first, in elements; `offsets` of all to it, 0 where not `owned`."""

    first: Int64
    offsets: list
    owned: list


@cute.jit
def own_columns(seat: Seat, walk: Walk, spec: cutlass.Constexpr) -> Columns:
    """Columns lie tx vectors apart. Whoever has none is given the first one to look at."""
    vectors = walk.inner // spec.vector
    first = Int64(seat.tile * spec.columns) * walk.tx + seat.x
    offsets, owned = [], []
    for c in cutlass.range_constexpr(spec.columns):
        owns = seat.active & (first + walk.tx * c < vectors)
        owned.append(owns)
        offsets.append(Int32(cutlass.select_(owns, walk.tx * (c * spec.vector), Int32(0))))
    return Columns(Int64(cutlass.select_(owned[0], first, Int64(0))) * spec.vector, offsets, owned)


@cute.jit
def store_columns(
    columns: Columns,
    marks,
    rows,
    board: Board,
    seat: Seat,
    out: cute.Pointer,
    walk: Walk,
    spec: cutlass.Constexpr,
):
    """Merge the workers' winners and store. `marks`: (best value, its step) for each element;
    `rows`: (row of step 0, rows of a step)."""
    tid, _, _ = cute.arch.thread_idx()
    best, at = marks
    begin, step = rows
    for c in cutlass.range_constexpr(spec.columns):
        for v in cutlass.range_constexpr(spec.vector):
            slot = c * spec.vector + v
            key = sort_key(best[slot], spec)
            place = begin + Int64(at[slot]) * step
            if walk.ty > 1:
                board.keys[tid] = key
                board.places[tid] = place
                share_tree(board, tid, seat.worker, walk.ty, walk.tx, seat.active)
                key = board.keys[tid]
                place = board.places[tid]
                cute.arch.sync_threads()
            if columns.owned[c] & (seat.worker == 0):
                where = seat.outer * walk.inner + columns.first + columns.offsets[c] + v
                store(out, where, key, place, seat, walk)


@cute.jit
def reduce_columns(x: cute.Pointer, out: cute.Pointer, walk: Walk, spec: cutlass.Constexpr):
    """A CTA's part when the reduced dimension is strided, by loads of its threads."""
    board = make_board(SmemAllocator(), spec.block)
    seat = take_seat(walk)
    columns = own_columns(seat, walk, spec)
    begin = walk.chunk * seat.split
    start = x + (seat.outer * walk.reduce + begin + seat.worker) * walk.inner + columns.first
    steps = own_steps(begin, walk.reduce, seat, walk)
    steps = Int32(cutlass.select_(columns.owned[0], steps, Int32(0)))
    track = Track(start, walk.inner * walk.ty, steps)
    marks = scan_columns(track, columns.offsets, spec)
    store_columns(columns, marks, (begin + seat.worker, walk.ty), board, seat, out, walk, spec)


@cute.jit
def reduce_stream(x: cute.Pointer, out: cute.Pointer, walk: Walk, spec: cutlass.Constexpr):
    """A CTA's part when the reduced dimension is strided, by bulk copies of one warp."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    smem = SmemAllocator()
    board = make_board(smem, spec.block)
    ring = make_ring(smem, spec)
    cute.arch.sync_threads()
    seat = take_seat(walk)
    columns = own_columns(seat, walk, spec)
    begin = walk.chunk * seat.split
    rest = cute.arch.block_idx()[0] // walk.tiles // walk.splits
    tile = Int64(seat.tile * spec.columns) * walk.tx
    source = Source(
        x + (Int64(rest) * walk.reduce + begin) * walk.inner + tile,
        Int32(cutlass.min(walk.reduce - begin, walk.chunk)),
        Int32(cutlass.min(walk.inner - tile, Int64(walk.tx * spec.columns))),
        walk.inner,
        walk.depth,
    )
    marks = make_marks(spec.columns, spec)
    if warp == spec.threads // 32:
        issue_copies(ring, source, spec)
    else:
        worker = Int32(cutlass.select_(columns.owned[0], seat.worker, source.depth))
        scan_stream(ring, source, columns.offsets, seat.x, worker, walk.ty, marks, spec)
    store_columns(columns, marks, (begin, Int32(1)), board, seat, out, walk, spec)


@cute.jit
def reduce_rows(x: cute.Pointer, out: cute.Pointer, walk: Walk, spec: cutlass.Constexpr):
    """A CTA's part when the reduced dimension is the last: aligned vectors, and the row's edges.

    Each worker also looks at one element before the first or behind the last aligned vector, or,
    when there are no more of them, at the row's last one once again.
    """
    tid, _, _ = cute.arch.thread_idx()
    board = make_board(SmemAllocator(), spec.block)
    seat = take_seat(walk)
    row = x + seat.outer * walk.reduce
    past = Int32((row.toint() // (row.dtype.width // 8)) % spec.vector)
    head = cutlass.min(Int64((spec.vector - past) % spec.vector), walk.reduce)
    vectors = (walk.reduce - head) // spec.vector
    edge = Int64(seat.worker)
    if edge >= head:
        edge = cutlass.min(vectors * spec.vector + edge, walk.reduce - 1)
    edge_value = widened(cute.make_tensor(row + edge, cute.make_layout(1))[0], spec)
    first = walk.chunk * seat.split + seat.worker
    steps = own_steps(walk.chunk * seat.split, vectors, seat, walk)
    track = Track(row + (head + first * spec.vector), Int64(walk.ty * spec.vector), steps)
    best, at, position = scan_row(track, spec)
    key = sort_key(best, spec)
    place = head + (first + Int64(at) * walk.ty) * spec.vector + position
    key, place = first_of(key, place, sort_key(edge_value, spec), edge)
    key, place = share_lanes(key, place, walk.ty)
    if walk.ty > 32:
        warp = tid // 32
        leads = tid % 32 == 0
        if leads:
            board.keys[warp] = key
            board.places[warp] = place
        share_tree(board, warp, warp, walk.ty // 32, Int32(1), leads)
        if leads:
            key = board.keys[warp]
            place = board.places[warp]
    if seat.active & (seat.worker == 0):
        store(out, seat.outer, key, place, seat, walk)


@cute.kernel
def scan_kernel(x: cute.Pointer, out: cute.Pointer, walk, spec: cutlass.Constexpr):
    """See the module's header."""
    if cutlass.const_expr(spec.kind == "rows"):
        reduce_rows(x, out, walk, spec)
    elif cutlass.const_expr(spec.kind == "columns"):
        reduce_columns(x, out, walk, spec)
    else:
        reduce_stream(x, out, walk, spec)
    if walk.splits > 1:
        cute.arch.griddepcontrol_launch_dependents()


@cute.kernel
def combine_kernel(
    partial: cute.Pointer,
    out: cute.Pointer,
    outputs: Int64,
    splits: Int32,
    tx: Int32,
    spec: cutlass.Constexpr,
):
    """Winner of each output over its splits; `tx` outputs a CTA, the other threads share splits."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    board = make_board(SmemAllocator(), spec.threads)
    workers = spec.threads // tx
    worker = tid // tx
    where = Int64(cta) * tx + tid % tx
    active = (where < outputs) & (worker < workers)
    places = partial + where
    keys = cute.recast_ptr(partial + outputs * splits, dtype=Int32) + where
    key = Int32(NO_KEY)
    place = Int64(NO_PLACE)
    cute.arch.griddepcontrol_wait()
    if active:
        for s in cutlass.range(worker, splits, workers, unroll=4):
            other_key = cute.make_tensor(keys + outputs * s, cute.make_layout(1))[0]
            other_place = cute.make_tensor(places + outputs * s, cute.make_layout(1))[0]
            key, place = first_of(key, place, other_key, other_place)
    board.keys[tid] = key
    board.places[tid] = place
    share_tree(board, tid, worker, workers, tx, active)
    if active & (worker == 0):
        cute.make_tensor(out + where, cute.make_layout(1))[0] = board.places[tid]


@cute.jit
def launch_scan(x: cute.Tensor, out: cute.Tensor, walk, stream, spec: cutlass.Constexpr):
    """x: all elements; out: the places, or a partial scan's pairs; walk: a `Walk`."""
    walk = Walk(*walk)
    scan_kernel.set_name_prefix("argmin_scan", remove_cutlass_symbol=True, keep_mangled_name=False)
    groups = Int32((walk.outer + walk.tz - 1) // walk.tz)
    scan_kernel(x.iterator, out.iterator, walk, spec).launch(
        grid=(walk.tiles * walk.splits * groups, 1, 1),
        block=(spec.block, 1, 1),
        stream=stream,
        min_blocks_per_mp=1,
    )


@cute.jit
def launch_combine(
    partial: cute.Tensor,
    out: cute.Tensor,
    outputs: Int64,
    splits: Int32,
    tx: Int32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launched so that it may start before the scan ends: it waits for that by itself."""
    combine_kernel.set_name_prefix(
        "argmin_combine", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    groups = Int32((outputs + tx - 1) // tx)
    combine_kernel(partial.iterator, out.iterator, outputs, splits, tx, spec).launch(
        grid=(groups, 1, 1), block=(spec.threads, 1, 1), stream=stream, use_pdl=True
    )


def build(spec: ScanSpec | CombineSpec, options: str):
    """Compile the kernel of `spec` from fake tensors; needs no GPU."""
    words = make_fake_compact_tensor(Int64, (cute.sym_int64(),))
    out = make_fake_compact_tensor(Int64, (cute.sym_int64(),))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if isinstance(spec, CombineSpec):
        sizes = (Int64(1), Int32(1), Int32(1))
        return cute.compile(launch_combine, words, out, *sizes, stream, spec, options=options)
    x = make_fake_compact_tensor(DTYPES[spec.dtype], (cute.sym_int64(),))
    walk = (*(Int64(1) for _ in range(4)), *(Int32(1) for _ in range(6)))
    return cute.compile(launch_scan, x, out, walk, stream, spec, options=options)
