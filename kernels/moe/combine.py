"""Phase 5: weighted sum over a token's slots, in slot order, and the bf16 store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_moe.kernels.moe.memory import Shared
from cute_moe.kernels.moe.spec import DOWN_COLS, PAIRS


@cute.jit
def routing_weights(tid: Int32, shared: Shared, spec: cutlass.Constexpr) -> list[Float32]:
    """The routing weights of token tid / 16, which `combine` wants."""
    return [shared.weight[(tid >> 4) * 8 + k] for k in range(spec.top_k)]


@cute.jit
def combine(
    out: cute.Tensor, own: Int32, weights: list[Float32], tid: Int32, shared: Shared,
    spec: cutlass.Constexpr,
):  # fmt: skip
    """Thread 16 t + c of one warpgroup writes column c of the own-th column block for token t."""
    cta, _, _ = cute.arch.block_idx()
    token = tid >> 4
    if token < out.shape[0]:
        total = Float32(0.0)
        for k in cutlass.range_constexpr(spec.top_k):
            pair = token * 8 + k
            partial = shared.partial[(own * PAIRS + pair) * DOWN_COLS + (tid & 15)]
            total = total + weights[k] * partial
        out[token, (cta + own * spec.grid) * DOWN_COLS + (tid & 15)] = total.to(BFloat16)
