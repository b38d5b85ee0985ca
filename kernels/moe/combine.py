"""Phase 5: weighted sum over a token's slots, in slot order, and the bf16 store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from cute_moe.kernels.moe.memory import Shared
from cute_moe.kernels.moe.spec import DOWN_COLS, PAIRS


@cute.jit
def combine(out: cute.Tensor, own: Int32, tid: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Thread 16 t + c of one warpgroup writes column c of the own-th column block for token t."""
    cta, _, _ = cute.arch.block_idx()
    token = tid >> 4
    if token < out.shape[0]:
        total = Float32(0.0)
        for k in cutlass.range_constexpr(spec.top_k):
            pair = token * 8 + k
            total = (
                total
                + shared.weight[pair]
                * shared.partial[(own * PAIRS + pair) * DOWN_COLS + (tid & 15)]
            )
        out[token, (cta + own * spec.grid) * DOWN_COLS + (tid & 15)] = total.to(BFloat16)
