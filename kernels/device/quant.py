"""Block-FP8 quantisation of registers: the only home of the e4m3 maximum and the scale rule."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32

E4M3_MAX = 448.0
MIN_AMAX = 1e-10


@cute.jit
def divide(a: Float32, b: Float32) -> Float32:
    """a / b by an approximate reciprocal and one Newton step; for finite normal b."""
    r = cute.arch.rcp_approx(b)
    q = a * r
    return q + (a - q * b) * r


@cute.jit
def unpack_bf16(word: Int32):
    """The two bf16 values of a word as fp32, low half first."""
    w = cute.make_rmem_tensor(2, Int32)
    w[0] = word << 16
    w[1] = word & Int32(-65536)
    f = cute.recast_tensor(w, Float32)
    return f[0], f[1]


@cute.jit
def quantize(values: cute.Tensor, lanes: cutlass.Constexpr):
    """Quantise fp32 registers that `lanes` neighbouring lanes share one scale for.

    values: rmem fp32 [n], n * lanes == 128. Returns (rmem int32 words of e4m3 [n / 4], scale).
    Called by whole warps.
    """
    n = cutlass.const_expr(cute.size(values))
    amax = Float32(MIN_AMAX)
    for i in cutlass.range_constexpr(n):
        amax = cute.arch.fmax(amax, cute.arch.fmax(values[i], -values[i]))
    step = cutlass.const_expr(lanes // 2)
    for s in cutlass.range_constexpr(step.bit_length()):
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << s))
    s0 = amax * Float32(1.0 / E4M3_MAX)
    scale = s0 + (amax - s0 * Float32(E4M3_MAX)) * Float32(1.0 / E4M3_MAX)
    r = cute.arch.rcp_approx(scale)
    scaled = cute.make_rmem_tensor(n, Float32)
    for i in cutlass.range_constexpr(n):
        q = values[i] * r
        scaled[i] = q + (values[i] - q * scale) * r
    out = cute.make_rmem_tensor(n, Float8E4M3FN)
    out.store(scaled.load().to(Float8E4M3FN))
    return cute.recast_tensor(out, Int32), scale


@cute.jit
def swizzled_offset(row: Int32, chunk16: Int32) -> Int32:
    """Byte offset in one 8 x 128-byte K_SW128 atom of the 16-byte chunk `chunk16` of `row`."""
    return row * 128 + ((chunk16 ^ row) << 4)
