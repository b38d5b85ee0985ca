"""The h hand-over between phases 3 and 4: loader warps poll, quantise and stage h.

Every word of h in the scratchpad is its own ready flag (see docs/sync.md), so a word that was read
non-zero is the value and no fence is needed.

The rows of h, cut into slices, make a list of *items* in the order in which the warpgroups take
them: by group, slice and row. Loader i of 8 has items i, i + 8, ... and takes a few at once; so
they are dealt out evenly, however full the chunks are. The rows of a chunk's slice fill one slot of
h; a loader arrives on every slot, in order, once its items in it are staged, also on those where it
has none.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_moe.kernels.device.quant import swizzled_octet, to_terms, tree
from cute_moe.kernels.device.ring import fill_by_lanes, pass_by_warps, stage_of, wait_empty
from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.memory import (
    ATOM_BYTES,
    CHUNK_SHIFT,
    CHUNKS,
    COUNT_SHIFT,
    FIRST_MASK,
    LOADER_WARPS,
    PAIR_MASK,
    PARITY,
    PLACE_SHIFT,
    ROWS,
    WARP,
    Shared,
)
from cute_moe.kernels.moe.spec import BLOCK, CHUNK_ROWS, MoeSpec
from cute_moe.kernels.moe.stream import few_rows

POLL_LIMIT = 1 << 24  # polls of about 1 us each before a lost writer traps
NAP_NS, NAPS = 200, 60  # between polls while the CTA still has up units to issue
PIECE_WORDS = 4  # of a 16-byte load: 8 features
PIECES = 4  # of a lane: 32 features
BLOCK_LANES = 4  # that share a block of 128


def item_lanes(spec: MoeSpec) -> int:
    """Lanes that load and quantise one item."""
    lanes = BLOCK_LANES * spec.slice_blocks
    return 1 << (lanes - 1).bit_length()


class Item(NamedTuple):
    """A row of h, cut to a slice, as one lane sees it."""

    row: Int32  # its entry in `rows`
    slice_: Int32
    turn: Int32  # the slot's step: slots of the half before it
    group: Int32  # where the search for the next item starts


class Progress(NamedTuple):
    """How far a loader is."""

    item: Int32  # next one
    turn: Int32  # its slot; all slots before it have this loader's arrivals
    free: Int32  # slots that are known to be free
    group: Int32  # of the item


@cute.jit
def find_item(number: Int32, group: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Item `number`; group: one that does not start behind it."""
    slice_ = Int32(0)
    if cutlass.const_expr(spec.slices == 1):
        row = shared.rows[number]
        turn = row >> CHUNK_SHIFT
    else:
        rows = shared.group_rows[group]
        while number >= ((rows & FIRST_MASK) + (rows >> COUNT_SHIFT)) * spec.slices:
            group = group + 1
            rows = shared.group_rows[group]
        first = rows & FIRST_MASK
        count = rows >> COUNT_SHIFT
        inside = number - first * spec.slices
        slice_ = inside // count
        row = shared.rows[first + inside % count]
        chunks = shared.group_chunks[group]
        # Slots of the groups before, of the slices before, of the chunks before.
        turn = (chunks & FIRST_MASK) * (spec.slices - 1) + (row >> CHUNK_SHIFT)
        turn = turn + slice_ * (chunks >> COUNT_SHIFT)
    return Item(row, slice_, turn, group)


@cute.jit
def piece_of(j: cutlass.Constexpr, spec: cutlass.Constexpr) -> Int32:
    """Which 16 bytes (8 features) of its block of 128 a lane keeps as its j-th piece.

    Lanes in a row share the features of a scale; the order differs between blocks, so that the
    stores of what they quantised do not meet in one shared-memory bank.
    """
    lane = cute.arch.lane_idx()
    piece = (lane + BLOCK_LANES * j) & (BLOCK // 8 - 1)
    if cutlass.const_expr(spec.h_block < BLOCK):
        lanes = cutlass.const_expr(spec.h_block // 32)
        pieces = cutlass.const_expr(spec.h_block // 8)
        turned = j + ((lane >> 2) & 3)
        inside = ((lane & (lanes - 1)) + lanes * turned) & (pieces - 1)
        piece = (lane & 3) // lanes * pieces + inside
    return piece


def block_of(spec: MoeSpec):
    """The block of 128 of its slice that a lane works on."""
    return cute.arch.lane_idx() % item_lanes(spec) // BLOCK_LANES


@cute.jit
def load_pieces(h_in: cute.Pointer, item: Item, words: cute.Tensor, spec: cutlass.Constexpr):
    """Read this lane's 16 words (32 features of one block); those beyond N are zeros at once."""
    block = block_of(spec)
    row = (item.row & PAIR_MASK) * (spec.intermediate // 2)
    first = (item.slice_ * spec.slice_blocks + block) * BLOCK
    for j in cutlass.range_constexpr(PIECES):
        feature = first + piece_of(j, spec) * 8
        inside = Boolean(True)
        if cutlass.const_expr(spec.slices * spec.slice_blocks * BLOCK > spec.intermediate):
            inside = feature < spec.intermediate
        if cutlass.const_expr(item_lanes(spec) > BLOCK_LANES * spec.slice_blocks):
            inside = inside & (block < spec.slice_blocks)
        for i in cutlass.range_constexpr(PIECE_WORDS):
            words[PIECE_WORDS * j + i] = Int32(-0x7FFF8000)  # two -0.0
        if inside:
            w = cute.arch.inline_ptx(
                "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[h_in + row + feature // 2],
            )
            for i in cutlass.range_constexpr(PIECE_WORDS):
                words[PIECE_WORDS * j + i] = w[i]


@cute.jit
def written_until(h_in: cute.Pointer, first: Int32, end: Int32, group, shared, spec) -> Int32:
    """The first of the items first, first + 8, ... before `end` that is not yet written, or `end`.

    As polled: two words of each item, since every word costs the weights a sector.
    """
    lane = cute.arch.lane_idx()
    mine = first + (lane >> 1) * LOADER_WARPS
    word = Int32(1)
    if mine < end:
        item = find_item(mine, group, shared, spec)
        features = cutlass.const_expr(spec.slice_blocks * BLOCK)
        # Of the units that make the slice, one a third in and the last.
        feature = item.slice_ * features + features * 3 // 8 - 2
        if (lane & 1) == 1:
            feature = item.slice_ * features + features - 2
        feature = cutlass.min(feature, spec.intermediate - 2)
        address = h_in + (item.row & PAIR_MASK) * (spec.intermediate // 2) + feature // 2
        word = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
    absent = cute.arch.vote_ballot_sync(word == 0)
    leading = cute.arch.popc((absent & -absent) - 1) >> 1
    return cutlass.min(first + leading * LOADER_WARPS, end)


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
def pass_slots(free: Int32, until: Int32, slots):
    """Wait until the slots up to `until`, from `free` on, may be filled; the whole warp."""
    for turn in cutlass.range(free, until, unroll=1):
        wait_empty(slots, turn)
    return cutlass.max(free, until)


@cute.jit
def pass_slot(turn: Int32, free: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Arrive on a slot that the loader has no item in; slots before `free` are known to be free.

    In order and one after the other: a slot becomes free only when all loaders have arrived on
    those before it.
    """
    if cutlass.const_expr(spec.slots_reused):
        if turn >= free:
            wait_empty(shared.h_slots, turn)
    pass_by_warps(shared.h_slots, turn, LOADER_WARPS)


@cute.jit
def stage_item(words: cute.Tensor, item: Item, slot: Int32, taken, shared: Shared, spec):
    """Quantise the lane's words, by a whole warp, and store them where `taken` says so."""
    lanes = cutlass.const_expr(spec.h_block // 32)
    terms, scale = to_terms(words, lanes, spec.terms)
    place = (item.row >> PLACE_SHIFT) & (CHUNK_ROWS - 1)
    block = block_of(spec)
    if cutlass.const_expr(item_lanes(spec) > BLOCK_LANES * spec.slice_blocks):
        taken = taken & (block < spec.slice_blocks)
    if taken:
        for t in cutlass.range_constexpr(spec.terms):
            octets = cute.recast_tensor(terms[t], Int64)
            atom = (slot * spec.slice_blocks + block) * spec.terms + t
            for j in cutlass.range_constexpr(PIECES):
                at = atom * (ATOM_BYTES // 8) + swizzled_octet(place, piece_of(j, spec))
                cute.make_tensor(shared.h_octets + at, cute.make_layout(1))[0] = octets[j]
        lane = cute.arch.lane_idx() % BLOCK_LANES
        if lane % lanes == 0:
            scales = slot * spec.slice_h_scales + block * (BLOCK // spec.h_block)
            shared.h_scale[(scales + lane // lanes) * CHUNK_ROWS + place] = scale
        cute.arch.fence_view_async_shared()


@cute.jit
def arrive_until(item: Item, taken, at: Progress, until: Int32, free: Int32, shared: Shared, spec):
    """Arrive on the slots from the first staged item's up to `until`; the slots known to be free.

    A chunk has at most as many rows as there are loaders, so that a loader has one item in a slot
    or none. The lanes of an item arrive each for its own stores. Where no slot is used twice, the
    others have been passed at the start.
    """
    width = cutlass.const_expr(item_lanes(spec))
    if taken:
        fill_by_lanes(shared.h_slots, item.turn, LOADER_WARPS * width, WARP // width)
    if cutlass.const_expr(spec.slots_reused):
        for turn in cutlass.range(at.turn, until, unroll=1):
            if not cute.arch.vote_any_sync(taken & (item.turn == turn)):
                pass_slot(turn, free, shared, spec)
        free = cutlass.max(free, until)
    return free


@cute.jit
def turn_of(number: Int32, items: Int32, group: Int32, shared: Shared, spec: cutlass.Constexpr):
    """(slot of item `number`, its group); behind the last item: all slots."""
    turn = shared.meta[CHUNKS] * spec.slices
    if number < items:
        item = find_item(number, group, shared, spec)
        turn = item.turn
        group = item.group
    return turn, group


@cute.jit
def pass_at_start(warp: Int32, items: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Arrive on slots that the loader has no item in: the slot of its first item, its group.

    On those before its first item, or on all where no slot is used twice.
    """
    passed = Int32(0)
    turn, group = turn_of(warp, items, Int32(0), shared, spec)
    if cutlass.const_expr(spec.slots_reused):
        for slot in cutlass.range(turn, unroll=1):
            pass_slot(slot, Int32(0), shared, spec)
    else:
        next_group = group
        for number in cutlass.range(warp, items + LOADER_WARPS, LOADER_WARPS, unroll=1):
            until, next_group = turn_of(number, items, next_group, shared, spec)
            for slot in cutlass.range(passed, until, unroll=1):
                pass_slot(slot, Int32(0), shared, spec)
            passed = cutlass.max(passed, until + 1)
    return turn, group


@cute.jit
def stage_some(
    h_in: cute.Pointer, at: Progress, end: Int32, items: Int32, shared: Shared, spec
) -> Progress:
    """Read the items from `at` on, before `end`, as many as the warp has lanes for.

    If all of them are written, they are quantised into their slots, and the slots before the next
    item's get this loader's arrivals. items: how many there are.
    """
    width = cutlass.const_expr(item_lanes(spec))
    at_once = cutlass.const_expr(WARP // width)
    mine = at.item + cute.arch.lane_idx() // width * LOADER_WARPS
    item = find_item(cutlass.min(mine, items - 1), at.group, shared, spec)
    taken = Boolean(mine < end)
    if cutlass.const_expr(spec.slots_reused):
        # The loader must not wait for a slot that needs its own arrival on an earlier one.
        taken = taken & (item.turn - at.turn < spec.h_slots)
    words = cute.make_rmem_tensor(PIECES * PIECE_WORDS, Int32)
    words.fill(1)
    if taken:
        load_pieces(h_in, item, words, spec)
    # Where the next item is: found while the loads run, since the last arrivals end the launch.
    following = at.item + at_once * LOADER_WARPS
    next_turn, next_group = turn_of(following, items, at.group, shared, spec)
    if not cute.arch.vote_any_sync(missing(words)):
        staged = cute.arch.popc(cute.arch.vote_ballot_sync(taken)) // width
        free = at.free
        if cutlass.const_expr(spec.slots_reused):
            furthest = cute.arch.shuffle_sync(item.turn, offset=(staged - 1) * width)
            free = pass_slots(free, furthest + 1, shared.h_slots)
            cute.arch.sync_warp()
        stage_item(words, item, stage_of(shared.h_slots, item.turn), taken, shared, spec)
        if staged < at_once:
            following = at.item + staged * LOADER_WARPS
            next_turn, next_group = turn_of(following, items, at.group, shared, spec)
        free = arrive_until(item, taken, at, next_turn, free, shared, spec)
        at = Progress(following, next_turn, free, next_group)
    return at


@cute.jit
def sleep_before_gate(shared: Shared):
    """Wait for a while, but not longer than until the gate opens."""
    naps = Int32(0)
    while (naps < NAPS) & (not cute.arch.mbarrier_test_wait(shared.gate, 0)):
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Int32(NAP_NS)])
        naps = naps + 1


@cute.jit
def load_h(h_words: cute.Pointer, warp: Int32, shared: Shared, spec: cutlass.Constexpr):
    """A loader warp's second life, after routing: stage every eighth item.

    Polls and reads take bandwidth from the weights. While the CTA still issues up units, one item
    is polled now and then; after that (the gate) two words of a few items; and once the weights
    of the CTA have landed, the rows themselves are read until they are complete. Few rows are
    loaded so fast that nothing is gained by looking earlier; for them `landed` comes a little
    before the last weights do.
    """
    cute.arch.mbarrier_wait(shared.lists, 0)
    h_in = h_words + cute.arch.make_warp_uniform(shared.meta[PARITY]) * spec.h_words
    width = cutlass.const_expr(WARP // item_lanes(spec))
    items = cute.arch.make_warp_uniform(shared.meta[ROWS]) * spec.slices
    turn, group = pass_at_start(warp, items, shared, spec)
    at = Progress(warp, turn, turn, group)
    if few_rows(shared, spec):
        cute.arch.mbarrier_wait(shared.landed, 0)
    end = at.item  # of the items that are known to be written, or are read until they are
    polls = Int32(0)
    while at.item < items:
        if at.item >= end:
            end = items
            if not cute.arch.mbarrier_test_wait(shared.landed, 0):
                is_open = cute.arch.mbarrier_test_wait(shared.gate, 0)
                ahead = Int32(1)
                if is_open:
                    ahead = Int32(width * LOADER_WARPS)
                end = cutlass.min(at.item + ahead, items)
                end = written_until(h_in, at.item, end, at.group, shared, spec)
                if (at.item >= end) & (not is_open):
                    sleep_before_gate(shared)
        polls = polls + 1
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")
        if at.item < end:
            before = at.item
            at = stage_some(h_in, at, end, items, shared, spec)
            if at.item > before:
                if (warp == 0) & (before == 0):
                    stamp(shared.trace, "h_first", spec)
                polls = Int32(0)
    if warp == 0:
        stamp(shared.trace, "h_ready", spec)


@cute.jit
def clear_next(h_words: cute.Pointer, shared: Shared, spec: cutlass.Constexpr):
    """Clear this CTA's share of the other parity's h for the next launch; one warp."""
    cta, _, _ = cute.arch.block_idx()
    cute.arch.mbarrier_wait(shared.lists, 0)
    other = h_words + (1 - shared.meta[PARITY]) * spec.h_words
    zero = cute.make_rmem_tensor(PIECE_WORDS, Int32)
    zero.fill(0)
    start = (cta * WARP + cute.arch.lane_idx()) * PIECE_WORDS
    step = cutlass.const_expr(spec.grid * WARP * PIECE_WORDS)
    for i in cutlass.range(start, spec.h_words, step, unroll=1):
        dst = cute.make_tensor((other + i).align(16), cute.make_layout(PIECE_WORDS))
        cute.autovec_copy(zero, dst)
