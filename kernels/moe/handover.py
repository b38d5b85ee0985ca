"""The h hand-over between phases 3 and 4: eight loader warps poll, quantise and stage h.

Every word of h in the scratchpad is its own ready flag (see docs/sync.md), so a word that was read
non-zero is the value and no fence is needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.quant import swizzled_offset, to_terms, unpack_bf16
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import Shared
from cute_moe.kernels.moe.spec import MAX_CHUNKS

POLL_LIMIT = 1 << 24  # polls of about 1 us each before a lost writer traps
NAP_NS, NAPS = 200, 30  # between polls while the CTA still has up units to issue


def rows_in_flight(spec) -> int:
    """Rows of h that a loader warp reads at once; two terms need registers of their own."""
    return 4 // spec.terms


@cute.jit
def chunk_slot(chunk: Int32, warp: Int32) -> Int32:
    """Slot that `warp` serves in `chunk`; rotated, since low slots are filled more often."""
    return chunk * 8 + ((warp + 4 * chunk) & 7)


@cute.jit
def load_row(address: cute.Pointer, words: cute.Tensor):
    """Read this lane's eight words of a row (16 features)."""
    for half in cutlass.range_constexpr(2):
        w = cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + 4 * half],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * half + i] = w[i]


@cute.jit
def count_written(
    h_in: cute.Pointer, chunk: Int32, limit: Int32, warp: Int32, shared: Shared, spec
) -> Int32:
    """How many chunks from `chunk` on, before `limit`, have this warp's row (as polled) written.

    Looks at four words of each row in up to eight chunks at once; a slot without a row counts.
    """
    lane = cute.arch.lane_idx()
    mine = chunk + (lane >> 2)
    entry = Int32(-1)
    if mine < limit:
        entry = shared.chunk_rows[chunk_slot(mine, warp)]
    word = Int32(1)
    if entry >= 0:
        # One word of units 0, 5, 10 and 15 of the 16 that make a row.
        address = h_in + (entry & 0xFF) * (spec.intermediate // 2) + (lane & 3) * 80 + 15
        word = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
    absent = cute.arch.vote_ballot_sync(word == 0)
    leading = cute.arch.popc((absent & -absent) - 1) >> 2
    return cutlass.min(leading, limit - chunk)


@cute.jit
def stage_rows(h_in: cute.Pointer, first: Int32, count: Int32, warp: Int32, shared: Shared, spec):
    """Quantise this warp's row of each chunk into shared memory and arrive on the chunk.

    All rows (at most `rows_in_flight`) are in flight before the first is looked at.
    """
    lane = cute.arch.lane_idx()
    rows = rows_in_flight(spec)
    words = cute.make_rmem_tensor((8, rows), Int32)
    entries = cute.make_rmem_tensor(rows, Int32)
    for r in cutlass.range_constexpr(rows):
        entries[r] = Int32(-1)
        if r < count:
            entries[r] = shared.chunk_rows[chunk_slot(first + r, warp)]
        if entries[r] >= 0:
            address = h_in + (entries[r] & 0xFF) * (spec.intermediate // 2) + lane * 8
            load_row(address, words[None, r])
    for r in cutlass.range_constexpr(rows):
        if entries[r] >= 0:
            address = h_in + (entries[r] & 0xFF) * (spec.intermediate // 2) + lane * 8
            stage_row(address, words[None, r], first + r, warp, shared, spec)
        if r < count:
            cute.arch.mbarrier_arrive(shared.h_ready + first + r)


@cute.jit
def stage_row(
    address: cute.Pointer, words: cute.Tensor, chunk: Int32, warp: Int32, shared: Shared, spec
):
    """Read a row again until all of it is there; quantise it into shared memory."""
    lane = cute.arch.lane_idx()
    polls = Int32(0)
    while cute.arch.vote_any_sync(missing(words)):
        load_row(address, words)
        polls = polls + 1
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")
    values = cute.make_rmem_tensor(16, Float32)
    for i in cutlass.range_constexpr(8):
        values[2 * i], values[2 * i + 1] = unpack_bf16(words[i])
    terms, scale = to_terms(values, 8, spec.terms)
    if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
        if chunk >= spec.h_slots:  # No slot is used more than twice.
            cute.arch.mbarrier_wait(shared.h_free + chunk % spec.h_slots, 0)
    row = chunk_slot(chunk, warp) & 7
    block = chunk % spec.h_slots * spec.h_blocks + (lane >> 3)
    for i in cutlass.range_constexpr(spec.terms):
        offset = (block * spec.terms + i) * 1024 + swizzled_offset(row, lane & 7)
        dst = cute.recast_ptr((shared.h_bytes + offset).align(16), dtype=Int32)
        cute.autovec_copy(terms[i], cute.make_tensor(dst, cute.make_layout(4)))
    if (lane & 7) == 0:
        shared.h_scale[(chunk * spec.h_blocks + (lane >> 3)) * 8 + row] = scale
    cute.arch.fence_view_async_shared()


@cute.jit
def missing(words: cute.Tensor):
    """Whether any of the words has not been written yet."""
    absent = words[0] == 0
    for i in cutlass.range_constexpr(1, 8):
        absent = absent | (words[i] == 0)
    return absent


@cute.jit
def sleep_before_gate(shared: Shared):
    """Wait for a while, but not longer than until the gate opens."""
    naps = Int32(0)
    while (naps < NAPS) & (not cute.arch.mbarrier_test_wait(shared.gate, 0)):
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(NAP_NS)])
        naps = naps + 1


@cute.jit
def load_h(h_words: cute.Pointer, warp: Int32, shared: Shared, spec: cutlass.Constexpr):
    """A loader warp's second life, after routing: stage its row of every chunk, in order.

    While the CTA still issues up units, one row is polled now and then, so that the polls take
    no bandwidth from the weights; after that (the gate), all rows as fast as they come.
    """
    cute.arch.mbarrier_wait(shared.lists, 0)
    h_in = h_words + shared.meta[2] * spec.h_words
    chunks = shared.meta[1]
    chunk = Int32(0)
    polls = Int32(0)
    while chunk < chunks:
        is_open = cute.arch.mbarrier_test_wait(shared.gate, 0)
        limit = chunks
        if not is_open:
            limit = chunk + 1
        ready = count_written(h_in, chunk, limit, warp, shared, spec)
        rows = cutlass.const_expr(rows_in_flight(spec))
        for first in cutlass.range(chunk, chunk + ready, rows, unroll=1):
            stage_rows(h_in, first, cutlass.min(chunk + ready - first, rows), warp, shared, spec)
            if (warp == 0) & (first == 0):
                stamp(shared.trace, "h_first", spec)
        chunk = chunk + ready
        polls = polls + 1
        if ready > 0:
            polls = Int32(0)
        elif not is_open:
            sleep_before_gate(shared)
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")
    if warp == 0:
        stamp(shared.trace, "h_ready", spec)


@cute.jit
def clear_next(h_words: cute.Pointer, shared: Shared, spec: cutlass.Constexpr):
    """Clear this CTA's share of the other parity's h for the next launch; one warp."""
    cta, _, _ = cute.arch.block_idx()
    cute.arch.mbarrier_wait(shared.lists, 0)
    other = h_words + (1 - shared.meta[2]) * spec.h_words
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    start = (cta * 32 + cute.arch.lane_idx()) * 4
    for i in cutlass.range(start, spec.h_words, spec.grid * 128, unroll=1):
        dst = cute.make_tensor((other + i).align(16), cute.make_layout(4))
        cute.autovec_copy(zero, dst)
