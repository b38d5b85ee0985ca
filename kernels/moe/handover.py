"""The h hand-over between phases 3 and 4: eight loader warps poll, quantise and stage h.

Every word of h in the scratchpad is its own ready flag (see docs/sync.md), so a word that was read
non-zero is the value and no fence is needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_moe.kernels.device.quant import swizzled_octet, to_terms, tree
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import Shared
from cute_moe.kernels.moe.spec import MAX_CHUNKS

POLL_LIMIT = 1 << 24  # polls of about 1 us each before a lost writer traps
NAP_NS, NAPS = 200, 30  # between polls while the CTA still has up units to issue
ROW_LANES = 16  # lanes that load and quantise a row of h; a warp takes two rows at once
PIECE_WORDS = 4  # of a 16-byte load


@cute.jit
def chunk_slot(chunk: Int32, warp: Int32) -> Int32:
    """Slot that `warp` serves in `chunk`; rotated, since low slots are filled more often."""
    return chunk * 8 + ((warp + 4 * chunk) & 7)


@cute.jit
def piece_of(j: cutlass.Constexpr) -> Int32:
    """Which 16 bytes (8 features) of its block of 128 a lane keeps as its j-th piece.

    Four lanes have a block; the order differs between blocks, so that the stores of what they
    quantised do not meet in one shared-memory bank.
    """
    return (cute.arch.lane_idx() + 4 * j) & 15


@cute.jit
def load_pieces(h_in: cute.Pointer, entry: Int32, words: cute.Tensor, spec):
    """Read this lane's 16 words (32 features of one block) of the row of `entry`."""
    block = (cute.arch.lane_idx() >> 2) & 3
    row = h_in + (entry & 0xFF) * (spec.intermediate // 2) + block * 64
    for j in cutlass.range_constexpr(4):
        w = cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[row + piece_of(j) * PIECE_WORDS],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * j + i] = w[i]


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
def stage_two(h_in: cute.Pointer, first: Int32, end: Int32, warp: Int32, shared: Shared, spec):
    """Wait for this warp's rows of chunks first and, before `end`, first + 1; quantise them into
    shared memory and arrive on their chunks."""
    lane = cute.arch.lane_idx()
    chunk = first + lane // ROW_LANES
    entry = Int32(-1)
    if chunk < end:
        entry = shared.chunk_rows[chunk_slot(chunk, warp)]
    words = cute.make_rmem_tensor(16, Int32)
    if entry >= 0:
        load_pieces(h_in, entry, words, spec)
    polls = Int32(0)
    while cute.arch.vote_any_sync((entry >= 0) & missing(words)):
        if (entry >= 0) & missing(words):
            load_pieces(h_in, entry, words, spec)
        polls = polls + 1
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")
    terms, scale = to_terms(words, 4, spec.terms)
    if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
        for r in cutlass.range_constexpr(2):
            if (first + r >= spec.h_slots) & (first + r < end):  # No slot is used more than twice.
                cute.arch.mbarrier_wait(shared.h_free + (first + r) % spec.h_slots, 0)
    row = chunk_slot(chunk, warp) & 7
    block = (lane >> 2) & 3
    if entry >= 0:
        for i in cutlass.range_constexpr(spec.terms):
            octets = cute.recast_tensor(terms[i], Int64)
            atom = (chunk % spec.h_slots * spec.h_blocks + block) * spec.terms + i
            for j in cutlass.range_constexpr(4):
                place = atom * 128 + swizzled_octet(row, piece_of(j))
                cute.make_tensor(shared.h_octets + place, cute.make_layout(1))[0] = octets[j]
        if (lane & 3) == 0:
            shared.h_scale[(chunk * spec.h_blocks + block) * 8 + row] = scale
    cute.arch.fence_view_async_shared()
    for r in cutlass.range_constexpr(2):
        if (first + r < end) & (lane // ROW_LANES == r):
            cute.arch.mbarrier_arrive(shared.h_ready + first + r)


@cute.jit
def missing(words: cute.Tensor):
    """Whether any of the words has not been written yet."""
    lowest = tree(smaller, [words[i] for i in range(cute.size(words))])
    return lowest == 0


@cute.jit
def smaller(a: Int32, b: Int32) -> Int32:
    """The smaller of two unsigned words."""
    return cute.arch.inline_ptx(
        "min.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b]
    )


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

    Polls must not take bandwidth from the weights. While the CTA still issues up units, one row is
    polled now and then; after that (the gate) a few words of all rows; and once all weights
    of the CTA have landed, the rows themselves are read until they are complete. One or two chunks
    are loaded so fast that nothing is gained by looking before that.
    """
    cute.arch.mbarrier_wait(shared.lists, 0)
    h_in = h_words + shared.meta[2] * spec.h_words
    chunks = shared.meta[1]
    chunk = Int32(0)
    polls = Int32(0)
    if cutlass.const_expr(spec.two_groups_fit):
        if chunks <= 2:  # Hence two groups at most.
            cute.arch.mbarrier_wait(shared.landed, 0)
    while chunk < chunks:
        ready = chunks - chunk
        if not cute.arch.mbarrier_test_wait(shared.landed, 0):
            is_open = cute.arch.mbarrier_test_wait(shared.gate, 0)
            limit = chunks
            if not is_open:
                limit = chunk + 1
            ready = count_written(h_in, chunk, limit, warp, shared, spec)
            if (ready == 0) & (not is_open):
                sleep_before_gate(shared)
        for first in cutlass.range(chunk, chunk + ready, 2, unroll=1):
            stage_two(h_in, first, chunk + ready, warp, shared, spec)
        if (warp == 0) & (chunk == 0) & (ready > 0):
            stamp(shared.trace, "h_first", spec)
        chunk = chunk + ready
        polls = polls + 1
        if ready > 0:
            polls = Int32(0)
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
