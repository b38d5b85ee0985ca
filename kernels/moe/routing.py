"""Phase 1: top-k experts of a token and their weights, by one warp; every CTA routes for itself.

Ranking is by logit (both scorings are monotone): NaN counts as -inf, -0.0 equals +0.0, ties go to
the lowest expert id. Lane l holds experts 8 l .. 8 l + 7, so the lowest lane is the lowest id.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.quant import divide
from cute_moe.kernels.moe.memory import Shared

PER_LANE = 8
TAKEN = -(2**31)
FLT_MAX = 3.4028234663852886e38


@cute.jit
def load_keys(logits: cute.Tensor, token: Int32) -> cute.Tensor:
    """This lane's eight logits of `token` as signed integers that compare like the logits."""
    lane = cute.arch.lane_idx()
    row = cute.make_tensor(
        (logits.iterator + token * 256 + lane * PER_LANE).align(16), cute.make_layout(PER_LANE)
    )
    raw = cute.make_rmem_tensor(PER_LANE, logits.element_type)
    cute.autovec_copy(row, raw)
    values = cute.make_rmem_tensor(PER_LANE, Float32)
    values.store(raw.load().to(Float32))
    for i in cutlass.range_constexpr(PER_LANE):
        v = values[i] + Float32(0.0)
        if v != v:
            v = Float32(float("-inf"))
        values[i] = v
    bits = cute.recast_tensor(values, Int32)
    keys = cute.make_rmem_tensor(PER_LANE, Int32)
    for i in cutlass.range_constexpr(PER_LANE):
        keys[i] = bits[i] ^ ((bits[i] >> 31) & Int32(0x7FFFFFFF))
    return keys


@cute.jit
def pop_best(keys: cute.Tensor):
    """Take the best remaining expert of the warp's 256: (key, id), the same in all lanes."""
    lane = cute.arch.lane_idx()
    best = keys[0]
    for i in cutlass.range_constexpr(1, PER_LANE):
        best = cutlass.max(best, keys[i])
    top = cute.arch.warp_redux_sync(best, "max")
    j = Int32(0)
    for i in cutlass.range_constexpr(PER_LANE - 1, -1, -1):
        if keys[i] == top:
            j = Int32(i)
    holders = cute.arch.vote_ballot_sync(best == top)
    source = cute.arch.popc((holders & -holders) - 1)
    expert = cute.arch.shuffle_sync(lane * PER_LANE + j, offset=source)
    for i in cutlass.range_constexpr(PER_LANE):
        if lane * PER_LANE + i == expert:
            keys[i] = Int32(TAKEN)
    return top, expert


@cute.jit
def key_to_logit(key: Int32) -> Float32:
    """The finite fp32 logit of a key (infinities are clamped to the largest finite value)."""
    w = cute.make_rmem_tensor(1, Int32)
    w[0] = key ^ ((key >> 31) & Int32(0x7FFFFFFF))
    v = cute.recast_tensor(w, Float32)[0]
    v = cute.arch.fmax(v, Float32(-FLT_MAX))
    return -cute.arch.fmax(-v, Float32(-FLT_MAX))


@cute.jit
def exp_(x: Float32) -> Float32:
    """e ** x by the hardware's exp2."""
    return cute.math.exp2(x * Float32(1.4426950408889634), fastmath=True)


@cute.jit
def route_token(logits: cute.Tensor, token: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Write the picks, weights and expert masks of `token` to shared memory; one warp."""
    lane = cute.arch.lane_idx()
    keys = load_keys(logits, token)
    total = Float32(0.0)
    if cutlass.const_expr(spec.scoring == "softmax" and not spec.renormalize):
        peak = keys[0]
        for i in cutlass.range_constexpr(1, PER_LANE):
            peak = cutlass.max(peak, keys[i])
        top = key_to_logit(cute.arch.warp_redux_sync(peak, "max"))
        for i in cutlass.range_constexpr(PER_LANE):
            total = total + exp_(key_to_logit(keys[i]) - top)
        total = cute.arch.warp_reduction_sum(total)
    my_key = Int32(0)
    my_pick = Int32(0)
    first = Int32(0)
    for k in cutlass.range_constexpr(spec.top_k):
        key, expert = pop_best(keys)
        if cutlass.const_expr(k == 0):
            first = key
        if lane == k:
            my_key = key
            my_pick = expert
    logit = key_to_logit(my_key)
    score = Float32(0.0)
    if lane < spec.top_k:
        if cutlass.const_expr(spec.scoring == "softmax"):
            score = exp_(logit - key_to_logit(first))
        else:
            score = cute.arch.rcp_approx(Float32(1.0) + exp_(-logit))
    if cutlass.const_expr(spec.renormalize):
        total = cute.arch.fmax(cute.arch.warp_reduction_sum(score), Float32(2.0**-126))
    if cutlass.const_expr(spec.renormalize or spec.scoring == "softmax"):
        score = divide(score, total)
    if lane < spec.top_k:
        shared.pick[token * 8 + lane] = my_pick
        shared.weight[token * 8 + lane] = score
        cute.arch.atomic_or(
            shared.mask.iterator + my_pick, Int32(1) << token, sem="relaxed", scope="cta"
        )
