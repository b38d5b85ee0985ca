"""Phase 1: top-k experts of a token and their weights, by one warp; every CTA routes for itself.

Ranking is by logit (both scorings are monotone): NaN counts as -inf, -0.0 equals +0.0, ties go to
the lowest expert id. Every lane sorts its eight candidates once; a pop is then one warp maximum
over the lanes' best. A bf16 logit leaves 16 bits for the expert, so that a candidate is one word.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_moe.kernels.device.quant import divide
from cute_moe.kernels.moe.memory import Shared

PER_LANE = 8
TAKEN = -(2**31)
FLT_MAX = 3.4028234663852886e38
# Batcher's odd-even merge sort of eight.
NETWORK = (
    (0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7), (1, 2), (5, 6),
    (0, 4), (1, 5), (2, 6), (3, 7), (2, 4), (3, 5), (1, 2), (3, 4), (5, 6),
)  # fmt: skip


@cute.jit
def load_logits(logits: cute.Tensor, token: Int32) -> cute.Tensor:
    """This lane's logits of `token` in registers: experts 8 lane .. 8 lane + 7."""
    source = logits.iterator + token * 32 * PER_LANE + cute.arch.lane_idx() * PER_LANE
    raw = cute.make_rmem_tensor(PER_LANE, logits.element_type)
    cute.autovec_copy(cute.make_tensor(source.align(16), cute.make_layout(PER_LANE)), raw)
    return raw


def is_packed(raw: cute.Tensor) -> bool:
    """Whether key and expert share a word; else they are two."""
    return raw.element_type is BFloat16


@cute.jit
def sort_candidates(raw: cute.Tensor):
    """This lane's candidates, best first: (keys, experts), int32 [8] each.

    Keys compare like the logits. Packed ones hold 255 - expert in their low half.
    """
    lane = cute.arch.lane_idx()
    values = cute.make_rmem_tensor(PER_LANE, Float32)
    values.store(raw.load().to(Float32))
    for i in cutlass.range_constexpr(PER_LANE):
        v = values[i] + Float32(0.0)
        if v != v:
            v = Float32(float("-inf"))
        values[i] = v
    bits = cute.recast_tensor(values, Int32)
    keys = cute.make_rmem_tensor(PER_LANE, Int32)
    experts = cute.make_rmem_tensor(PER_LANE, Int32)
    for i in cutlass.range_constexpr(PER_LANE):
        experts[i] = lane * PER_LANE + i
        keys[i] = bits[i] ^ ((bits[i] >> 31) & Int32(0x7FFFFFFF))
        if cutlass.const_expr(is_packed(raw)):
            keys[i] = (keys[i] & Int32(-65536)) | (255 - experts[i])
    for i, j in NETWORK:
        if cutlass.const_expr(is_packed(raw)):
            best = cutlass.max(keys[i], keys[j])
            keys[j] = cutlass.min(keys[i], keys[j])
            keys[i] = best
        else:
            swap = (keys[i] < keys[j]) | ((keys[i] == keys[j]) & (experts[i] > experts[j]))
            for column in (keys, experts):
                one = column[i]
                two = column[j]
                if swap:
                    column[i] = two
                    column[j] = one
    return keys, experts


@cute.jit
def pop_best(keys: cute.Tensor, experts: cute.Tensor, packed: cutlass.Constexpr):
    """Take the best remaining expert of the warp's 256: (key, expert), the same in all lanes."""
    top = cute.arch.warp_redux_sync(keys[0], "max")
    mine = keys[0] == top
    expert = 255 - (top & 0xFFFF)
    if cutlass.const_expr(not packed):
        holders = cute.arch.vote_ballot_sync(mine)
        source = cute.arch.popc((holders & -holders) - 1)
        expert = cute.arch.shuffle_sync(experts[0], offset=source)
        mine = cute.arch.lane_idx() == source
    for i in cutlass.range_constexpr(PER_LANE):
        following = Int32(TAKEN)
        if cutlass.const_expr(i + 1 < PER_LANE):
            following = keys[i + 1]
        if mine:
            keys[i] = following
        if cutlass.const_expr(not packed and i + 1 < PER_LANE):
            if mine:
                experts[i] = experts[i + 1]
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
def route_token(raw: cute.Tensor, token: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Write the picks, weights and expert masks of `token` to shared memory; one warp.

    raw: the lane's logits from `load_logits`.
    """
    lane = cute.arch.lane_idx()
    packed = cutlass.const_expr(is_packed(raw))
    keys, experts = sort_candidates(raw)
    total = Float32(0.0)
    if cutlass.const_expr(spec.scoring_func == "softmax" and not spec.renormalize):
        top = key_to_logit(cute.arch.warp_redux_sync(keys[0], "max"), packed)
        for i in cutlass.range_constexpr(PER_LANE):
            total = total + exp_(key_to_logit(keys[i], packed) - top)
        total = cute.arch.warp_reduction_sum(total)
    my_key = Int32(0)
    my_pick = Int32(0)
    first = Int32(0)
    for k in cutlass.range_constexpr(spec.top_k):
        key, expert = pop_best(keys, experts, packed)
        if cutlass.const_expr(k == 0):
            first = key
        if lane == k:
            my_key = key
            my_pick = expert
    logit = key_to_logit(my_key, packed)
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
    if lane < spec.top_k:
        shared.pick[token * 8 + lane] = my_pick
        shared.weight[token * 8 + lane] = score
        cute.arch.atomic_or(
            shared.mask.iterator + my_pick, Int32(1) << token, sem="relaxed", scope="cta"
        )
