"""Phase 2, beside the lists: bf16 activations to FP8 in swizzled shared memory; consumer warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_moe.kernels.device.quant import swizzled_octet, to_terms
from cute_moe.kernels.moe.memory import ATOM_BYTES, CONSUMER_WARPS, WARP, Shared
from cute_moe.kernels.moe.spec import BLOCK, MAX_TOKENS

OCTET = 8  # features of one lane
BLOCK_LANES = BLOCK // OCTET
WORKERS = CONSUMER_WARPS * WARP // BLOCK_LANES
FEW_TOKENS = 2


@cute.jit
def quantise_x(x: cute.Tensor, tid: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Half-warp i of 16 quantises blocks i, i + 16, ... of 128 features of every token.

    A lane has eight loads in flight: of eight tokens, or of several rounds where there are few.
    """
    rounds = cutlass.const_expr((spec.k_blocks + WORKERS - 1) // WORKERS)
    worker = tid // BLOCK_LANES
    if cutlass.const_expr(rounds == 1):
        quantise_rounds(x, worker, 1, MAX_TOKENS, tid, shared, spec)
    elif x.shape[0] <= FEW_TOKENS:
        quantise_rounds(x, worker, rounds, FEW_TOKENS, tid, shared, spec)
    else:
        for block in cutlass.range(worker, rounds * WORKERS, WORKERS, unroll=1):
            quantise_rounds(x, block, 1, MAX_TOKENS, tid, shared, spec)
    cute.arch.fence_view_async_shared()


@cute.jit
def quantise_rounds(
    x: cute.Tensor, block: Int32, rounds: cutlass.Constexpr, tokens: cutlass.Constexpr, tid: Int32,
    shared: Shared, spec: cutlass.Constexpr,
):  # fmt: skip
    """Blocks block, block + 16, ... of `tokens` tokens at most; all loads come first."""
    octet = tid % BLOCK_LANES
    raw = cute.make_rmem_tensor((OCTET, rounds * tokens), x.element_type)
    raw.fill(0.0)
    for r in cutlass.range_constexpr(rounds):
        for t in cutlass.range_constexpr(tokens):
            b = block + r * WORKERS
            if (t < x.shape[0]) & (b < spec.k_blocks):
                source = (x.iterator + t * spec.hidden + b * BLOCK + octet * OCTET).align(16)
                target = raw[None, r * tokens + t]
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(OCTET)), target)
    for r in cutlass.range_constexpr(rounds):
        for t in cutlass.range_constexpr(tokens):
            if t < x.shape[0]:
                words = cute.recast_tensor(raw[None, r * tokens + t], Int32)
                quantise_block(words, t, block + r * WORKERS, octet, shared, spec)


@cute.jit
def quantise_block(
    words: cute.Tensor, token: cutlass.Constexpr, block: Int32, octet: Int32, shared: Shared, spec
):
    """Quantise a block of a token, 16 lanes; none is stored that lies beyond K."""
    terms, scale = to_terms(words, BLOCK_LANES, spec.terms)
    inside = cutlass.const_expr(spec.k_blocks % WORKERS == 0)
    if inside | (block < spec.k_blocks):
        for i in cutlass.range_constexpr(spec.terms):
            atom = (block * spec.terms + i) * (ATOM_BYTES // OCTET)
            place = atom + swizzled_octet(Int32(token), octet)
            octets = cute.make_tensor(shared.x_octets + place, cute.make_layout(1))
            octets[0] = cute.recast_tensor(terms[i], Int64)[0]
        if octet == 0:
            shared.x_scale[block * MAX_TOKENS + token] = scale
