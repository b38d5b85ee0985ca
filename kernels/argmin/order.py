"""What wins: elements in a scan, folded vectors, and results of scans."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

NAN_KEY = -(1 << 31)  # below the key of every other float
NO_KEY = (1 << 31) - 1
NO_PLACE = (1 << 63) - 1


def start_value(spec):
    """What a scan starts with: it loses to all but its own equals, and those need not win."""
    if spec.dtype == "int32":
        return Int32(-(1 << 31) if spec.largest else (1 << 31) - 1)
    return Float32(float("-inf") if spec.largest else float("inf"))


@cute.jit
def widened(value, spec: cutlass.Constexpr):
    """An element in the type that scans compare in: fp32 for all floats."""
    wide = value
    if cutlass.const_expr(spec.dtype != "int32"):
        wide = Float32(value)
    return wide


@cute.jit
def wins(value, best, spec: cutlass.Constexpr):
    """Whether `value` replaces `best`, which comes earlier: the first NaN stays for good."""
    if cutlass.const_expr(spec.dtype == "int32"):
        take = value > best if cutlass.const_expr(spec.largest) else value < best
    else:
        loses = value <= best if cutlass.const_expr(spec.largest) else value >= best
        take = (loses == False) & (best == best)  # noqa: E712 (traced)
    return take


@cute.jit
def better(a, b, spec: cutlass.Constexpr):
    """The value that wins of two: the minimum or maximum; NaN if one of them is NaN."""
    if cutlass.const_expr(spec.dtype == "int32"):
        value = cutlass.max(a, b) if cutlass.const_expr(spec.largest) else cutlass.min(a, b)
    elif cutlass.const_expr(spec.largest):
        value = cute.arch.fmax(a, b, nan=True)
    else:
        value = cute.arch.fmin(a, b, nan=True)
    return value


@cute.jit
def folded(values: cute.Tensor, spec: cutlass.Constexpr):
    """The value that wins of a vector's elements."""
    left = [widened(values[i], spec) for i in range(cute.size(values))]
    while cutlass.const_expr(len(left) > 1):
        left = [better(left[i], left[i + 1], spec) for i in range(0, len(left), 2)]
    return left[0]


@cute.jit
def make_marks(slots: cutlass.Constexpr, spec: cutlass.Constexpr):
    """(best value, step of it) for each of `slots` scans, in registers, as they start."""
    start = start_value(spec)
    best = cute.make_rmem_tensor(slots, type(start))
    at = cute.make_rmem_tensor(slots, Int32)
    best.fill(start)
    at.fill(0)
    return best, at


@cute.jit
def sort_key(best, spec: cutlass.Constexpr) -> Int32:
    """An Int32 that is lower for what wins, equal for equals (both zeros), NAN_KEY for NaN."""
    if cutlass.const_expr(spec.dtype == "int32"):
        key = ~best if cutlass.const_expr(spec.largest) else best
    else:
        word = cute.make_rmem_tensor(1, Float32)
        word[0] = best + Float32(0.0)  # -0.0 becomes +0.0
        bits = cute.recast_tensor(word, Int32)[0]
        key = bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))
        if cutlass.const_expr(spec.largest):
            key = ~key
        key = Int32(cutlass.select_(best == best, key, Int32(NAN_KEY)))
    return key


@cute.jit
def first_of(key: Int32, place: Int64, other_key: Int32, other_place: Int64):
    """The winner of two results (key, place): the lower key, then the lower place."""
    take = (other_key < key) | ((other_key == key) & (other_place < place))
    won_key = Int32(cutlass.select_(take, other_key, key))
    won_place = Int64(cutlass.select_(take, other_place, place))
    return won_key, won_place
