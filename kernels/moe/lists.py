"""Phase 2: the lists that follow from the routing, and this CTA's down scales; one warp.

Active experts stand in order of first appearance in (token, slot) order, so the first ones are
those of token 0 and a producer can start on them before the lists exist. Four experts in a row
form a down group; the (token, slot) pairs of a group, ordered by expert and token, fill chunks
of eight, the N of one WGMMA. One list has the pairs of all groups in this order: the rows of h.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_moe.kernels.moe.memory import ARRIVALS_SHIFT, CHUNK_SHIFT, PLACE_SHIFT, Shared
from cute_moe.kernels.moe.spec import MAX_CHUNKS, PAIRS


@cute.jit
def build_lists(num_tokens: Int32, epoch: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Write every list to shared memory and open the `lists` barrier."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(PAIRS * 8 // 32):
        shared.slot_of[lane + 32 * i] = Int32(-1)
    for i in cutlass.range_constexpr(MAX_CHUNKS * 8 // 32):
        shared.chunk_rows[lane + 32 * i] = Int32(-1)
    count = Int32(0)
    for half in cutlass.range_constexpr(2):
        entry = lane + 32 * half
        token = entry >> 3
        valid = Boolean((token < num_tokens) & ((entry & 7) < spec.top_k))
        expert = Int32(0)
        fresh = Int32(0)
        if valid:
            expert = shared.pick[entry]
            if (shared.mask[expert] & ((Int32(1) << token) - 1)) == 0:
                fresh = Int32(1)
        ballot = cute.arch.vote_ballot_sync(fresh != 0)
        if fresh != 0:
            position = count + cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
            shared.experts[position] = expert
            shared.index[expert] = position
        count = count + cute.arch.popc(ballot)
    cute.arch.sync_warp()
    chunks = place_groups(count, shared)
    cute.arch.sync_warp()
    for half in cutlass.range_constexpr(2):
        entry = lane + 32 * half
        token = entry >> 3
        if (token < num_tokens) & ((entry & 7) < spec.top_k):
            expert = shared.pick[entry]
            index = shared.index[expert]
            rank = cute.arch.popc(shared.mask[expert] & ((Int32(1) << token) - 1))
            position = shared.pos_base[index] + rank
            chunk = shared.chunk_base[index] + (position >> 3)
            place = position & 7
            shared.chunk_rows[chunk * 8 + place] = entry | ((index & 3) << 8)
            base = shared.row_base[index]
            arrivals = Int32(1)
            if place == 0:
                arrivals = 9 - cutlass.min((base >> 8) - position, 8)
            fields = (place << PLACE_SHIFT) | (chunk << CHUNK_SHIFT) | (arrivals << ARRIVALS_SHIFT)
            shared.rows[(base & 0xFF) + position] = entry | fields
            shared.slot_of[index * 8 + token] = entry & 7
    if lane == 0:
        shared.meta[0] = count
        shared.meta[1] = chunks
        shared.meta[2] = epoch & 1
        shared.chunk_base[PAIRS] = chunks
    cute.arch.sync_warp()
    cute.arch.mbarrier_arrive(shared.lists)


@cute.jit
def place_groups(count: Int32, shared: Shared) -> Int32:
    """Position of every active expert in its group and the group's first chunk; total chunks."""
    lane = cute.arch.lane_idx()
    chunks = Int32(0)
    rows = Int32(0)
    for half in cutlass.range_constexpr(2):
        index = lane + 32 * half
        pairs = Int32(0)
        if index < count:
            pairs = cute.arch.popc(shared.mask[shared.experts[index]])
        inclusive = pairs
        for s in cutlass.range_constexpr(2):
            left = cute.arch.shuffle_sync_up(inclusive, offset=1 << s, mask_and_clamp=0)
            if (lane & 3) >= (1 << s):
                inclusive = inclusive + left
        group_pairs = cute.arch.shuffle_sync(inclusive, offset=lane | 3)
        group_chunks = (group_pairs + 7) >> 3
        scan = Int32(0)
        if (lane & 3) == 3:
            scan = group_chunks | (group_pairs << 16)  # both sums in one word
        for s in cutlass.range_constexpr(5):
            left = cute.arch.shuffle_sync_up(scan, offset=1 << s, mask_and_clamp=0)
            if lane >= (1 << s):
                scan = scan + left
        last = cute.arch.shuffle_sync(scan, offset=lane | 3)
        shared.pos_base[index] = inclusive - pairs
        shared.chunk_base[index] = chunks + (last & 0xFFFF) - group_chunks
        shared.row_base[index] = (rows + (last >> 16) - group_pairs) | (group_pairs << 8)
        total = cute.arch.shuffle_sync(scan, offset=31)
        chunks = chunks + (total & 0xFFFF)
        rows = rows + (total >> 16)
    return chunks


@cute.jit
def load_scales(scales_down: cute.Tensor, shared: Shared, spec: cutlass.Constexpr):
    """Bring the weight scales of this CTA's down columns to shared memory, as fp32."""
    lane = cute.arch.lane_idx()
    cta, _, _ = cute.arch.block_idx()
    active = shared.meta[0]
    each = cutlass.const_expr(PAIRS * spec.h_blocks // 32)
    base = lane
    for column in cutlass.range(cta, spec.column_blocks, spec.grid, unroll=1):
        # All loads are in flight before the first is stored.
        down = cute.make_rmem_tensor(each, Float32)
        for i in cutlass.range_constexpr(each):
            index = (lane + 32 * i) >> 2
            down[i] = Float32(0.0)
            if index < active:
                expert = shared.experts[index]
                down[i] = scales_down[expert, column * 16 // 128, lane & 3].to(Float32)
        for i in cutlass.range_constexpr(each):
            shared.down_scale[base + 32 * i] = down[i]
        base = base + PAIRS * spec.h_blocks
    cute.arch.mbarrier_arrive(shared.scales)
