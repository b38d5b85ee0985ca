"""From bf16 in registers to e4m3, by the scale rules that `cute_moe.reference` states in torch."""

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


def tree(op, items: list):
    """`op` over all items, in pairs, pairs of pairs and so on: short chains of dependence."""
    while len(items) > 1:
        rest = items[len(items) // 2 * 2 :]
        items = [op(a, b) for a, b in zip(items[::2], items[1::2], strict=False)] + rest
    return items[0]


@cute.jit
def larger_magnitudes(a: Int32, b: Int32) -> Int32:
    """Of two words of two bf16 the larger magnitudes, with signs that mean nothing."""
    return cute.arch.inline_ptx(
        "max.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[a, b],
    )


@cute.jit
def unpack_bf16(word: Int32):
    """The two bf16 values of a word as fp32, low half first."""
    w = cute.make_rmem_tensor(2, Int32)
    w[0] = word << 16
    w[1] = word & Int32(-65536)
    f = cute.recast_tensor(w, Float32)
    return f[0], f[1]


@cute.jit
def shared_amax(words: cute.Tensor, lanes: cutlass.Constexpr, floor: cutlass.Constexpr) -> Float32:
    """The largest magnitude in the words (two bf16 each) of `lanes` neighbouring lanes, or `floor`.

    A NaN does not count.
    """
    word = tree(larger_magnitudes, [words[i] for i in range(cute.size(words))])
    step = cutlass.const_expr(lanes // 2)
    for s in cutlass.range_constexpr(step.bit_length()):
        word = larger_magnitudes(word, cute.arch.shuffle_sync_bfly(word, offset=1 << s))
    low, high = unpack_bf16(word & Int32(0x7FFF7FFF))
    return cute.arch.fmax(cute.arch.fmax(low, high), Float32(floor))


@cute.jit
def unpack(words: cute.Tensor) -> cute.Tensor:
    """The bf16 values of the words, rmem fp32."""
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    for i in cutlass.range_constexpr(cute.size(words)):
        values[2 * i], values[2 * i + 1] = unpack_bf16(words[i])
    return values


@cute.jit
def quantize(words: cute.Tensor, lanes: cutlass.Constexpr):
    """Quantise bf16 values that `lanes` neighbouring lanes share one scale for.

    words: rmem int32 [n] of two bf16 each, 2 n lanes == 128. Returns (rmem int32 [n / 2] of four
    e4m3, scale). Called by whole warps.
    """
    amax = shared_amax(words, lanes, MIN_AMAX)
    s0 = amax * Float32(1.0 / E4M3_MAX)
    scale = s0 + (amax - s0 * Float32(E4M3_MAX)) * Float32(1.0 / E4M3_MAX)
    # 1 / scale as high + low, so that the product is as good as a division.
    high = cute.arch.rcp_approx(scale)
    low = high * (Float32(1.0) - high * scale)
    values = unpack(words)
    scaled = cute.make_rmem_tensor(cute.size(values), Float32)
    for i in cutlass.range_constexpr(cute.size(values)):
        scaled[i] = values[i] * high + values[i] * low
    out = cute.make_rmem_tensor(cute.size(values), Float8E4M3FN)
    out.store(scaled.load().to(Float8E4M3FN))
    return cute.recast_tensor(out, Int32), scale


@cute.jit
def split(words: cute.Tensor, lanes: cutlass.Constexpr):
    """Two e4m3 terms of bf16 values that `lanes` neighbouring lanes share one scale for.

    words: as for `quantize`. Returns (words of the first term, words of the second, scale):
    value = scale * (first + second / RESIDUAL). The scale is a power of two, so that a
    value down to 2^-15 of the largest is exact; smaller ones lose at most 2^-22 of it.
    An infinity makes the scale a NaN; a NaN stays one in its own terms.
    """
    amax = shared_amax(words, lanes, MIN_AMAX_SPLIT)
    w = cute.make_rmem_tensor(3, Float32)
    w[0] = amax
    bits = cute.recast_tensor(w, Int32)
    # The largest value comes to lie in [128, 256).
    bits[1] = (bits[0] & Int32(0x7F800000)) - Int32(7 << 23)
    bits[2] = Int32(254 << 23) - bits[1]
    values = unpack(words)
    n = cutlass.const_expr(cute.size(values))
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
def to_terms(words: cute.Tensor, lanes: cutlass.Constexpr, terms: cutlass.Constexpr):
    """`quantize` (one term) or `split` (two): (list of words of each term, scale)."""
    if cutlass.const_expr(terms == 1):
        values, scale = quantize(words, lanes)
        return [values], scale
    else:
        first, second, scale = split(words, lanes)
        return [first, second], scale


@cute.jit
def swizzled_octet(row: Int32, octet: Int32) -> Int32:
    """Place, in units of 8 bytes, of octet 0..15 of `row` in one 8 x 128-byte K_SW128 atom."""
    return row * 16 + (octet ^ (row * 2))
