"""Phase 2, beside the lists: bf16 activations to FP8 in swizzled shared memory; consumer warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_moe.kernels.device.quant import swizzled_offset, to_terms
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
            values = cute.make_rmem_tensor(8, Float32)
            values.store(raw[None, t].load().to(Float32))
            terms, scale = to_terms(values, 16, spec.terms)
            offset = swizzled_offset(Int32(t), part >> 1) + (part & 1) * 8
            for i in cutlass.range_constexpr(spec.terms):
                place = shared.x_bytes + (block * spec.terms + i) * 1024 + offset
                dst = cute.recast_ptr(place.align(8), dtype=Int32)
                cute.autovec_copy(terms[i], cute.make_tensor(dst, cute.make_layout(2)))
            if part == 0:
                shared.x_scale[block * 8 + t] = scale
    cute.arch.fence_view_async_shared()
