"""One thread's scan: vectors at a fixed stride, many loads in flight, no masks.

Past its end a scan visits its last vector again instead of testing every load: an element that is
seen twice under its own index changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_moe.kernels.argmin.order import folded, make_marks, widened, wins


class Track(NamedTuple):
    """Where a thread's vectors lie: step i at `start` + i * `stride` elements, i < `steps`."""

    start: cute.Pointer
    stride: Int64
    steps: Int32


@cute.jit
def load(address: cute.Pointer, spec: cutlass.Constexpr):
    """A vector of elements in registers."""
    nbytes = spec.vector * address.dtype.width // 8
    source = cute.make_tensor(address.align(nbytes), cute.make_layout(spec.vector))
    values = cute.make_rmem_tensor(spec.vector, address.dtype)
    cute.autovec_copy(source, values)
    return values


@cute.jit
def load_steps(
    track: Track,
    first: Int32,
    offsets: list,
    clamped: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Issue the loads of steps first .. first + unroll - 1: (their numbers, [step][column])."""
    numbers, vectors = [], []
    address = track.start + Int64(first) * track.stride
    for u in cutlass.range_constexpr(spec.unroll):
        number = first + u
        if cutlass.const_expr(clamped):
            number = cutlass.min(number, track.steps - 1)
            address = track.start + Int64(number) * track.stride
        numbers.append(number)
        vectors.append([load(address + offset, spec) for offset in offsets])
        if cutlass.const_expr(not clamped):
            address = address + track.stride
    return numbers, vectors


@cute.jit
def visit_columns(
    track: Track,
    first: Int32,
    offsets: list,
    best: cute.Tensor,
    at: cute.Tensor,
    clamped: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """One batch of steps: every element of a step has a winner of its own."""
    numbers, vectors = load_steps(track, first, offsets, clamped, spec)
    for u in cutlass.range_constexpr(spec.unroll):
        for c in cutlass.range_constexpr(spec.columns):
            for v in cutlass.range_constexpr(spec.vector):
                slot = c * spec.vector + v
                value = widened(vectors[u][c][v], spec)
                take = wins(value, best[slot], spec)
                best[slot] = cutlass.select_(take, value, best[slot])
                at[slot] = cutlass.select_(take, numbers[u], at[slot])


@cute.jit
def scan_columns(track: Track, offsets: list, spec: cutlass.Constexpr):
    """(winner, its step) for each element of the vectors at `offsets`, the thread's columns."""
    best, at = make_marks(spec.columns * spec.vector, spec)
    whole = track.steps // spec.unroll * spec.unroll
    for first in cutlass.range(0, whole, spec.unroll, unroll=1):
        visit_columns(track, first, offsets, best, at, False, spec)
    if whole < track.steps:
        visit_columns(track, whole, offsets, best, at, True, spec)
    return best, at


@cute.jit
def visit_row(
    track: Track,
    first: Int32,
    best: cute.Tensor,
    at: cute.Tensor,
    kept: cute.Tensor,
    clamped: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """One batch of steps: one winner for all elements; `kept` is the vector that has it."""
    numbers, vectors = load_steps(track, first, [0], clamped, spec)
    words = cute.recast_tensor(kept, Int32)
    for u in cutlass.range_constexpr(spec.unroll):
        value = folded(vectors[u][0], spec)
        take = wins(value, best[0], spec)
        best[0] = cutlass.select_(take, value, best[0])
        at[0] = cutlass.select_(take, numbers[u], at[0])
        found = cute.recast_tensor(vectors[u][0], Int32)
        for w in cutlass.range_constexpr(cute.size(words)):
            words[w] = cutlass.select_(take, found[w], words[w])


@cute.jit
def scan_row(track: Track, spec: cutlass.Constexpr):
    """(winner, its step, its position in the vector) of this thread's share of one reduction."""
    best, at = make_marks(1, spec)
    kept = cute.make_rmem_tensor(spec.vector, track.start.dtype)
    cute.recast_tensor(kept, Int32).fill(0)
    whole = track.steps // spec.unroll * spec.unroll
    for first in cutlass.range(0, whole, spec.unroll, unroll=1):
        visit_row(track, first, best, at, kept, False, spec)
    if whole < track.steps:
        visit_row(track, whole, best, at, kept, True, spec)
    position = Int32(0)
    for back in cutlass.range_constexpr(spec.vector):
        v = spec.vector - 1 - back
        value = widened(kept[v], spec)
        # A winner is the first NaN where there is one, and then the winning value is NaN.
        same = (value == best[0]) | (value != value)
        position = Int32(cutlass.select_(same, Int32(v), position))
    return best[0], at[0], position
