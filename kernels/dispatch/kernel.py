"""Dispatch in one launch: copying CTAs own tokens, zeroing CTAs own rows of the result.

With no more rows than tokens there are no zeroing CTAs. Then a row stays unfilled only when a
token is dropped, and the CTAs that drop one zero what is left. A valid dispatch pays for that
with one vote at the end of a CTA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from cute_moe.kernels.dispatch.rows import (
    fake_pairs,
    fake_rows,
    follow_kernel_ahead,
    row_of,
    row_start,
    vector_at,
    vector_registers,
)
from cute_moe.kernels.dispatch.spec import DispatchSpec
from cute_moe.kernels.dispatch.zero import share_of_dropped, zero_unfilled


@cute.jit
def copy_token(src: cute.Tensor, pairs, out: cute.Tensor, token: Int32, spec: cutlass.Constexpr):
    """Copy a token's row by the x threads of a CTA; 1 if the token is dropped, else 0."""
    expert, slot, offsets = pairs
    lane, _, _ = cute.arch.thread_idx()
    lanes, _, _ = cute.arch.block_dim()
    dropped = Int32(0)
    if token < src.shape[0]:
        its_expert, its_slot = expert[token], slot[token]
        source, vectors = row_start(src, token), src.shape[1] // spec.vector
        data = vector_registers(spec.vector)
        # The data do not depend on where they go: both come from memory at the same time.
        vector = lane
        if vector < vectors:
            cute.autovec_copy(vector_at(source, vector, spec.vector), data)
        row = row_of(its_expert, its_slot, offsets, out.shape[0])
        if row >= 0:
            target = row_start(out, row)
            if vector < vectors:
                cute.autovec_copy(data, vector_at(target, vector, spec.vector))
            vector = vector + lanes
            while vector < vectors:
                cute.autovec_copy(vector_at(source, vector, spec.vector), data)
                cute.autovec_copy(data, vector_at(target, vector, spec.vector))
                vector = vector + lanes
        else:
            dropped = Int32(1)
    return dropped


@cute.jit
def any_in_cta(flag: Int32) -> Int32:
    """Not 0 if a thread of the CTA has a flag of 1; a barrier for all of them."""
    # The vote of the warp brings its threads together: inline PTX alone may be duplicated into
    # the branches in front of it.
    warp_flag = Int32(0)
    if cute.arch.vote_any_sync(flag != 0):
        warp_flag = Int32(1)
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.popc.aligned.u32 {$w0}, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[warp_flag],
    )


@cute.kernel
def dispatch_kernel(
    src: cute.Tensor, pairs, out: cute.Tensor, zeroing: Int32, spec: cutlass.Constexpr
):
    """The first `zeroing` CTAs zero; each of the others copies as many tokens as it has y."""
    _, y, _ = cute.arch.thread_idx()
    _, tokens_per_cta, _ = cute.arch.block_dim()
    cta, _, _ = cute.arch.block_idx()
    rows = out.shape[0]
    first, end = Int32(0), Int32(0)
    follow_kernel_ahead()
    if cta < zeroing:
        share = (rows + zeroing - 1) // zeroing
        first = cutlass.min(cta * share, rows)
        end = cutlass.min(first + share, rows)
    else:
        copier = cta - zeroing
        dropped = copy_token(src, pairs, out, copier * tokens_per_cta + y, spec)
        some_dropped = any_in_cta(dropped)
        if (some_dropped > 0) & (zeroing == 0):
            first, end = share_of_dropped(pairs, rows, copier, tokens_per_cta)
    if first < end:
        zero_unfilled(pairs, out, first, end, spec)


@cute.jit
def launch_dispatch(
    src: cute.Tensor,
    pairs,
    out: cute.Tensor,
    plan,
    stream,
    spec: cutlass.Constexpr,
):
    """plan: (lanes, rows, zeroing). CTAs of lanes x rows threads, the zeroing ones first."""
    lanes, rows, zeroing = plan
    dispatch_kernel.set_name_prefix("dispatch", remove_cutlass_symbol=True, keep_mangled_name=False)
    dispatch_kernel(src, pairs, out, zeroing, spec).launch(
        grid=(zeroing + (src.shape[0] + rows - 1) // rows, 1, 1),
        block=(lanes, rows, 1),
        max_number_threads=[spec.threads, 1, 1],
        stream=stream,
        use_pdl=True,
    )


def build(spec: DispatchSpec, options: str):
    """Compile for arguments src [T, bytes], (expert [T], slot [T], offsets [E + 1]),
    out [R, bytes], (lanes, rows, zeroing)."""
    tokens, row_bytes = cute.sym_int(), cute.sym_int()
    return cute.compile(
        launch_dispatch,
        fake_rows(tokens, row_bytes),
        fake_pairs(spec, tokens),
        fake_rows(cute.sym_int(), row_bytes),
        tuple(Int32(1) for _ in range(3)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        spec,
        options=options,
    )
