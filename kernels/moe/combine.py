"""Phase 5: weighted sum over a token's slots, in slot order, and the bf16 store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_moe.kernels.moe.memory import HALF_WARPS, WARP, Shared
from cute_moe.kernels.moe.spec import MAX_TOKENS, MoeSpec

THREADS = HALF_WARPS * WARP


def rounds(spec: MoeSpec) -> range:
    """First outputs of the rounds in which a warpgroup writes one column block of all tokens."""
    return range(0, MAX_TOKENS * spec.columns, THREADS)


@cute.jit
def routing_weights(num_tokens: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr):
    """[round][slot] the factors that `combine` wants; 0 for a slot that was skipped."""
    found = []
    for first in rounds(spec):
        weights = cute.make_rmem_tensor(spec.top_k, Float32)
        weights.fill(0.0)
        token = (first + tid) // spec.columns
        if token < num_tokens:
            for k in cutlass.range_constexpr(spec.top_k):
                weights[k] = shared.weight[token * spec.top_k + k]
        found.append(weights)
    return found


@cute.jit
def combine(out: cute.Tensor, own: Int32, weights, scale, tid: Int32, shared: Shared, spec):
    """One warpgroup writes the own-th column block for all tokens, `scale` times the sum.

    Skipped slots, whose pick is negative, add nothing. scale: Float32, or None for 1.
    """
    cta, _, _ = cute.arch.block_idx()
    first_column = (cta + own * spec.grid) * spec.columns
    for r, first in enumerate(rounds(spec)):
        token = (first + tid) // spec.columns
        column = (first + tid) % spec.columns
        if (token < out.shape[0]) & (first_column + column < spec.hidden):
            total = Float32(0.0)
            for k in cutlass.range_constexpr(spec.top_k):
                pair = token * spec.top_k + k
                at = (own * spec.pairs + pair) * spec.columns + column
                term = weights[r][k] * shared.partial[at]
                if cutlass.const_expr(spec.routing == "ids"):
                    if shared.pick[pair] < 0:  # Nobody wrote its partial sums.
                        term = Float32(0.0)
                total = total + term
            if cutlass.const_expr(scale is not None):
                total = total * scale
            out[token, first_column + column] = total.to(BFloat16)
