"""Stable counting sort of expert ids: counters per warp, bucket tables per CTA.

Ids are numbered item = token * k + j. A CTA ranks one chunk of consecutive items, each of its
ranking warps one part of the chunk. The bucket of an id outside 0 .. E - 1 is E: such items sort
behind all others. Everything here is called by whole CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_moe.kernels.dispatch.spec import MAX_CHUNK_ITEMS, WARP, SortSpec

FULL_MASK = 0xFFFFFFFF
BATCH = 20  # counts that a thread loads at once: all of its own for 132 chunks and 129 buckets


@dataclass(frozen=True)
class Chunk:
    """The items first .. end - 1 of ids [n]; experts are 0 .. num_experts - 1."""

    ids: cute.Tensor
    num_experts: Int32
    first: Int32
    end: Int32

    @cute.jit
    def bucket(self, item: Int32) -> Int32:
        """The expert of an item, or `num_experts` when it is out of range."""
        return bucket_of(self.ids[item], self.num_experts)


@dataclass(frozen=True)
class Tables:
    """Shared memory of a ranking CTA, Int32."""

    warp_counts: cute.Tensor  # [ranking warp][bucket]: items of earlier warps, then a running count
    before: cute.Tensor  # [bucket] items in chunks before this one
    total: cute.Tensor  # [bucket] items in all chunks
    offset: cute.Tensor  # [bucket] rows in front of the bucket
    row: cute.Tensor  # [item of the chunk] its row, or ~row for a dropped item


def allocate(sm: SmemAllocator, spec: SortSpec) -> Tables:
    """Lay out the tables."""

    def words(count: int):
        return cute.make_tensor(
            sm.allocate_array(Int32, count, byte_alignment=16), cute.make_layout(count)
        )

    counts = words(spec.rank_warps * spec.buckets)
    tables = [words(spec.buckets) for _ in range(3)]
    return Tables(counts, *tables, words(MAX_CHUNK_ITEMS) if spec.vector else tables[0])


@cute.jit
def bucket_of(expert, num_experts: Int32) -> Int32:
    """The expert, or `num_experts` when it is out of range."""
    bucket = num_experts
    if (Int64(expert) >= 0) & (Int64(expert) < num_experts):
        bucket = Int32(expert)
    return bucket


@cute.jit
def add_one(counters: cute.Tensor, index: Int32):
    """Count, in shared memory, in any order."""
    cute.arch.atomic_add(counters.iterator + index, Int32(1), sem="relaxed", scope="cta")


@cute.jit
def chunk_of(tokens: Int32, chunk: Int32, chunks: Int32):
    """The tokens first .. end - 1 of a chunk, when `tokens` are dealt out evenly."""
    share, rest = tokens // chunks, tokens % chunks
    first = chunk * share + cutlass.min(chunk, rest)
    end = first + share
    if chunk < rest:
        end = end + 1
    return first, end


@cute.jit
def warp_part(chunk: Chunk, spec: cutlass.Constexpr):
    """The items begin .. end - 1 of a chunk that this warp ranks; none for the other warps."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    step = spec.rank_warps * WARP
    share = (chunk.end - chunk.first + step - 1) // step * WARP
    begin = cutlass.min(chunk.first + warp * share, chunk.end)
    return begin, cutlass.min(begin + share, chunk.end)


@cute.jit
def clear(tables: Tables, buckets: Int32, spec: cutlass.Constexpr):
    """Zero the counters of `buckets` buckets."""
    tid, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(tid, buckets, spec.threads, unroll=1):
        tables.before[i] = Int32(0)
        tables.total[i] = Int32(0)
        for w in cutlass.range_constexpr(spec.rank_warps):
            tables.warp_counts[w * spec.buckets + i] = Int32(0)


@cute.jit
def count_own(chunk: Chunk, tables: Tables, spec: cutlass.Constexpr):
    """Count the chunk's items by warp."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    begin, end = warp_part(chunk, spec)
    for item in cutlass.range(begin + tid % WARP, end, WARP, unroll=4):
        add_one(tables.warp_counts, warp * spec.buckets + chunk.bucket(item))


@cute.jit
def count_all(chunk: Chunk, tables: Tables, spec: cutlass.Constexpr):
    """Count all items, and those before the chunk: a CTA that needs no other one's counts."""
    tid, _, _ = cute.arch.thread_idx()
    for item in cutlass.range(tid, chunk.ids.shape[0], spec.threads, unroll=4):
        bucket = chunk.bucket(item)
        add_one(tables.total, bucket)
        if item < chunk.first:
            add_one(tables.before, bucket)


@cute.jit
def add_counts(counts, number: Int32, tables: Tables, spec: cutlass.Constexpr):
    """Add up the table [chunk][bucket] that the counting kernel wrote, for chunk `number`.

    A thread has a batch of loads in flight, since the rows that are read meanwhile slow them down.
    """
    tid, _, _ = cute.arch.thread_idx()
    chunks, buckets = counts.shape[0], counts.shape[1]
    slices = cutlass.max(spec.threads // buckets, Int32(1))
    found = cute.make_rmem_tensor(BATCH, Int32)
    for i in cutlass.range(tid, buckets * slices, spec.threads, unroll=1):
        bucket = i % buckets
        before, total = Int32(0), Int32(0)
        for first in cutlass.range(i // buckets, chunks, slices * BATCH, unroll=1):
            for j in cutlass.range_constexpr(BATCH):
                found[j] = Int32(0)
                if first + j * slices < chunks:
                    found[j] = counts[first + j * slices, bucket]
            for j in cutlass.range_constexpr(BATCH):
                total = total + found[j]
                if first + j * slices < number:
                    before = before + found[j]
        cute.arch.atomic_add(tables.total.iterator + bucket, total, sem="relaxed", scope="cta")
        cute.arch.atomic_add(tables.before.iterator + bucket, before, sem="relaxed", scope="cta")


@cute.jit
def scan_totals(tables: Tables, buckets: Int32):
    """Exclusive prefix sums of `total` into `offset`; one warp."""
    lane = cute.arch.lane_idx()
    carry = Int32(0)
    for base in cutlass.range(0, buckets, WARP, unroll=1):
        own = Int32(0)
        if base + lane < buckets:
            own = tables.total[base + lane]
        scan = own
        for s in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(scan, offset=1 << s, mask_and_clamp=0)
            if lane >= (1 << s):
                scan = scan + left
        if base + lane < buckets:
            tables.offset[base + lane] = carry + scan - own
        carry = carry + cute.arch.shuffle_sync(scan, offset=WARP - 1)


@cute.jit
def scan_warps(tables: Tables, buckets: Int32, spec: cutlass.Constexpr):
    """Turn the warps' counts into the slot of each warp's first item of a bucket."""
    tid, _, _ = cute.arch.thread_idx()
    for bucket in cutlass.range(tid, buckets, spec.threads, unroll=1):
        running = tables.before[bucket]
        for w in cutlass.range_constexpr(spec.rank_warps):
            count = tables.warp_counts[w * spec.buckets + bucket]
            tables.warp_counts[w * spec.buckets + bucket] = running
            running = running + count


@cute.jit
def rank_own(chunk: Chunk, tables: Tables, result, k: Int32, writes, spec: cutlass.Constexpr):
    """Slot and row of every item of the chunk, in item order.

    `result`: (slot_idx [n], row_token [n]), written if `writes`. With rows to copy also
    `tables.row`.
    """
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    begin, end = warp_part(chunk, spec)
    for base in cutlass.range(begin, end, WARP, unroll=1):
        item = base + lane
        bucket = Int32(-1)
        if item < end:
            bucket = chunk.bucket(item)
        peers = Int32(cute.arch.match_sync(FULL_MASK, bucket, kind="any"))
        rank = cute.arch.popc(peers & ((Int32(1) << lane) - 1))
        counter = warp * spec.buckets + cutlass.max(bucket, Int32(0))
        slot = tables.warp_counts[counter] + rank
        cute.arch.sync_warp()
        if (rank == 0) & (bucket >= 0):
            tables.warp_counts[counter] = slot + cute.arch.popc(peers)
        cute.arch.sync_warp()
        if bucket >= 0:
            row = tables.offset[bucket] + slot
            token = item // k
            marked = row
            if bucket == chunk.num_experts:
                slot = Int32(-1)
                token = Int32(-1)
                marked = ~row
            if writes:
                result[0][item] = slot
                result[1][row] = token
            if cutlass.const_expr(spec.vector):
                tables.row[item - chunk.first] = marked
