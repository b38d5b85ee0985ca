"""Phase 2, beside the lists: bf16 activations to FP8 in swizzled shared memory; consumer warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_moe.kernels.device.quant import swizzled_octet, to_terms
from cute_moe.kernels.moe.memory import Shared
from cute_moe.kernels.moe.spec import MAX_TOKENS


@cute.jit
def quantise_x(x: cute.Tensor, tid: Int32, shared: Shared, spec: cutlass.Constexpr):
    """Half-warp i of 16 quantises features 128 i .. 128 i + 127 of every token."""
    num_tokens = x.shape[0]
    block = tid >> 4
    part = tid & 15
    raw = cute.make_rmem_tensor((8, MAX_TOKENS), x.element_type)
    for t in cutlass.range_constexpr(MAX_TOKENS):
        if t < num_tokens:
            src = (x.iterator + t * x.shape[1] + block * 128 + part * 8).align(16)
            cute.autovec_copy(cute.make_tensor(src, cute.make_layout(8)), raw[None, t])
    for t in cutlass.range_constexpr(MAX_TOKENS):
        if t < num_tokens:
            words = cute.recast_tensor(raw[None, t], Int32)
            terms, scale = to_terms(words, 16, spec.terms)
            for i in cutlass.range_constexpr(spec.terms):
                place = (block * spec.terms + i) * 128 + swizzled_octet(Int32(t), part)
                octets = cute.make_tensor(shared.x_octets + place, cute.make_layout(1))
                octets[0] = cute.recast_tensor(terms[i], Int64)[0]
            if part == 0:
                shared.x_scale[block * 8 + t] = scale
    cute.arch.fence_view_async_shared()
