"""Which rows no token fills, found without scratch and without waiting for other CTAs.

A CTA looks at every token's row, notes those of its own range in a bitmap in shared memory, and
zeroes the others. All functions are called by whole CTAs of (lanes, rows) threads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_moe.kernels.dispatch.rows import row_of, zero_row

SCAN = 2  # tokens that a thread has in flight


@cute.jit
def this_thread():
    """(number of the thread, threads of the CTA)."""
    x, y, _ = cute.arch.thread_idx()
    lanes, rows, _ = cute.arch.block_dim()
    return y * lanes + x, lanes * rows


def scan_rows(pairs, token: Int32, step: Int32, rows: Int32) -> list:
    """Rows of tokens token, token + step, ..; behind the last token, the last one's row."""
    expert, slot, offsets = pairs
    last = expert.shape[0] - 1
    tokens = [cutlass.min(token + i * step, last) for i in range(SCAN)]
    found = [(expert[t], slot[t]) for t in tokens]
    return [row_of(e, s, offsets, rows) for e, s in found]


@cute.jit
def mark_rows(bitmap: cute.Tensor, pairs, rows: Int32, first: Int32, end: Int32):
    """Set the bit of every row first .. end - 1 that some token fills."""
    tid, threads = this_thread()
    token = tid
    while token < pairs[0].shape[0]:
        found = scan_rows(pairs, token, threads, rows)
        for i in cutlass.range_constexpr(SCAN):
            if (found[i] >= first) & (found[i] < end):
                bit = found[i] - first
                word = bitmap.iterator + (bit >> 5)
                cute.arch.atomic_or(word, Int32(1) << (bit & 31), sem="relaxed", scope="cta")
        token = token + SCAN * threads


@cute.jit
def zero_unfilled(pairs, out: cute.Tensor, first: Int32, end: Int32, spec: cutlass.Constexpr):
    """Zero those rows first .. end - 1 of `out` that no token fills."""
    bitmap = SmemAllocator().allocate_tensor(Int32, cute.make_layout(spec.window_rows // 32), 16)
    tid, threads = this_thread()
    lane, group, _ = cute.arch.thread_idx()
    lanes, groups, _ = cute.arch.block_dim()
    while first < end:
        stop = cutlass.min(end, first + spec.window_rows)
        word = tid
        while word * 32 < stop - first:
            bitmap[word] = Int32(0)
            word = word + threads
        cute.arch.sync_threads()
        mark_rows(bitmap, pairs, out.shape[0], first, stop)
        cute.arch.sync_threads()
        row = first + group
        while row < stop:
            if ((bitmap[(row - first) >> 5] >> ((row - first) & 31)) & 1) == 0:
                zero_row(out, row, lane, lanes, spec.vector)
            row = row + groups
        cute.arch.sync_threads()
        first = stop


@cute.jit
def share_of_dropped(pairs, rows: Int32, cta: Int32, tokens_per_cta: Int32):
    """The rows that a CTA with dropped tokens has to look after: (first, end).

    All rows are dealt out to such CTAs in proportion to the tokens that they drop.
    """
    counters = SmemAllocator().allocate_tensor(Int32, cute.make_layout(3), 4)
    tid, threads = this_thread()
    if tid < 3:
        counters[tid] = Int32(0)
    cute.arch.sync_threads()
    before, own, total = Int32(0), Int32(0), Int32(0)
    token = tid
    while token < pairs[0].shape[0]:
        found = scan_rows(pairs, token, threads, rows)
        for i in cutlass.range_constexpr(SCAN):
            owner = (token + i * threads) // tokens_per_cta
            if (token + i * threads < pairs[0].shape[0]) & (found[i] < 0):
                total = total + 1
                if owner < cta:
                    before = before + 1
                if owner == cta:
                    own = own + 1
        token = token + SCAN * threads
    counts = [before, own, total]
    for i in cutlass.range_constexpr(3):
        cute.arch.atomic_add(counters.iterator + i, counts[i], sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    first = Int64(rows) * counters[0] // counters[2]
    end = Int64(rows) * (counters[0] + counters[1]) // counters[2]
    return Int32(first), Int32(end)
