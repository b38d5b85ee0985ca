"""The h hand-over between phases 3 and 4: eight loader warps poll, quantise and stage h.

Every word of h in the scratchpad is its own ready flag (see docs/sync.md), so a word that was read
non-zero is the value and no fence is needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_moe.kernels.device.quant import swizzled_octet, to_terms, tree
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import (
    ARRIVALS_SHIFT,
    CHUNK_SHIFT,
    FEW_CHUNKS,
    LOADER_WARPS,
    PAIR_MASK,
    PLACE_SHIFT,
    Shared,
)
from cute_moe.kernels.moe.spec import MAX_CHUNKS

POLL_LIMIT = 1 << 24  # polls of about 1 us each before a lost writer traps
NAP_NS, NAPS = 200, 60  # between polls while the CTA still has up units to issue
ROW_LANES = 16  # lanes that load and quantise a row of h; a warp takes two rows at once
PIECE_WORDS = 4  # of a 16-byte load


@cute.jit
def piece_of(j: cutlass.Constexpr) -> Int32:
    """Which 16 bytes (8 features) of its block of 128 a lane keeps as its j-th piece.

    Four lanes have a block; the order differs between blocks, so that the stores of what they
    quantised do not meet in one shared-memory bank.
    """
    return (cute.arch.lane_idx() + 4 * j) & 15


@cute.jit
def load_pieces(h_in: cute.Pointer, row: Int32, words: cute.Tensor, spec):
    """Read this lane's 16 words (32 features of one block) of a listed row."""
    block = (cute.arch.lane_idx() >> 2) & 3
    start = h_in + (row & PAIR_MASK) * (spec.intermediate // 2) + block * 64
    for j in cutlass.range_constexpr(4):
        w = cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[start + piece_of(j) * PIECE_WORDS],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * j + i] = w[i]


@cute.jit
def written_until(h_in: cute.Pointer, first: Int32, end: Int32, shared: Shared, spec) -> Int32:
    """The first of the rows first, first + 8 before `end` that is not yet written, or `end`.

    As polled: two words of each of the two rows, since every word costs the weights a sector.
    """
    lane = cute.arch.lane_idx()
    mine = first + (lane >> 1) * LOADER_WARPS
    word = Int32(1)
    if mine < end:
        # One word of units 5 and 15 of the 16 that make a row.
        pair = shared.rows[mine] & PAIR_MASK
        address = h_in + pair * (spec.intermediate // 2) + (lane & 1) * 160 + 95
        word = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
    absent = cute.arch.vote_ballot_sync(word == 0)
    leading = cute.arch.popc((absent & -absent) - 1) >> 1
    return cutlass.min(first + leading * LOADER_WARPS, end)


@cute.jit
def chunk_of(row: Int32) -> Int32:
    """The chunk of a listed row."""
    return (row >> CHUNK_SHIFT) & (MAX_CHUNKS - 1)


@cute.jit
def stage_two(h_in: cute.Pointer, first: Int32, end: Int32, shared: Shared, spec) -> Boolean:
    """Read the listed rows `first` and, before `end`, first + 8; whether they are all written.

    If so, they are quantised into shared memory, and their chunks get the arrivals.
    """
    lane = cute.arch.lane_idx()
    mine = first + lane // ROW_LANES * LOADER_WARPS
    row = Int32(0)
    words = cute.make_rmem_tensor(16, Int32)
    words.fill(1)
    if mine < end:
        row = shared.rows[mine]
        load_pieces(h_in, row, words, spec)
    complete = not cute.arch.vote_any_sync(missing(words))
    if complete:
        if cutlass.const_expr(spec.h_slots < MAX_CHUNKS):
            for r in cutlass.range_constexpr(2):
                if first + r * LOADER_WARPS < end:
                    # By the whole warp: lanes in one `mbarrier_wait` must share the barrier.
                    listed = shared.rows[first + r * LOADER_WARPS]
                    used = chunk_of(cute.arch.make_warp_uniform(listed))
                    if used >= spec.h_slots:  # No slot is used more than twice.
                        cute.arch.mbarrier_wait(shared.h_free + used % spec.h_slots, 0)
            cute.arch.sync_warp()
        terms, scale = to_terms(words, 4, spec.terms)
        if mine < end:
            chunk = chunk_of(row)
            place = (row >> PLACE_SHIFT) & 7
            block = (lane >> 2) & 3
            for i in cutlass.range_constexpr(spec.terms):
                octets = cute.recast_tensor(terms[i], Int64)
                atom = (chunk % spec.h_slots * spec.h_blocks + block) * spec.terms + i
                for j in cutlass.range_constexpr(4):
                    target = atom * 128 + swizzled_octet(place, piece_of(j))
                    cute.make_tensor(shared.h_octets + target, cute.make_layout(1))[0] = octets[j]
            if (lane & 3) == 0:
                shared.h_scale[(chunk * spec.h_blocks + block) * 8 + place] = scale
            cute.arch.fence_view_async_shared()
            # The first row of a chunk also stands for the places that the chunk leaves empty.
            arrivals = row >> ARRIVALS_SHIFT
            cute.arch.mbarrier_arrive(shared.h_ready + chunk, arrive_count=arrivals)
    return complete


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
def load_h(
    h_words: cute.Pointer, warp: Int32, num_tokens: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """A loader warp's second life, after routing: stage rows warp, warp + 8, ... of the list.

    Polls and reads take bandwidth from the weights. While the CTA still issues up units, one row
    is polled now and then; after that (the gate) two words of two rows; and once the weights
    of the CTA have landed, the rows themselves are read until they are complete. Few chunks are
    loaded so fast that nothing is gained by looking earlier; for them `landed` comes a little
    before the last weights do.
    """
    cute.arch.mbarrier_wait(shared.lists, 0)
    h_in = h_words + cute.arch.make_warp_uniform(shared.meta[2]) * spec.h_words
    rows = num_tokens * spec.top_k
    stop = warp + (rows - warp + LOADER_WARPS - 1) // LOADER_WARPS * LOADER_WARPS
    if cutlass.const_expr(spec.two_groups_fit):
        if shared.meta[1] <= FEW_CHUNKS:
            cute.arch.mbarrier_wait(shared.landed, 0)
    row = warp
    end = row  # of the rows that are known to be written, or are read until they are
    polls = Int32(0)
    while row < stop:
        if row == end:
            end = stop
            if not cute.arch.mbarrier_test_wait(shared.landed, 0):
                is_open = cute.arch.mbarrier_test_wait(shared.gate, 0)
                ahead = Int32(LOADER_WARPS)
                if is_open:
                    ahead = Int32(2 * LOADER_WARPS)
                end = written_until(h_in, row, cutlass.min(row + ahead, stop), shared, spec)
                if (row == end) & (not is_open):
                    sleep_before_gate(shared)
        polls = polls + 1
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")
        if row < end:
            if stage_two(h_in, row, end, shared, spec):
                if (warp == 0) & (row == 0):
                    stamp(shared.trace, "h_first", spec)
                row = cutlass.min(row + 2 * LOADER_WARPS, end)
                polls = Int32(0)
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
