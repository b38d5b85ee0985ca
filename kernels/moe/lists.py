"""Phase 2: the lists that follow from the routing, and this CTA's down scales; one warp.

Active experts stand in order of first appearance in (token, slot) order, so the first ones are
those of token 0 and a producer can start on them before the lists exist. Experts in a row form a
down group; groups go to the two warpgroups (halves) in turn. The pairs of a group, ordered by
expert and pair, fill chunks of eight, the N of one WGMMA. One list has the pairs of all groups in
this order: the rows of h that the loaders stage.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.ring import fill_by_lanes, wait_empty
from cute_moe.kernels.moe.memory import (
    ACTIVE,
    CHUNK_SHIFT,
    CHUNKS,
    COUNT_SHIFT,
    EXPERT_SHIFT,
    FIRST_MASK,
    LOADER_WARPS,
    PARITY,
    PLACE_SHIFT,
    ROWS,
    WARP,
    Shared,
)
from cute_moe.kernels.moe.spec import CHUNK_ROWS, MAX_TOKENS, SCALE_BATCHES, MoeSpec

LOADS = 8  # down scales that a lane has in flight


@cute.jit
def build_lists(num_tokens: Int32, epoch: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Write every list to shared memory and open the `lists` barrier."""
    lane = cute.arch.lane_idx()
    pairs = num_tokens * spec.top_k
    rounds = cutlass.const_expr((spec.pairs + WARP - 1) // WARP)
    ranks = cute.make_rmem_tensor(rounds, Int32)  # of this lane's pairs in their experts
    active = Int32(0)
    for r in cutlass.range_constexpr(rounds):
        ranks[r] = Int32(0)
        if r * WARP < pairs:
            active = rank_pairs(r, pairs, active, ranks, shared)
    totals = Int32(0)  # of the groups so far: rows | chunks << COUNT_SHIFT
    for first in cutlass.range_constexpr(0, spec.max_active, WARP):
        if first < active:
            totals = place_groups(first, active, totals, shared, spec)
    cute.arch.sync_warp()
    for r in cutlass.range_constexpr(rounds):
        if r * WARP < pairs:
            place_pair(lane + WARP * r, pairs, ranks[r], shared, spec)
    if lane == 0:
        shared.meta[ACTIVE] = active
        shared.meta[ROWS] = totals & FIRST_MASK
        shared.meta[CHUNKS] = totals >> COUNT_SHIFT
        shared.meta[PARITY] = epoch & 1
    cute.arch.sync_warp()
    cute.arch.mbarrier_arrive(shared.lists)


@cute.jit
def clear_lists(thread: Int32, shared: Shared, spec: cutlass.Constexpr):
    """What `build_lists` starts from; by all loader warps, before the routing."""
    threads = cutlass.const_expr(LOADER_WARPS * WARP)
    for words, value in ((shared.count, 0), (shared.pair_of, -1), (shared.chunk_rows, -1)):
        for first in cutlass.range_constexpr(0, cute.size(words), threads):
            if cutlass.const_expr(first + threads <= cute.size(words)):
                words[first + thread] = Int32(value)
            elif first + thread < cute.size(words):
                words[first + thread] = Int32(value)


@cute.jit
def rank_pairs(r: cutlass.Constexpr, pairs: Int32, active: Int32, ranks: cute.Tensor, shared):
    """Count the pairs of round r in their experts and number experts that are new; how many are."""
    lane = cute.arch.lane_idx()
    pair = lane + WARP * r
    before_me = (Int32(1) << lane) - 1
    expert = Int32(-1)
    if pair < pairs:
        expert = shared.pick[pair]
    key = expert
    if expert < 0:
        key = -1 - lane
    same = cute.arch.match_sync(Int32(-1), key, kind="any")
    counted = Int32(0)
    if expert >= 0:
        counted = shared.count[expert]
    leads = (same & before_me) == 0
    fresh = cute.arch.vote_ballot_sync((expert >= 0) & leads & (counted == 0))
    ranks[r] = counted + cute.arch.popc(same & before_me)
    if (expert >= 0) & leads:
        shared.count[expert] = counted + cute.arch.popc(same)
        if counted == 0:
            position = active + cute.arch.popc(fresh & before_me)
            shared.experts[position] = expert
            shared.index[expert] = position
    cute.arch.sync_warp()
    return active + cute.arch.popc(fresh)


@cute.jit
def place_groups(first: cutlass.Constexpr, active: Int32, totals: Int32, shared: Shared, spec):
    """Where the pairs of experts first .. first + 31 stand in their groups, and the groups' rows
    and chunks; the totals with them. The last lane of a group speaks for it."""
    lane = cute.arch.lane_idx()
    group = cutlass.const_expr(spec.group)
    index = first + lane
    pairs = Int32(0)
    if index < active:
        pairs = shared.count[shared.experts[index]]
    rows = pairs
    for s in cutlass.range_constexpr(group.bit_length() - 1):
        left = cute.arch.shuffle_sync_up(rows, offset=1 << s, mask_and_clamp=0)
        if (lane & (group - 1)) >= (1 << s):
            rows = rows + left
    shared.first_place[index] = rows - pairs
    chunks = (rows + CHUNK_ROWS - 1) // CHUNK_ROWS
    own = Int32(0)
    if (lane & (group - 1)) == group - 1:
        own = rows | (chunks << COUNT_SHIFT)
    scan = own  # of the speakers
    for s in cutlass.range_constexpr(group.bit_length() - 1, WARP.bit_length() - 1):
        left = cute.arch.shuffle_sync_up(scan, offset=1 << s, mask_and_clamp=0)
        if lane >= (1 << s):
            scan = scan + left
    if (lane & (group - 1)) == group - 1:
        start = totals + scan - own
        shared.group_rows[index // group] = (start & FIRST_MASK) | (rows << COUNT_SHIFT)
        shared.group_chunks[index // group] = (start >> COUNT_SHIFT) | (chunks << COUNT_SHIFT)
    return totals + cute.arch.shuffle_sync(scan, offset=WARP - 1)


@cute.jit
def place_pair(pair: Int32, pairs: Int32, rank: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Enter a pair in the lists; called by a whole warp with 32 pairs in a row.

    A token that names an expert twice has one row of h, which both of its pairs read.
    """
    expert = Int32(-1)
    if pair < pairs:
        expert = shared.pick[pair]
    index = Int32(0)
    if expert >= 0:
        index = shared.index[expert]
    place_of_token = index * MAX_TOKENS + pair // spec.top_k
    source = pair
    if cutlass.const_expr(spec.routing == "ids"):
        key = place_of_token
        if expert < 0:
            key = -1 - cute.arch.lane_idx()
        same = cute.arch.match_sync(Int32(-1), key, kind="any")
        if (expert >= 0) & ((same & ((Int32(1) << cute.arch.lane_idx()) - 1)) == 0):
            if shared.pair_of[place_of_token] < 0:
                shared.pair_of[place_of_token] = pair
        cute.arch.sync_warp()
        if expert >= 0:
            source = shared.pair_of[place_of_token]
    if expert >= 0:
        if cutlass.const_expr(spec.routing != "ids"):
            shared.pair_of[place_of_token] = pair
        number = index // spec.group
        position = shared.first_place[index] + rank
        place = position % CHUNK_ROWS
        chunk = (shared.group_chunks[number] & FIRST_MASK) + position // CHUNK_ROWS
        shared.chunk_rows[chunk * CHUNK_ROWS + place] = pair | (index % spec.group << EXPERT_SHIFT)
        row = (shared.group_rows[number] & FIRST_MASK) + position
        fields = source | (place << PLACE_SHIFT) | (chunk << CHUNK_SHIFT)
        shared.rows[row] = fields


@cute.jit
def load_scales(scales_down: cute.Tensor, shared: Shared, spec: cutlass.Constexpr):
    """Bring the down scales of this CTA's columns to shared memory, as fp32, batch by batch.

    Of a batch, as many loads as a lane has registers for come before the first store.
    """
    lane = cute.arch.lane_idx()
    items = cutlass.const_expr(spec.scale_batch * spec.group_down_scales)
    groups = (shared.meta[ACTIVE] + spec.group - 1) // spec.group
    batches = (groups + spec.scale_batch - 1) // spec.scale_batch
    for batch in cutlass.range(batches, unroll=1):
        wait_empty(shared.scale_slots, batch)
        first = batch * spec.scale_batch
        for start in cutlass.range_constexpr(0, items, LOADS * WARP):
            values = cute.make_rmem_tensor(LOADS, Float32)
            for i in cutlass.range_constexpr(LOADS):
                values[i] = scale_at(scales_down, first, start + WARP * i + lane, shared, spec)
            for i in cutlass.range_constexpr(LOADS):
                item = start + WARP * i + lane
                if cutlass.const_expr(start + WARP * i < items):
                    if item < items:
                        shared.down_scale[scale_slot(first, spec) + item] = values[i]
        fill_by_lanes(shared.scale_slots, batch, WARP)


def scale_slot(number, spec: MoeSpec):
    """First down scale of a group."""
    return number % (spec.scale_batch * SCALE_BATCHES) * spec.group_down_scales


@cute.jit
def scale_at(
    scales_down: cute.Tensor, first: Int32, item: Int32, shared: Shared, spec: cutlass.Constexpr
) -> Float32:
    """Scale `item` of the groups from `first` on: [group][own block][expert][row][scale]; or 0."""
    cta, _, _ = cute.arch.block_idx()
    width = cutlass.const_expr(spec.row_down_scales)
    index, inner = first * spec.group + item // spec.expert_down_scales, item // width
    row, column = inner % spec.down_scale_rows, item % width
    if cutlass.const_expr(spec.max_own_blocks > 1):
        number = first + item // spec.group_down_scales
        rest = item % spec.group_down_scales // spec.expert_down_scales
        index = number * spec.group + rest % spec.group
        cta = cta + rest // spec.group * spec.grid
    row = row + cta * spec.columns // spec.scale_block_hidden
    value = Float32(0.0)
    wanted = (row < spec.hidden // spec.scale_block_hidden) & (index < shared.meta[ACTIVE])
    if wanted & (column < spec.intermediate // spec.scale_block):
        value = to_scale(scales_down[shared.experts[index], row, column])
    return value


@cute.jit
def to_scale(stored) -> Float32:
    """A stored weight scale as fp32; an exponent byte e8m0 means 2^(byte - 127), or NaN at 255."""
    value = Float32(0.0)
    if cutlass.const_expr(isinstance(stored, cutlass.Uint8)):
        bits = cute.make_rmem_tensor(1, Int32)
        exponent = stored.to(Int32)
        bits[0] = exponent << 23
        if exponent == 0:
            bits[0] = Int32(1 << 22)
        if exponent == 255:
            bits[0] = Int32(0x7FC00000)
        value = cute.recast_tensor(bits, Float32)[0]
    else:
        value = stored.to(Float32)
    return value
