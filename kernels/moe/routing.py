"""Phase 1: experts of a token and their weights, by one warp; every CTA routes for itself.

`route_token` enters what `select` and `weigh` find in the logits, or `read_token` what the caller
has found.

Ranking is by logit (both scorings are monotone): NaN counts as -inf, -0.0 equals +0.0, ties go to
the lowest expert id. A lane has its logits in lists of eight, each sorted once; a pop is then one
warp maximum over the best of every list. A bf16 logit leaves 16 bits for the expert, so that a
candidate is one word.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from cute_moe.kernels.device.quant import divide
from cute_moe.kernels.moe.memory import WARP, Shared
from cute_moe.kernels.moe.spec import MAX_EXPERTS

LIST = 8  # candidates of one sorted list
TAKEN = -(2**31)
FLT_MAX = 3.4028234663852886e38
LAST = MAX_EXPERTS - 1  # minus the expert, in the low half of a packed key: low ids win ties
# Batcher's odd-even merge sort of eight.
NETWORK = (
    (0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7), (1, 2), (5, 6),
    (0, 4), (1, 5), (2, 6), (3, 7), (2, 4), (3, 5), (1, 2), (3, 4), (5, 6),
)  # fmt: skip


class Logits(NamedTuple):
    """The kernel routes. ids, weights [M, k]: where it says how, or None."""

    logits: cute.Tensor  # [M, E]
    ids: cute.Tensor | None
    weights: cute.Tensor | None


class Given(NamedTuple):
    """The caller has routed."""

    ids: cute.Tensor  # [M, k]
    weights: cute.Tensor  # [M, k]
    expert_map: cute.Tensor | None  # [ids] expert here, or -1
    scale: Float32  # of the output


@cute.jit
def load_logits(logits: cute.Tensor, token: Int32, spec: cutlass.Constexpr) -> cute.Tensor:
    """This lane's logits of `token` in registers: experts 256 j + 8 lane + 0..7 of every list j.

    What is beyond the last expert is -inf.
    """
    experts = cutlass.const_expr(spec.num_experts)
    lists = cutlass.const_expr((experts + WARP * LIST - 1) // (WARP * LIST))
    raw = cute.make_rmem_tensor((LIST, lists), logits.element_type)
    for j in cutlass.range_constexpr(lists):
        first = j * WARP * LIST + cute.arch.lane_idx() * LIST
        source = logits.iterator + token * experts + first
        whole = cutlass.const_expr((j + 1) * WARP * LIST <= experts)
        if cutlass.const_expr(experts % LIST == 0):
            if cutlass.const_expr(not whole):
                for i in cutlass.range_constexpr(LIST):
                    raw[i, j] = logits.element_type(float("-inf"))
            if cutlass.const_expr(whole):
                cute.autovec_copy(
                    cute.make_tensor(source.align(16), cute.make_layout(LIST)), raw[None, j]
                )
            elif first < experts:
                cute.autovec_copy(
                    cute.make_tensor(source.align(16), cute.make_layout(LIST)), raw[None, j]
                )
        else:
            for i in cutlass.range_constexpr(LIST):
                raw[i, j] = logits.element_type(float("-inf"))
                if first + i < experts:
                    raw[i, j] = cute.make_tensor(source + i, cute.make_layout(1))[0]
    return raw


def is_packed(raw: cute.Tensor) -> bool:
    """Whether key and expert share a word; else they are two."""
    return raw.element_type is BFloat16


@cute.jit
def sort_candidates(raw: cute.Tensor, spec: cutlass.Constexpr):
    """This lane's candidates: keys int32 [8, lists], which compare like the logits.

    Packed ones hold LAST - expert in their low half, and each list has its best first.
    """
    lane = cute.arch.lane_idx()
    lists = cutlass.const_expr(cute.size(raw) // LIST)
    values = cute.make_rmem_tensor((LIST, lists), Float32)
    values.store(raw.load().to(Float32))
    bits = cute.recast_tensor(values, Int32)
    keys = cute.make_rmem_tensor((LIST, lists), Int32)
    for j in cutlass.range_constexpr(lists):
        for i in cutlass.range_constexpr(LIST):
            v = values[i, j] + Float32(0.0)
            if v != v:
                v = Float32(float("-inf"))
            values[i, j] = v
            expert = expert_of(lane, i, j)
            keys[i, j] = bits[i, j] ^ ((bits[i, j] >> 31) & Int32(0x7FFFFFFF))
            if cutlass.const_expr(is_packed(raw)):
                keys[i, j] = (keys[i, j] & Int32(-65536)) | (LAST - expert)
            if cutlass.const_expr((j + 1) * WARP * LIST > spec.num_experts):
                if expert >= spec.num_experts:
                    keys[i, j] = Int32(TAKEN)
        if cutlass.const_expr(is_packed(raw)):
            for one, two in NETWORK:
                best = cutlass.max(keys[one, j], keys[two, j])
                keys[two, j] = cutlass.min(keys[one, j], keys[two, j])
                keys[one, j] = best
    return keys


def expert_of(lane, i, j):
    """The expert of place i in list j of a lane."""
    return j * WARP * LIST + lane * LIST + i


@cute.jit
def pop_best(keys: cute.Tensor, packed: cutlass.Constexpr):
    """Take the best remaining expert of the warp's: (key, expert), the same in all lanes."""
    lists = cutlass.const_expr(cute.size(keys) // LIST)
    if cutlass.const_expr(packed):
        best = keys[0, 0]
        for j in cutlass.range_constexpr(1, lists):
            best = cutlass.max(best, keys[0, j])
        top = cute.arch.warp_redux_sync(best, "max")
        for j in cutlass.range_constexpr(lists):
            mine = keys[0, j] == top
            for i in cutlass.range_constexpr(LIST):
                following = Int32(TAKEN)
                if cutlass.const_expr(i + 1 < LIST):
                    following = keys[i + 1, j]
                if mine:
                    keys[i, j] = following
        expert = LAST - (top & 0xFFFF)
    else:
        best = Int32(TAKEN)
        for n in cutlass.range_constexpr(cute.size(keys)):
            best = cutlass.max(best, keys[n])
        top = cute.arch.warp_redux_sync(best, "max")
        # The lowest expert with this key: in the first list that has it, then the first lane.
        lane = cute.arch.lane_idx()
        candidate = Int32(MAX_EXPERTS)
        for j in cutlass.range_constexpr(lists - 1, -1, -1):
            for i in cutlass.range_constexpr(LIST - 1, -1, -1):
                if keys[i, j] == top:
                    candidate = expert_of(lane, i, j)
        expert = cute.arch.warp_redux_sync(candidate, "min")
        for j in cutlass.range_constexpr(lists):
            for i in cutlass.range_constexpr(LIST):
                if expert == expert_of(lane, i, j):
                    keys[i, j] = Int32(TAKEN)
    return top, expert


@cute.jit
def key_to_logit(key: Int32, packed: cutlass.Constexpr) -> Float32:
    """The finite fp32 logit of a key (infinities are clamped to the largest finite value)."""
    w = cute.make_rmem_tensor(1, Int32)
    if cutlass.const_expr(packed):
        key = (key & Int32(-65536)) | ((key >> 31) & Int32(0xFFFF))
    w[0] = key ^ ((key >> 31) & Int32(0x7FFFFFFF))
    v = cute.recast_tensor(w, Float32)[0]
    v = cute.arch.fmax(v, Float32(-FLT_MAX))
    return -cute.arch.fmax(-v, Float32(-FLT_MAX))


@cute.jit
def exp_(x: Float32) -> Float32:
    """e ** x by the hardware's exp2."""
    return cute.math.exp2(x * Float32(1.4426950408889634), fastmath=True)


@cute.jit
def pop_slot(k, keys: cute.Tensor, slot, packed: cutlass.Constexpr):
    """Pop the expert of slot k; slot: (expert, key of slot `lane`; key of slot 0), so far."""
    my_pick, my_key, first = slot
    key, expert = pop_best(keys, packed)
    if k == 0:
        first = key
    if cute.arch.lane_idx() == k:
        my_key = key
        my_pick = expert
    return my_pick, my_key, first


@cute.jit
def select(raw: cute.Tensor, spec: cutlass.Constexpr):
    """The best top_k experts: (expert, key of slot `lane`; key of slot 0; sum over all experts).

    The sum is that of exp(logit - best), where the weights need it.
    """
    packed = cutlass.const_expr(is_packed(raw))
    keys = sort_candidates(raw, spec)
    total = Float32(0.0)
    if cutlass.const_expr(spec.scoring_func == "softmax" and not spec.renormalize):
        best = Int32(TAKEN)
        for n in cutlass.range_constexpr(cute.size(keys)):
            best = cutlass.max(best, keys[n])
        top = key_to_logit(cute.arch.warp_redux_sync(best, "max"), packed)
        for n in cutlass.range_constexpr(cute.size(keys)):
            if keys[n] != Int32(TAKEN):
                total = total + exp_(key_to_logit(keys[n], packed) - top)
        total = cute.arch.warp_reduction_sum(total)
    slot = (Int32(0), Int32(0), Int32(0))
    if cutlass.const_expr(packed):
        for k in cutlass.range_constexpr(spec.top_k):
            slot = pop_slot(k, keys, slot, packed)
    else:  # A pop looks at every key: unrolled, so many of them spill registers.
        for k in cutlass.range(spec.top_k, unroll=1):
            slot = pop_slot(k, keys, slot, packed)
    my_pick, my_key, first = slot
    return my_pick, my_key, first, total


@cute.jit
def weigh(key: Int32, first: Int32, total: Float32, packed: cutlass.Constexpr, spec) -> Float32:
    """The routing weight of slot `lane`, from what `select` found."""
    lane = cute.arch.lane_idx()
    logit = key_to_logit(key, packed)
    score = Float32(0.0)
    if lane < spec.top_k:
        if cutlass.const_expr(spec.scoring_func == "softmax"):
            score = exp_(logit - key_to_logit(first, packed))
        else:
            score = cute.arch.rcp_approx(Float32(1.0) + exp_(-logit))
    if cutlass.const_expr(spec.renormalize):
        total = cute.arch.fmax(cute.arch.warp_reduction_sum(score), Float32(2.0**-126))
    if cutlass.const_expr(spec.renormalize or spec.scoring_func == "softmax"):
        score = divide(score, total)
    return score


@cute.jit
def route_token(
    routing: Logits, raw: cute.Tensor, token: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """Enter the picks and weights of `token`; one warp. raw: its logits from `load_logits`."""
    lane = cute.arch.lane_idx()
    cta, _, _ = cute.arch.block_idx()
    expert, key, first, total = select(raw, spec)
    weight = weigh(key, first, total, is_packed(raw), spec)
    if lane < spec.top_k:
        shared.pick[token * spec.top_k + lane] = expert
        shared.weight[token * spec.top_k + lane] = weight
        if cutlass.const_expr(routing.ids is not None):
            if cta == 0:
                routing.ids[token, lane] = expert
                routing.weights[token, lane] = weight


@cute.jit
def load_pick(routing: Given, token: Int32, spec: cutlass.Constexpr) -> Int32:
    """The expert here of slot `lane` of a token; -1 beyond top_k and for what is to be skipped."""
    lane = cute.arch.lane_idx()
    limit = cutlass.const_expr(spec.mapped_experts or spec.num_experts)
    expert = Int32(-1)
    if lane < spec.top_k:
        given = routing.ids[token, lane]
        if (given >= 0) & (given < limit):
            expert = given.to(Int32)
    if cutlass.const_expr(routing.expert_map is not None):
        if expert >= 0:
            expert = routing.expert_map[expert]
            if (expert < 0) | (expert >= spec.num_experts):
                expert = Int32(-1)
    return expert


@cute.jit
def read_token(
    routing: Given, expert: Int32, token: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """Enter the given picks and weights of `token`; one warp. expert: from `load_pick`."""
    lane = cute.arch.lane_idx()
    if lane < spec.top_k:
        shared.pick[token * spec.top_k + lane] = expert
        shared.weight[token * spec.top_k + lane] = routing.weights[token, lane].to(Float32)


@cute.jit
def early_expert(found, rank: Int32, spec: cutlass.Constexpr):
    """The rank-th distinct expert of token 0: (expert, whether it is known from this token alone).

    found: the lane's logits or its pick.
    """
    expert = Int32(0)
    known = Boolean(rank < spec.top_k)
    if cutlass.const_expr(spec.routing == "logits"):
        if known:
            keys = sort_candidates(found, spec)
            for _ in cutlass.range(rank + 1, unroll=1):
                _, expert = pop_best(keys, is_packed(found))
    else:
        lane = cute.arch.lane_idx()
        key = found
        if found < 0:
            key = -1 - lane
        same = cute.arch.match_sync(Int32(-1), key, kind="any")
        fresh = (found >= 0) & ((same & ((Int32(1) << lane) - 1)) == 0)
        ballot = cute.arch.vote_ballot_sync(fresh)
        known = Boolean(rank < cute.arch.popc(ballot))
        mine = fresh & (cute.arch.popc(ballot & ((Int32(1) << lane) - 1)) == rank)
        holder = cute.arch.vote_ballot_sync(mine)
        expert = cute.arch.shuffle_sync(found, offset=cute.arch.popc((holder & -holder) - 1) & 31)
    return expert, known
