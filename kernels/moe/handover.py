"""The h hand-over between phases 3 and 4: eight loader warps poll, quantise and stage h.

Every word of h in the scratchpad is its own ready flag (see docs/sync.md), so a word that was read
non-zero is the value and no fence is needed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.quant import quantize, swizzled_offset, unpack_bf16
from cute_moe.kernels.moe.memory import LOADER_WARPS, Shared

POLL_LIMIT = 1 << 24  # polls of about 1 us each before a lost writer traps


@cute.jit
def chunk_slot(chunk: Int32, warp: Int32) -> Int32:
    """Slot that `warp` serves in `chunk`; rotated, since low slots are filled more often."""
    return chunk * 8 + ((warp + 4 * chunk) & 7)


@cute.jit
def load_row(address: cute.Pointer, words: cute.Tensor):
    """Read this lane's eight words of a row (16 features)."""
    for half in cutlass.range_constexpr(2):
        w = cute.arch.inline_ptx(
            "ld.relaxed.gpu.global.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address + 4 * half],
        )
        for i in cutlass.range_constexpr(4):
            words[4 * half + i] = w[i]


@cute.jit
def wait_rows(
    h_in: cute.Pointer, first: Int32, warp: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """Poll four words of each of this warp's rows in chunks first .. first + 7 until set."""
    lane = cute.arch.lane_idx()
    entry = shared.chunk_rows[chunk_slot(first + (lane >> 2), warp)]
    pair = entry & 0xFF
    # One word of units 0, 5, 10 and 15 of the 16 that make a row.
    address = h_in + pair * (spec.intermediate // 2) + (lane & 3) * 80 + 15
    word = Int32(1)
    if entry >= 0:
        word = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
    polls = Int32(0)
    while cute.arch.vote_any_sync(word == 0):
        if entry >= 0:
            word = cute.arch.load(address, Int32, sem="relaxed", scope="gpu")
        polls = polls + 1
        if polls > POLL_LIMIT:
            cute.arch.inline_ptx("trap;")


@cute.jit
def stage_row(
    h_in: cute.Pointer, chunk: Int32, warp: Int32, shared: Shared, spec: cutlass.Constexpr
):
    """Quantise this warp's row of `chunk` into shared memory and arrive on the chunk."""
    lane = cute.arch.lane_idx()
    slot = chunk_slot(chunk, warp)
    entry = shared.chunk_rows[slot]
    if entry >= 0:
        words = cute.make_rmem_tensor(8, Int32)
        address = h_in + (entry & 0xFF) * (spec.intermediate // 2) + lane * 8
        load_row(address, words)
        polls = Int32(0)
        while cute.arch.vote_any_sync(missing(words)):
            load_row(address, words)
            polls = polls + 1
            if polls > POLL_LIMIT:
                cute.arch.inline_ptx("trap;")
        values = cute.make_rmem_tensor(16, Float32)
        for i in cutlass.range_constexpr(8):
            values[2 * i], values[2 * i + 1] = unpack_bf16(words[i])
        quantised, scale = quantize(values, 8)
        row = slot & 7
        offset = (chunk * spec.h_blocks + (lane >> 3)) * 1024 + swizzled_offset(row, lane & 7)
        dst = cute.recast_ptr((shared.h_bytes + offset).align(16), dtype=Int32)
        cute.autovec_copy(quantised, cute.make_tensor(dst, cute.make_layout(4)))
        if (lane & 7) == 0:
            shared.h_scale[(chunk * spec.h_blocks + (lane >> 3)) * 8 + row] = scale
        cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(shared.h_ready + chunk)


@cute.jit
def missing(words: cute.Tensor):
    """Whether any of the words has not been written yet."""
    absent = words[0] == 0
    for i in cutlass.range_constexpr(1, 8):
        absent = absent | (words[i] == 0)
    return absent


@cute.jit
def load_h(h_words: cute.Pointer, warp: Int32, shared: Shared, spec: cutlass.Constexpr):
    """A loader warp's second life, after routing: wait for the gate, then stage all chunks."""
    cute.arch.mbarrier_wait(shared.lists, 0)
    cute.arch.mbarrier_wait(shared.gate, 0)
    h_in = h_words + shared.meta[2] * spec.h_words
    chunks = shared.meta[1]
    for first in cutlass.range(0, chunks, LOADER_WARPS, unroll=1):
        wait_rows(h_in, first, warp, shared, spec)
        for chunk in cutlass.range(first, cutlass.min(first + LOADER_WARPS, chunks), unroll=1):
            stage_row(h_in, chunk, warp, shared, spec)


@cute.jit
def clear_next(h_words: cute.Pointer, shared: Shared, spec: cutlass.Constexpr):
    """Clear this CTA's share of the other parity's h for the next launch; one warp."""
    cta, _, _ = cute.arch.block_idx()
    cute.arch.mbarrier_wait(shared.lists, 0)
    other = h_words + (1 - shared.meta[2]) * spec.h_words
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    start = (cta * 32 + cute.arch.lane_idx()) * 4
    for i in cutlass.range(start, spec.h_words, spec.grid * 128, unroll=1):
        dst = cute.make_tensor((other + i).align(16), cute.make_layout(4))
        cute.autovec_copy(zero, dst)
