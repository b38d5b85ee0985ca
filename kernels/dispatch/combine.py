"""Combine: every token's weighted sum over its k packed rows, in fp32 and in slot order."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Float8E4M3FN,
    Float8E5M2,
    Float16,
    Float32,
    Float64,
    Int32,
    Int64,
)
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_moe.kernels.dispatch.rows import (
    INDEX_TYPES,
    fake_vector,
    follow_kernel_ahead,
    row_of,
    row_start,
)
from cute_moe.kernels.dispatch.spec import CombineSpec

VALUE_TYPES = {
    "float64": Float64,
    "float32": Float32,
    "bfloat16": BFloat16,
    "float16": Float16,
    "float8_e4m3fn": Float8E4M3FN,
    "float8_e5m2": Float8E5M2,
}


def sum_type(spec: CombineSpec):
    """The type of the sum: fp32, or fp64 for rows of fp64."""
    return Float64 if spec.dtype == "float64" else Float32


@cute.jit
def add_slots(total, packed, pairs, weights, token, j, vector, spec: cutlass.Constexpr):
    """Add slots j .. j + batch - 1 of `token` to `total`; their loads are in flight together."""
    expert, slot, offsets = pairs
    value = VALUE_TYPES[spec.dtype]
    width = spec.vector * 8 // value.width
    k = expert.shape[1]
    values = cute.make_rmem_tensor((width, spec.batch), value)
    scales = cute.make_rmem_tensor(spec.batch, sum_type(spec))
    rows = cute.make_rmem_tensor(spec.batch, Int32)
    for i in cutlass.range_constexpr(spec.batch):
        at = cutlass.min(j + i, k - 1)
        row = row_of(expert[token, at], slot[token, at], offsets, packed.shape[0])
        scales[i] = weights[token, at].to(sum_type(spec))
        if j + i >= k:
            row = Int32(-1)
        rows[i] = row
    for i in cutlass.range_constexpr(spec.batch):
        if rows[i] >= 0:
            cute.autovec_copy(values_at(packed, rows[i], vector, spec), values[None, i])
    for i in cutlass.range_constexpr(spec.batch):
        if rows[i] >= 0:
            for c in cutlass.range_constexpr(width):
                total[c] = total[c] + scales[i] * values[c, i].to(sum_type(spec))


def values_at(rows: cute.Tensor, row, vector, spec: CombineSpec) -> cute.Tensor:
    """Vector number `vector` of a row."""
    value = VALUE_TYPES[spec.dtype]
    address = row_start(rows, row).toint() + Int64(vector) * spec.vector
    pointer = cute.make_ptr(value, address, cute.AddressSpace.gmem, assumed_align=spec.vector)
    return cute.make_tensor(pointer, cute.make_layout(spec.vector * 8 // value.width))


@cute.kernel
def combine_kernel(
    packed: cute.Tensor, pairs, weights: cute.Tensor, out: cute.Tensor, spec: cutlass.Constexpr
):
    """The x threads of a CTA make the row of one token for each y; grid y shares out columns."""
    lane, y, _ = cute.arch.thread_idx()
    lanes, tokens_per_cta, _ = cute.arch.block_dim()
    cta, part, _ = cute.arch.block_idx()
    _, parts, _ = cute.arch.grid_dim()
    value = VALUE_TYPES[spec.dtype]
    width = spec.vector * 8 // value.width
    token = cta * tokens_per_cta + y
    follow_kernel_ahead()
    if token < out.shape[0]:
        vector = part * lanes + lane
        while vector < out.shape[1] // width:
            total = cute.make_rmem_tensor(width, sum_type(spec))
            total.fill(0.0)
            for j in cutlass.range(0, pairs[0].shape[1], spec.batch, unroll=1):
                add_slots(total, packed, pairs, weights, token, j, vector, spec)
            result = cute.make_rmem_tensor(width, value)
            result.store(total.load().to(value))
            cute.autovec_copy(result, values_at(out, token, vector, spec))
            vector = vector + parts * lanes


@cute.jit
def launch_combine(
    packed: cute.Tensor,
    pairs,
    weights: cute.Tensor,
    out: cute.Tensor,
    plan,
    stream,
    spec: cutlass.Constexpr,
):
    """plan: (lanes, rows, parts). CTAs of lanes x rows threads, `parts` for the same tokens."""
    lanes, rows, parts = plan
    combine_kernel.set_name_prefix("combine", remove_cutlass_symbol=True, keep_mangled_name=False)
    combine_kernel(packed, pairs, weights, out, spec).launch(
        grid=((out.shape[0] + rows - 1) // rows, parts, 1),
        block=(lanes, rows, 1),
        max_number_threads=[spec.threads, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )


def build(spec: CombineSpec, options: str):
    """Compile for arguments packed [R, H], (expert [T, k], slot [T, k], offsets [E + 1]),
    weights [T, k], out [T, H], (lanes, rows, parts); the rows of `packed` may be strided."""
    value = VALUE_TYPES[spec.dtype]
    tokens, k, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def matrix(dtype, size, width):
        nbytes = dtype.width // 8
        return make_fake_tensor(dtype, (size, width), (cute.sym_int64(), 1), assumed_align=nbytes)

    return cute.compile(
        launch_combine,
        matrix(value, cute.sym_int(), hidden),
        (
            matrix(INDEX_TYPES[spec.expert_dtype], tokens, k),
            matrix(INDEX_TYPES[spec.slot_dtype], tokens, k),
            fake_vector(INDEX_TYPES[spec.offset_dtype], cute.sym_int()),
        ),
        matrix(VALUE_TYPES[spec.weight_dtype], tokens, k),
        matrix(value, tokens, hidden),
        tuple(Int32(1) for _ in range(3)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        spec,
        options=options,
    )
