"""From fp32 registers to e4m3: the only home of the e4m3 maximum and the scale rules."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32

E4M3_MAX = 448.0
MIN_AMAX = 1e-10  # the block-FP8 contract's
MIN_AMAX_SPLIT = 2.0**-100  # the scale of a split block and its reciprocal stay normal numbers
RESIDUAL = 32.0  # the second term of a split value is stored this much larger


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
    amax = shared_amax(values, lanes, MIN_AMAX)
    s0 = amax * Float32(1.0 / E4M3_MAX)
    scale = s0 + (amax - s0 * Float32(E4M3_MAX)) * Float32(1.0 / E4M3_MAX)
    # 1 / scale as high + low, so that the product is as good as a division.
    high = cute.arch.rcp_approx(scale)
    low = high * (Float32(1.0) - high * scale)
    scaled = cute.make_rmem_tensor(n, Float32)
    for i in cutlass.range_constexpr(n):
        scaled[i] = values[i] * high + values[i] * low
    out = cute.make_rmem_tensor(n, Float8E4M3FN)
    out.store(scaled.load().to(Float8E4M3FN))
    return cute.recast_tensor(out, Int32), scale


@cute.jit
def split(values: cute.Tensor, lanes: cutlass.Constexpr):
    """Two e4m3 terms of fp32 registers that `lanes` neighbouring lanes share one scale for.

    values: rmem fp32 [n], n * lanes == 128. Returns (words of the first term, words of the second,
    scale): value = scale * (first + second / RESIDUAL). The scale is a power of two, so that a
    bf16 value down to 2^-15 of the largest is exact; smaller ones lose at most 2^-22 of it.
    An infinity makes the scale a NaN; a NaN stays one in its own terms.
    """
    n = cutlass.const_expr(cute.size(values))
    amax = shared_amax(values, lanes, MIN_AMAX_SPLIT)
    w = cute.make_rmem_tensor(3, Float32)
    w[0] = amax
    bits = cute.recast_tensor(w, Int32)
    # The largest value comes to lie in [128, 256).
    bits[1] = (bits[0] & Int32(0x7F800000)) - Int32(7 << 23)
    bits[2] = Int32(254 << 23) - bits[1]
    scaled = cute.make_rmem_tensor(n, Float32)
    for i in cutlass.range_constexpr(n):
        scaled[i] = values[i] * w[2]
    first = cute.make_rmem_tensor(n, Float8E4M3FN)
    first.store(scaled.load().to(Float8E4M3FN))
    rounded = first.load().to(Float16).to(Float32)
    second = cute.make_rmem_tensor(n, Float8E4M3FN)
    second.store(((scaled.load() - rounded) * Float32(RESIDUAL)).to(Float8E4M3FN))
    scale = w[1] + (amax - amax)
    return cute.recast_tensor(first, Int32), cute.recast_tensor(second, Int32), scale


@cute.jit
def to_terms(values: cute.Tensor, lanes: cutlass.Constexpr, terms: cutlass.Constexpr):
    """`quantize` (one term) or `split` (two): (list of words of each term, scale)."""
    if cutlass.const_expr(terms == 1):
        words, scale = quantize(values, lanes)
        return [words], scale
    else:
        first, second, scale = split(values, lanes)
        return [first, second], scale


@cute.jit
def shared_amax(values: cute.Tensor, lanes: cutlass.Constexpr, floor: cutlass.Constexpr) -> Float32:
    """The largest magnitude among the registers of `lanes` neighbouring lanes, or `floor`."""
    amax = Float32(floor)
    for i in cutlass.range_constexpr(cute.size(values)):
        amax = cute.arch.fmax(amax, cute.arch.fmax(values[i], -values[i]))
    step = cutlass.const_expr(lanes // 2)
    for s in cutlass.range_constexpr(step.bit_length()):
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << s))
    return amax


@cute.jit
def swizzled_offset(row: Int32, chunk16: Int32) -> Int32:
    """Byte offset in one 8 x 128-byte K_SW128 atom of the 16-byte chunk `chunk16` of `row`."""
    return row * 128 + ((chunk16 ^ row) << 4)
