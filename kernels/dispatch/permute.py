"""The sort kernels: expert counts of chunks, and ranks with or without the copies of rows.

Few ids: one launch, in which every CTA counts all ids (`SortSpec.alone`). Many ids: a counting
launch writes a table [chunk][bucket]; a second one ranks chunk by chunk and copies.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cute_moe.kernels.dispatch.copy import (
    copy_by_ring,
    copy_rows,
    make_ring,
    start_ring,
    zero_dropped,
)
from cute_moe.kernels.dispatch.rows import INDEX_TYPES, fake_rows, fake_vector, follow_kernel_ahead
from cute_moe.kernels.dispatch.sort import (
    Chunk,
    add_counts,
    add_one,
    allocate,
    bucket_of,
    chunk_of,
    clear,
    count_all,
    count_own,
    rank_own,
    scan_totals,
    scan_warps,
)
from cute_moe.kernels.dispatch.spec import WARP, CountSpec, SortSpec


@cute.kernel
def count_kernel(ids: cute.Tensor, counts: cute.Tensor, unit: Int32, spec: cutlass.Constexpr):
    """CTA c writes counts[c]: how many of its chunk's items are in each bucket.

    A chunk is a number of whole units of `unit` items.
    """
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    chunks, buckets = counts.shape[0], counts.shape[1]
    follow_kernel_ahead()
    found = SmemAllocator().allocate_tensor(Int32, cute.make_layout(spec.capacity + 1), 16)
    for i in cutlass.range(tid, buckets, spec.threads, unroll=1):
        found[i] = Int32(0)
    cute.arch.sync_threads()
    first, end = chunk_of(ids.shape[0] // unit, cta, chunks)
    for item in cutlass.range(first * unit + tid, end * unit, spec.threads, unroll=4):
        add_one(found, bucket_of(ids[item], buckets - 1))
    cute.arch.sync_threads()
    for i in cutlass.range(tid, buckets, spec.threads, unroll=1):
        counts[cta, i] = found[i]


@cute.kernel
def sort_kernel(ids, counts, result, rows, num_experts: Int32, k: Int32, spec: cutlass.Constexpr):
    """CTA (c, p) ranks the items of chunk c and copies part p of their tokens' rows."""
    tid, _, _ = cute.arch.thread_idx()
    number, part, _ = cute.arch.block_idx()
    chunks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    sm = SmemAllocator()
    tables = allocate(sm, spec)
    buckets = num_experts + 1
    # Only copies need chunks of whole tokens.
    unit = k if cutlass.const_expr(spec.vector) else Int32(1)
    first, end = chunk_of(ids.shape[0] // unit, number, chunks)
    chunk = Chunk(ids, num_experts, first * unit, end * unit)
    if cutlass.const_expr(spec.bulk):
        ring = make_ring(sm, rows[0].shape[1], spec)
        if tid == 0:
            # The counting kernel is ahead, and what was ahead of that one has ended.
            start_ring(ring, rows[0], first, end)
    follow_kernel_ahead()
    clear(tables, buckets, spec)
    cute.arch.sync_threads()
    count_own(chunk, tables, spec)
    if cutlass.const_expr(spec.alone):
        count_all(chunk, tables, spec)
    else:
        add_counts(counts, number, tables, spec)
    cute.arch.sync_threads()
    if warp == 0:
        scan_totals(tables, buckets)
    scan_warps(tables, buckets, spec)
    cute.arch.sync_threads()
    if (number == 0) & (part == 0):
        for i in cutlass.range(tid, buckets, spec.threads, unroll=1):
            result[2][i] = tables.offset[i]
    rank_own(chunk, tables, result, k, part == 0, spec)
    if cutlass.const_expr(spec.vector):
        cute.arch.sync_threads()
        if cutlass.const_expr(spec.bulk):
            if tid == 0:
                copy_by_ring(ring, *rows, tables.row, first, end, k)
            if warp > 0:
                zero_dropped(rows[1], tables.row, chunk.end - chunk.first, spec)
        else:
            copy_rows(*rows, tables.row, first, end, k, spec)


@cute.jit
def launch_count(
    ids: cute.Tensor, counts: cute.Tensor, unit: Int32, stream, spec: cutlass.Constexpr
):
    """One CTA for every row of `counts`."""
    count_kernel.set_name_prefix("count", remove_cutlass_symbol=True, keep_mangled_name=False)
    count_kernel(ids, counts, unit, spec).launch(
        grid=(counts.shape[0], 1, 1),
        block=(spec.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


@cute.jit
def launch_sort(ids: cute.Tensor, counts, result, rows, sizes, stream, spec: cutlass.Constexpr):
    """sizes: (num_experts, k, chunks, parts); chunks x parts CTAs."""
    num_experts, k, chunks, parts = sizes
    sort_kernel.set_name_prefix("sort", remove_cutlass_symbol=True, keep_mangled_name=False)
    sort_kernel(ids, counts, result, rows, num_experts, k, spec).launch(
        grid=(chunks, parts, 1),
        block=(spec.threads, 1, 1),
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def fake_counts():
    """The table [chunk][bucket]."""
    shape = (cute.sym_int(), cute.sym_int())
    return make_fake_compact_tensor(Int32, shape, stride_order=(1, 0), assumed_align=4)


def build_count(spec: CountSpec, options: str):
    """Compile for arguments ids [T k], counts [chunks, E + 1], unit."""
    ids = fake_vector(INDEX_TYPES[spec.id_dtype], cute.sym_int())
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_count, ids, fake_counts(), Int32(1), stream, spec, options=options)


def build_sort(spec: SortSpec, options: str):
    """Compile for arguments ids [T k], counts, (slot_idx [T k], row_token [T k], offsets [E + 1]),
    (src [T, bytes], out [T k, bytes]), (num_experts, k, chunks, parts).

    counts is None for `alone`, the rows are None without `vector`.
    """
    items, row_bytes = cute.sym_int(), cute.sym_int()
    rows = None
    if spec.vector:
        rows = (fake_rows(cute.sym_int(), row_bytes), fake_rows(items, row_bytes))
    return cute.compile(
        launch_sort,
        fake_vector(INDEX_TYPES[spec.id_dtype], items),
        None if spec.alone else fake_counts(),
        tuple(fake_vector(Int32, size) for size in (items, items, cute.sym_int())),
        rows,
        tuple(Int32(1) for _ in range(4)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        spec,
        options=options,
    )
