"""The one-launch MoE kernel: table of contents.

Roles (20 warps, one CTA per SM):
  0-7    consumers: quantise x, then up_phase, down_phase and combine, as two warpgroups
  8      producer: the weight stream (TMA)
  9      lists: epoch, lists, down scales     10  clears the next launch's h
  11     initialises the mbarriers but those of the stream, which the producer does
  12-19  loaders: route token w, then load_h
Barriers (arrivals):  full[stage] 1 + bytes (producer, TMA)   empty[stage] 8 (consumer warps)
  lists 32, scales 32 (warp 9)   gate, landed 1 (producer: up units issued; weights here)
  h_ready[chunk] 128 (16 a place; loaders)   h_free[slot] 4 (consumers; bf16 activations only)
  named 1: routing done (loaders arrive, warp 9 waits)   named 2: partial sums
  named 3, 4: mbarriers ready, for warps 9-19 and for the consumers
Time:  route | first TMA | lists | up units ... | down groups ... | combine; the producer runs ahead
  of the consumers by up to the ring's stages and waits, after the lists, for free stages only.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from cute_moe.kernels.device.trace import stamp
from cute_moe.kernels.moe.combine import combine, routing_weights
from cute_moe.kernels.moe.down import down_phase
from cute_moe.kernels.moe.handover import clear_next, load_h
from cute_moe.kernels.moe.lists import build_lists, load_scales
from cute_moe.kernels.moe.memory import (
    allocate,
    down_box_layout,
    init_barriers,
    init_stream_barriers,
    up_layout,
)
from cute_moe.kernels.moe.quantise import quantise_x
from cute_moe.kernels.moe.routing import load_logits, route_token
from cute_moe.kernels.moe.spec import MAX_GRID, MoeSpec
from cute_moe.kernels.moe.stream import Weights, produce, up_box
from cute_moe.kernels.moe.up import up_phase

THREADS = 640
# Registers after the split of roles; those of a CTA are 640 x 96 in all.
REGISTERS_CONSUMER = 160
REGISTERS_SINGLE = 48
REGISTERS_LOADER = 56


@cute.jit
def wait_for_inputs(spec: cutlass.Constexpr):
    """Wait until the kernel ahead has ended and its stores are visible, if we start before that."""
    if cutlass.const_expr(spec.programmatic):
        cute.arch.griddepcontrol_wait()


@cute.jit
def take_epoch(epochs: cute.Pointer, spec: cutlass.Constexpr) -> Int32:
    """This CTA's launch count; advances it, and the words of CTAs that this grid does not have."""
    cta, _, _ = cute.arch.block_idx()
    epoch = cute.make_tensor(epochs + cta, cute.make_layout(1))[0]
    cute.arch.sync_warp()
    for i in cutlass.range(
        cta + cute.arch.lane_idx() * spec.grid, MAX_GRID, 32 * spec.grid, unroll=1
    ):
        cute.make_tensor(epochs + i, cute.make_layout(1))[0] = epoch + 1
    return epoch


@cute.kernel
def moe_kernel(
    x: cute.Tensor,
    logits: cute.Tensor,
    weights: Weights,
    scales_down: cute.Tensor,
    out: cute.Tensor,
    scratch: cute.Tensor,
    spec: cutlass.Constexpr,
):
    """See the module's header."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    if cutlass.const_expr(spec.programmatic):
        cute.arch.griddepcontrol_launch_dependents()
    h_words = cute.recast_ptr(scratch.iterator, dtype=Int32)
    epochs = h_words + 2 * spec.h_words
    shared = allocate(cute.recast_ptr(epochs + MAX_GRID, dtype=Int64), spec)
    routed = pipeline.NamedBarrier(barrier_id=1, num_threads=288)
    consumers = pipeline.NamedBarrier(barrier_id=2, num_threads=256)
    others_start = pipeline.NamedBarrier(barrier_id=3, num_threads=384)
    consumers_start = pipeline.NamedBarrier(barrier_id=4, num_threads=320)
    if warp < 8:
        wait_for_inputs(spec)
        quantise_x(x, tid, shared, spec)
        cute.arch.setmaxregister_increase(REGISTERS_CONSUMER)
        consumers_start.arrive_and_wait()
        if warp == 0:
            stamp(shared.trace, "x_ready", spec)
        cute.arch.mbarrier_wait(shared.lists, 0)
        half = warp // 4
        step = up_phase(tid % 128, half, h_words, shared, spec)
        if warp == 0:
            stamp(shared.trace, "up_done_0", spec)
        if warp == 4:
            stamp(shared.trace, "up_done_1", spec)
        if cta < spec.column_blocks:
            cute.arch.mbarrier_wait(shared.scales, 0)
            columns = (spec.column_blocks - cta + spec.grid - 1) // spec.grid
            down_phase(columns, step, tid % 128, half, shared, spec)
            if warp == 0:
                stamp(shared.trace, "down_done_0", spec)
            if warp == 4:
                stamp(shared.trace, "down_done_1", spec)
            if half == 0:
                factors = routing_weights(tid, shared, spec)
                consumers.arrive_and_wait()
                for own in cutlass.range(columns, unroll=1):
                    combine(out, own, factors, tid, shared, spec)
            else:
                consumers.arrive()
        if warp == 0:
            stamp(shared.trace, "end", spec)
    elif warp < 12:
        cute.arch.setmaxregister_decrease(REGISTERS_SINGLE)
        if warp == 8:
            stamp(shared.trace, "start", spec)
            wait_for_inputs(spec)
            raw = load_logits(logits, Int32(0))
            cpasync.prefetch_descriptor(weights.up_atom)
            cpasync.prefetch_descriptor(weights.down_atom)
            init_stream_barriers(shared, spec)
            others_start.arrive()
            consumers_start.arrive()
            produce(weights, raw, shared, spec)
        elif warp == 9:
            wait_for_inputs(spec)
            epoch = take_epoch(epochs, spec)
            others_start.arrive_and_wait()
            routed.arrive_and_wait()
            build_lists(x.shape[0], epoch, shared, spec)
            stamp(shared.trace, "lists", spec)
            load_scales(scales_down, shared, spec)
            stamp(shared.trace, "scales", spec)
        elif warp == 10:
            others_start.arrive_and_wait()
            wait_for_inputs(spec)
            clear_next(h_words, shared, spec)
        else:
            init_barriers(shared, spec)
            others_start.arrive()
            consumers_start.arrive()
    else:
        cute.arch.setmaxregister_decrease(REGISTERS_LOADER)
        token = warp - 12
        wait_for_inputs(spec)
        raw = load_logits(logits, cutlass.min(token, x.shape[0] - 1))
        shared.mask[tid - 384] = Int32(0)
        others_start.arrive_and_wait()
        if token < x.shape[0]:
            route_token(raw, token, shared, spec)
        routed.arrive()
        # A CTA without down columns has no use for h and would not release its slots in turn.
        if cta < spec.column_blocks:
            load_h(h_words, token, x.shape[0], shared, spec)


def up_view(w: cute.Tensor, spec: MoeSpec):
    """w13 [E, 2N, K] as ((8 rows, halves, row groups), (128, K/128)) so that one box is one stage.

    Raw rows: the halves of all experts stand N K apart, so (half, expert) is one mode of 2E.
    Interleaved rows: the 16-row groups of all experts stand 16 K apart.
    """
    k, n, e = spec.hidden, spec.intermediate, spec.num_experts
    if spec.interleave_up:
        rows, strides = (8, 2 * e, n // 8), (k, n * k, 8 * k)
    else:
        rows, strides = (8, 2, e * n // 8), (k, 8 * k, 16 * k)
    layout = cute.make_layout((rows, (128, k // 128)), stride=(strides, (1, 128)))
    return cute.make_tensor(w.iterator, layout)


def down_view(w: cute.Tensor, spec: MoeSpec):
    """w2 [E, K, N] as ((8, K/8), (128, N/128), E): a box of 16 columns is [2][N/128][8][128]."""
    k, n, e = spec.hidden, spec.intermediate, spec.num_experts
    layout = cute.make_layout(
        ((8, k // 8), (128, n // 128), e), stride=((n, 8 * n), (1, 128), k * n)
    )
    return cute.make_tensor(w.iterator, layout)


@cute.jit
def launch_moe(
    x: cute.Tensor,
    logits: cute.Tensor,
    w_up: cute.Tensor,
    s_up: cute.Tensor,
    w_down: cute.Tensor,
    s_down: cute.Tensor,
    out: cute.Tensor,
    scratch: cute.Tensor,
    stream,
    spec: cutlass.Constexpr,
):
    """Encode the TMA descriptors and launch one CTA per SM, cooperatively."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    up_atom, up = cpasync.make_tiled_tma_atom(
        load, up_view(w_up, spec), cute.select(up_layout(spec), mode=[0, 1]), up_box(spec)
    )
    down_atom, down = cpasync.make_tiled_tma_atom(
        load,
        down_view(w_down, spec),
        cute.select(down_box_layout(spec), mode=[0, 1, 2]),
        ((8, 2), (128, spec.h_blocks), 1),
    )
    moe_kernel.set_name_prefix("mono_moe", remove_cutlass_symbol=True, keep_mangled_name=False)
    moe_kernel(
        x, logits, Weights(up_atom, up, down_atom, down, s_up), s_down, out, scratch, spec
    ).launch(
        grid=(spec.grid, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        cooperative=True,
        use_pdl=spec.programmatic,
        min_blocks_per_mp=1,
    )


def build(spec: MoeSpec, options: str):
    """Compile the kernel of `spec` from fake tensors; needs no GPU."""
    dtypes = {"bfloat16": BFloat16, "float32": Float32}
    m = cute.sym_int()
    e, k, n = spec.num_experts, spec.hidden, spec.intermediate
    nbytes = sum(size for _, size in spec.scratch_regions)

    def fake(dtype, *shape):
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    tensors = (
        fake(BFloat16, m, k),
        fake(dtypes[spec.logits_dtype], m, e),
        fake(Float8E4M3FN, e, 2 * n, k),
        fake(dtypes[spec.scales_up_dtype], e, 2 * n // 128, k // 128),
        fake(Float8E4M3FN, e, k, n),
        fake(dtypes[spec.scales_down_dtype], e, k // 128, n // 128),
        fake(BFloat16, m, k),
        fake(cutlass.Uint8, nbytes),
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch_moe, *tensors, stream, spec, options=options)
