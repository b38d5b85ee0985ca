"""The one-launch MoE kernel: table of contents.

Roles (20 warps, one CTA per SM):
  0-7    consumers: quantise x, then up_phase, down_phase and combine, as two warpgroups
  8      producer: the weight stream (TMA)
  9      lists: epoch, lists, down scales     10  clears the next launch's h
  11     initialises the mbarriers but those of the stream, which the producer does
  12-19  loaders: route a token each, then load_h
Rings (arrivals to fill, to release; kernels/device/ring.py):
  weights 1 + bytes (producer, TMA), 8 (consumer warps)
  h_slots 256 (lanes of the loaders), 8 (consumer warps)   scale_slots 32 (warp 9), 8
Barriers (arrivals):  lists 32 (warp 9)   gate, landed 1 (producer: up units issued; weights here)
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
from cute_moe.kernels.moe.lists import build_lists, clear_lists, load_scales
from cute_moe.kernels.moe.memory import (
    CONSUMER_WARPS,
    HALF_WARPS,
    LOADER_WARPS,
    WARP,
    allocate,
    dtype_of,
    init_barriers,
    init_stream_barriers,
)
from cute_moe.kernels.moe.quantise import quantise_x
from cute_moe.kernels.moe.routing import (
    Given,
    Logits,
    load_logits,
    load_pick,
    read_token,
    route_token,
)
from cute_moe.kernels.moe.spec import MAX_GRID, MoeSpec
from cute_moe.kernels.moe.stream import (
    Weights,
    down_box,
    down_box_layout,
    down_view,
    produce,
    up_box,
    up_box_layout,
    up_view,
)
from cute_moe.kernels.moe.up import up_phase

PRODUCER, LISTS, CLEARS, STARTS = range(CONSUMER_WARPS, CONSUMER_WARPS + 4)
FIRST_LOADER = STARTS + 1
THREADS = WARP * (FIRST_LOADER + LOADER_WARPS)
# Registers after the split of roles; those of a CTA are THREADS x 96 in all.
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
        cta + cute.arch.lane_idx() * spec.grid, MAX_GRID, WARP * spec.grid, unroll=1
    ):
        cute.make_tensor(epochs + i, cute.make_layout(1))[0] = epoch + 1
    return epoch


@cute.jit
def find_experts(routing, token: Int32, spec: cutlass.Constexpr):
    """What a lane knows of a token's experts: its logits, or its slot's pick."""
    if cutlass.const_expr(spec.routing == "logits"):
        found = load_logits(routing.logits, token, spec)
    else:
        found = load_pick(routing, token, spec)
    return found


@cute.jit
def enter_token(routing, found, token: Int32, shared, spec: cutlass.Constexpr):
    """Enter a token's experts and weights in shared memory; one warp."""
    if cutlass.const_expr(spec.routing == "logits"):
        route_token(routing, found, token, shared, spec)
    else:
        read_token(routing, found, token, shared, spec)


@cute.kernel
def moe_kernel(
    x: cute.Tensor,
    routing,
    weights: Weights,
    scales_down: cute.Tensor,
    out: cute.Tensor,
    scratch: cute.Tensor,
    spec: cutlass.Constexpr,
):
    """See the module's header."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // WARP)
    if cutlass.const_expr(spec.programmatic):
        cute.arch.griddepcontrol_launch_dependents()
    h_words = cute.recast_ptr(scratch.iterator, dtype=Int32)
    epochs = h_words + 2 * spec.h_words
    shared = allocate(cute.recast_ptr(epochs + MAX_GRID, dtype=Int64), spec)
    routed = pipeline.NamedBarrier(barrier_id=1, num_threads=WARP * (LOADER_WARPS + 1))
    consumers = pipeline.NamedBarrier(barrier_id=2, num_threads=WARP * CONSUMER_WARPS)
    others_start = pipeline.NamedBarrier(barrier_id=3, num_threads=THREADS - WARP * CONSUMER_WARPS)
    consumers_start = pipeline.NamedBarrier(barrier_id=4, num_threads=WARP * (CONSUMER_WARPS + 2))
    if warp < CONSUMER_WARPS:
        wait_for_inputs(spec)
        quantise_x(x, tid, shared, spec)
        cute.arch.setmaxregister_increase(REGISTERS_CONSUMER)
        consumers_start.arrive_and_wait()
        if warp == 0:
            stamp(shared.trace, "x_ready", spec)
        cute.arch.mbarrier_wait(shared.lists, 0)
        half = warp // HALF_WARPS
        step = up_phase(tid % (HALF_WARPS * WARP), half, h_words, shared, spec)
        if warp == 0:
            stamp(shared.trace, "up_done_0", spec)
        if warp == HALF_WARPS:
            stamp(shared.trace, "up_done_1", spec)
        if cta < spec.column_blocks:
            columns = (spec.column_blocks - cta + spec.grid - 1) // spec.grid
            down_phase(columns, step, tid % (HALF_WARPS * WARP), half, shared, spec)
            if warp == 0:
                stamp(shared.trace, "down_done_0", spec)
            if warp == HALF_WARPS:
                stamp(shared.trace, "down_done_1", spec)
            if half == 0:
                factors = routing_weights(x.shape[0], tid, shared, spec)
                consumers.arrive_and_wait()
                for own in cutlass.range(columns, unroll=1):
                    scale = routing.scale if cutlass.const_expr(spec.routing == "ids") else None
                    combine(out, own, factors, scale, tid, shared, spec)
            else:
                consumers.arrive()
        if warp == 0:
            stamp(shared.trace, "end", spec)
    elif warp < FIRST_LOADER:
        cute.arch.setmaxregister_decrease(REGISTERS_SINGLE)
        if warp == PRODUCER:
            stamp(shared.trace, "start", spec)
            wait_for_inputs(spec)
            found = find_experts(routing, Int32(0), spec)
            cpasync.prefetch_descriptor(weights.up_atom)
            cpasync.prefetch_descriptor(weights.down_atom)
            init_stream_barriers(shared, spec)
            others_start.arrive()
            consumers_start.arrive()
            produce(weights, found, shared, spec)
        elif warp == LISTS:
            wait_for_inputs(spec)
            epoch = take_epoch(epochs, spec)
            others_start.arrive_and_wait()
            routed.arrive_and_wait()
            build_lists(x.shape[0], epoch, shared, spec)
            stamp(shared.trace, "lists", spec)
            if cta < spec.column_blocks:
                load_scales(scales_down, shared, spec)
            stamp(shared.trace, "scales", spec)
        elif warp == CLEARS:
            others_start.arrive_and_wait()
            wait_for_inputs(spec)
            clear_next(h_words, shared, spec)
        else:
            init_barriers(shared, spec)
            others_start.arrive()
            consumers_start.arrive()
    else:
        cute.arch.setmaxregister_decrease(REGISTERS_LOADER)
        loader = warp - FIRST_LOADER
        wait_for_inputs(spec)
        found = find_experts(routing, cutlass.min(loader, x.shape[0] - 1), spec)
        clear_lists(tid - FIRST_LOADER * WARP, shared, spec)
        others_start.arrive_and_wait()
        if loader < x.shape[0]:
            enter_token(routing, found, loader, shared, spec)
        routed.arrive()
        # A CTA without down columns has no use for h and would not release its slots in turn.
        if cta < spec.column_blocks:
            load_h(h_words, loader, shared, spec)


@cute.jit
def launch(
    x: cute.Tensor,
    routing,
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
        load, up_view(w_up, spec), up_box_layout(spec), up_box(spec)
    )
    down_atom, down = cpasync.make_tiled_tma_atom(
        load, down_view(w_down, spec), down_box_layout(spec), down_box(spec)
    )
    moe_kernel.set_name_prefix("mono_moe", remove_cutlass_symbol=True, keep_mangled_name=False)
    moe_kernel(
        x, routing, Weights(up_atom, up, down_atom, down, s_up), s_down, out, scratch, spec
    ).launch(
        grid=(spec.grid, 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
        cooperative=True,
        use_pdl=spec.programmatic,
        min_blocks_per_mp=1,
    )


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
    ids,
    weights,
    stream,
    spec: cutlass.Constexpr,
):
    """The kernel routes; ids and weights [M, k], where it says how, or None."""
    launch(x, Logits(logits, ids, weights), w_up, s_up, w_down, s_down, out, scratch, stream, spec)


@cute.jit
def launch_fused_experts(
    x: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    w_up: cute.Tensor,
    s_up: cute.Tensor,
    w_down: cute.Tensor,
    s_down: cute.Tensor,
    out: cute.Tensor,
    scratch: cute.Tensor,
    expert_map,
    scale: Float32,
    stream,
    spec: cutlass.Constexpr,
):
    """The caller has routed."""
    routing = Given(ids, weights, expert_map, scale)
    launch(x, routing, w_up, s_up, w_down, s_down, out, scratch, stream, spec)


def build(spec: MoeSpec, options: str):
    """Compile the kernel of `spec` from fake tensors; needs no GPU.

    Arguments of the result: x, logits, up weights and scales, down weights and scales, out,
    scratch, then ids and weights of `routing_out` or None; with routing "ids": x, ids, weights,
    the same six, the expert map or None, the output scale.
    """
    m = cute.sym_int()
    e, k, n, top_k = spec.num_experts, spec.hidden, spec.intermediate, spec.top_k
    size, size_hidden = spec.scale_block, spec.scale_block_hidden
    nbytes = sum(size for _, size in spec.scratch_regions)

    def fake(dtype, *shape, align=16):
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    rest = (
        fake(Float8E4M3FN, e, 2 * n, k),
        fake(dtype_of(spec.scales_up_dtype), e, 2 * n // size, k // size_hidden),
        fake(Float8E4M3FN, e, k, n),
        fake(dtype_of(spec.scales_down_dtype), e, k // size_hidden, n // size),
        fake(BFloat16, m, k),
        fake(cutlass.Uint8, nbytes),
    )
    x = fake(BFloat16, m, k)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if spec.routing == "logits":
        logits_align = 16 if 8 * e % 64 == 0 else 4
        chosen = (None, None)
        if spec.routing_out:
            chosen = (fake(Int32, m, top_k, align=4), fake(Float32, m, top_k, align=4))
        logits = fake(dtype_of(spec.logits_dtype), m, e, align=logits_align)
        return cute.compile(launch_moe, x, logits, *rest, *chosen, stream, spec, options=options)
    ids = fake(dtype_of(spec.ids_dtype), m, top_k, align=8 if spec.ids_dtype == "int64" else 4)
    weights = fake(dtype_of(spec.weights_dtype), m, top_k, align=2)
    mapped = fake(Int32, spec.mapped_experts, align=4) if spec.mapped_experts else None
    return cute.compile(
        launch_fused_experts, x, ids, weights, *rest, mapped, Float32(1.0), stream, spec,
        options=options,
    )  # fmt: skip
