"""Winners across the threads of a CTA: shuffles within a warp, a tree in shared memory beyond."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_moe.kernels.argmin.order import first_of


class Board(NamedTuple):
    """One (place, key) for each thread of a CTA, in shared memory."""

    places: cute.Tensor
    keys: cute.Tensor


def make_board(smem: SmemAllocator, threads: int) -> Board:
    """Allocate a board: 12 bytes a thread."""
    layout = cute.make_layout(threads)
    places = smem.allocate_tensor(Int64, layout, byte_alignment=16)
    return Board(places, smem.allocate_tensor(Int32, layout, byte_alignment=16))


@cute.jit
def share_lanes(key: Int32, place: Int64, lanes: Int32):
    """The winner of each group of `lanes` (a power of two) neighbouring lanes, in all of them."""
    for s in cutlass.range_constexpr(5):
        if (1 << s) < lanes:
            other_key = cute.arch.shuffle_sync_bfly(key, offset=1 << s)
            other_place = cute.arch.shuffle_sync_bfly(place, offset=1 << s)
            key, place = first_of(key, place, other_key, other_place)
    return key, place


@cute.jit
def share_tree(
    board: Board, entry: Int32, worker: Int32, workers: Int32, stride: Int32, member: Boolean
):
    """Leave the winner of entries entry, entry + stride, ... in that of worker 0.

    All threads of the CTA call it, after they wrote their entries; `member`: this one has an entry,
    number `worker` of `workers`. Worker 0 may read its own entry after it.
    """
    span = Int32(1)
    while span < workers:
        span = span * 2
    while span > 1:
        span = span // 2
        cute.arch.sync_threads()
        if member & (worker < span) & (worker + span < workers):
            other = entry + span * stride
            key, place = first_of(
                board.keys[entry], board.places[entry], board.keys[other], board.places[other]
            )
            board.keys[entry] = key
            board.places[entry] = place
