"""The MoE decode layer: one kernel launch on sm_90 GPUs, the reference arithmetic on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_moe import moe_contract as contract
from cute_moe import reference
from cute_moe.host.check import check_tensor, dtype_name
from cute_moe.host.device import device_facts, has_sm90
from cute_moe.host.launch import KernelCache, build_from, current_device
from cute_moe.host.scratch import BASE_ALIGN
from cute_moe.kernels.device.options import type_name
from cute_moe.kernels.moe.spec import MoeSpec, check_shape

INTERLEAVED = {"num_experts": 256, "hidden": 2048, "intermediate": 512, "scale_block": 128,
               "scale_block_hidden": 128}  # fmt: skip
_E8M0 = torch.float8_e8m0fnu


def _pass_exponents(spec: MoeSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for e8m0 scales, which the compiled code takes as the bytes that they are."""
    if "float8_e8m0fnu" not in (spec.scales_up_dtype, spec.scales_down_dtype):
        return function

    def call(*arguments: Any) -> None:
        function(*(a.view(torch.uint8) if getattr(a, "dtype", None) is _E8M0 else a
                   for a in arguments))  # fmt: skip

    return call


_KERNELS = KernelCache(build_from("cute_moe.kernels.moe.kernel"), _pass_exponents)


def has_monomoe() -> bool:
    """Whether a GPU here can run the kernel (sm_90). Never raises."""
    return has_sm90()


def get_scratchpad_size_bytes(
    *, num_experts: int = 256, hidden: int = 2048, intermediate: int = 512, top_k: int = 8
) -> int:
    """Bytes of the scratchpad of `mono_moe` and `fused_experts` for one shape.

    Shapes of equal size (equal top_k * intermediate) share a layout and may share a scratchpad.
    Raises TypeError or ValueError for a shape that no kernel takes.
    """
    check_shape(num_experts, hidden, intermediate, top_k)
    return contract.scratch_layout(intermediate, top_k).nbytes


def alloc_scratchpad(
    device: torch.device | str | int = "cuda",
    *,
    num_experts: int = 256,
    hidden: int = 2048,
    intermediate: int = 512,
    top_k: int = 8,
) -> torch.Tensor:
    """A zeroed scratchpad of a shape, uint8 [get_scratchpad_size_bytes(...)].

    It may be used by any number of launches that do not overlap, of either entry: one per stream.
    A buffer from elsewhere must have exactly that size, lie at a multiple of 128 bytes and be
    zeroed once before its first use; the kernel keeps it in order after that.
    """
    check_shape(num_experts, hidden, intermediate, top_k)
    return contract.scratch_layout(intermediate, top_k).allocate(device)


def interleave_for_tma_wgmma_up(w: torch.Tensor) -> torch.Tensor:
    """Rows of `w` [E, 2N, K] (gate rows, then up rows), interleaved by eight; a new tensor.

    Only needed for `mono_moe(..., interleave_up=False)`; raw rows are read as fast.
    Raises TypeError or ValueError unless `w` is a 3-D tensor with 2N a multiple of 16.
    """
    check_tensor("w", w)
    if w.dim() != 3 or w.shape[1] % 16:
        raise ValueError(f"w: expected [E, 2N, K] with 2N a multiple of 16, got {list(w.shape)}")
    return _swap_row_groups(w, (2, w.shape[1] // 16))


def _deinterleave(w: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_for_tma_wgmma_up`."""
    return _swap_row_groups(w, (w.shape[1] // 16, 2))


def _swap_row_groups(w: torch.Tensor, groups: tuple[int, int]) -> torch.Tensor:
    rows = w.detach().contiguous().view(torch.uint8)  # bytes: not every dtype can be copied
    swapped = rows.unflatten(1, (*groups, 8)).transpose(1, 2).contiguous()
    return swapped.view(rows.shape).view(w.dtype)


def mono_moe(
    activations_in: torch.Tensor,
    router_logits: torch.Tensor,
    expert_weights_up: torch.Tensor,
    expert_scales_up: torch.Tensor,
    expert_weights_down: torch.Tensor,
    expert_scales_down: torch.Tensor,
    top_k: int,
    scoring_func: str = "softmax",
    renormalize: bool = True,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
    interleave_up: bool = True,
    activations: str = "fp8",
    programmatic: bool = False,
    routing_out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One MoE layer for M = 0..8 tokens, in one kernel launch on torch's current stream.

    E = 1..1024 experts, K = 512..8192 a multiple of 128, N = 32..16384 a multiple of 32, top_k
    1..16 and at most E. A weight scale belongs to b features of N by c of K: b is 128, 64 or 32
    and divides N, c is 128 or b. All tensors contiguous, 16-byte aligned, on one device.
      activations_in       [M, K] bf16
      router_logits        [M, E] bf16 or fp32 (NaN counts as -inf; ties go to the lowest expert);
                           4-byte aligned where E is no multiple of 8
      expert_weights_up    [E, 2N, K] e4m3: gate rows, then up rows
      expert_scales_up     [E, 2N/b, K/c] fp32, bf16 or float8_e8m0fnu, multiplies
      expert_weights_down  [E, K, N] e4m3
      expert_scales_down   [E, K/c, N/b] fp32, bf16 or float8_e8m0fnu
      scoring_func         "softmax" or "sigmoid"
      renormalize          divide the top_k weights by their sum
      out                  [M, K] bf16, not overlapping an input; allocated when None
      scratchpad           from `alloc_scratchpad` for this shape, one per stream; a fresh one when
                           None
      interleave_up        True: raw rows. False, for E = 256, K = 2048, N = 512 and blocks of 128
                           only: up rows as `interleave_for_tma_wgmma_up` orders them
      activations          "fp8": x and h are quantised to e4m3, x per token and 128 features, h
                           per token and b, the usual block-FP8 arithmetic; "bf16": x and h keep
                           bf16 precision
      programmatic         programmatic dependent launch: the kernel starts while the one ahead of
                           it on the stream drains, and waits for that one's end before it reads
      routing_out          (ids int32 [M, top_k], weights fp32 [M, top_k]): receive the routing;
                           `fused_experts` gives the same bits for it

    Returns out, without gradients; autograd does not notice that out has been written, so it must
    not be a tensor saved for a backward pass. The same input gives the same bits in every run,
    batch and scratchpad. With out and scratchpad given, nothing is allocated and nothing
    synchronises; a CUDA graph can capture the call once one call like it has run outside a capture.
    CPU tensors take the reference path.
    Raises TypeError or ValueError, naming the argument, before anything is launched or written;
    RuntimeError where the GPU cannot run the kernel or the first call lies inside a capture.
    """
    inputs = (activations_in, router_logits, expert_weights_up, expert_scales_up,
              expert_weights_down, expert_scales_down)  # fmt: skip
    failure = None
    try:
        index = activations_in.get_device()
        # All sizes follow from two shapes and N; a kernel rejects tensors of any other shape.
        key = (top_k, scoring_func, renormalize, interleave_up, activations, programmatic,
               activations_in.shape, expert_scales_down.shape, expert_weights_down.numel(),
               router_logits.dtype, expert_scales_up.dtype, expert_scales_down.dtype,
               routing_out is None, index, current_device() if index >= 0 else index)  # fmt: skip
        kernel = _KERNELS.lookup(key)
        # True and 8.0 find what 1 and 8 find, hence the look at the types.
        flags = type(renormalize) is type(interleave_up) is type(programmatic) is bool
        if kernel is not None and flags and type(top_k) is int:
            return _launch_mono(kernel, inputs, top_k, out, scratchpad, routing_out)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        failure = error
    # These two name the wrong argument, if there is one.
    options: dict[str, Any] = dict(
        top_k=top_k, scoring_func=scoring_func, renormalize=renormalize,
        interleave_up=interleave_up, activations=activations, programmatic=programmatic,
    )  # fmt: skip
    MoeSpec(**options)
    shape = contract.check_mono(inputs, top_k, out, scratchpad, routing_out)
    if not interleave_up and shape.of_spec() != INTERLEAVED:
        raise ValueError(
            f"interleave_up: expected True unless {INTERLEAVED}, got False with {shape.of_spec()}"
        )
    if failure:
        raise failure
    if shape.tokens and activations_in.device.type == "cuda":
        options |= {"logits_dtype": dtype_name(router_logits.dtype),
                    "routing_out": routing_out is not None}  # fmt: skip
        spec = _spec(shape, inputs[2:], options)
        kernel = _KERNELS.get(spec, activations_in.device, key)
        return _launch_mono(kernel, inputs, top_k, out, scratchpad, routing_out)
    if out is None:
        out = torch.empty_like(activations_in)
    if shape.tokens and out.device.type != "meta":
        up = expert_weights_up if interleave_up else _deinterleave(expert_weights_up)
        with torch.inference_mode():  # as the kernel does, it may write an inference tensor
            ids, weights = reference.route(router_logits, top_k, scoring_func, renormalize)
            compute = _reference(activations)
            out.copy_(compute(activations_in, ids, weights, up, *inputs[3:]))
            for target, chosen in zip(routing_out or (), (ids, weights), strict=False):
                target.copy_(chosen)
    return out


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    output_scale: float = 1.0,
    activations: str = "fp8",
    programmatic: bool = False,
    out: torch.Tensor | None = None,
    scratchpad: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of a MoE layer whose routing is given, for M = 0..8 tokens, in one launch.

    Sizes, weights, scales, alignment and what is not said here are as for `mono_moe`.
      hidden_states  [M, K] bf16
      w1, w1_scale   [E, 2N, K] e4m3, gate rows, then up rows; [E, 2N/b, K/c]
      w2, w2_scale   [E, K, N] e4m3; [E, K/c, N/b]
      topk_weights   [M, top_k] fp32 or bf16, used as they are
      topk_ids       [M, top_k] int32 or int64; an id may come several times in a row; any id
                     outside 0..E-1 is skipped with its weight; a row of only such ids gives zeros
      expert_map     [G] int32, G >= 1: the ids are 0..G-1, and this says their expert here; what
                     lies outside 0..E-1, such as -1, is skipped
      output_scale   multiplies the fp32 sum over the experts before it is rounded to bf16

    The ids and weights lie at multiples of their element's size. Returns out [M, K] bf16. A token
    gets the same bits in every batch, and those of `mono_moe` if that one's routing is given.
    Raises as `mono_moe` does.
    """
    inputs = (hidden_states, topk_ids, topk_weights, w1, w1_scale, w2, w2_scale)
    failure = None
    try:
        index = hidden_states.get_device()
        key = (topk_ids.shape, w2.shape, w2_scale.shape, topk_ids.dtype, topk_weights.dtype,
               w1_scale.dtype, w2_scale.dtype, None if expert_map is None else expert_map.shape,
               activations, programmatic, index,
               current_device() if index >= 0 else index)  # fmt: skip
        kernel = _KERNELS.lookup(key)
        if kernel is not None and type(programmatic) is bool and type(output_scale) is float:
            return _launch_fused(kernel, inputs, expert_map, output_scale, out, scratchpad)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        failure = error
    MoeSpec(routing="ids", activations=activations, programmatic=programmatic)
    if isinstance(output_scale, bool) or not isinstance(output_scale, (int, float)):
        raise TypeError(f"output_scale: expected a float, got {type_name(output_scale)}")
    scale = float(output_scale)
    shape, top_k = contract.check_fused(inputs, expert_map, out, scratchpad)
    if failure:
        raise failure
    if shape.tokens and hidden_states.device.type == "cuda":
        options = dict(
            routing="ids", top_k=top_k, activations=activations, programmatic=programmatic,
            ids_dtype=dtype_name(topk_ids.dtype), weights_dtype=dtype_name(topk_weights.dtype),
            mapped_experts=0 if expert_map is None else len(expert_map),
        )  # fmt: skip
        kernel = _KERNELS.get(_spec(shape, inputs[3:], options), hidden_states.device, key)
        return _launch_fused(kernel, inputs, expert_map, scale, out, scratchpad)
    if out is None:
        out = torch.empty_like(hidden_states)
    if shape.tokens and out.device.type != "meta":
        with torch.inference_mode():
            ids = reference.local_ids(topk_ids, shape.num_experts, expert_map)
            compute = _reference(activations)
            out.copy_(compute(hidden_states, ids, topk_weights, *inputs[3:], scale))
    return out


def _launch_mono(
    kernel: Callable[..., None],
    inputs: tuple[torch.Tensor, ...],
    top_k: int,
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
    routing_out: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Launch; the compiled code itself rejects tensors that break the contract, in its words."""
    x = inputs[0]
    if out is None:
        out = torch.empty_like(x)
    else:
        _check_apart(out, x, inputs[1])
    if scratchpad is None:
        scratchpad = contract.scratch_layout(inputs[4].shape[2], top_k).allocate(x.device)
    elif scratchpad.data_ptr() % BASE_ALIGN:
        raise ValueError("scratchpad: expected other alignment")
    if routing_out is None:
        kernel(*inputs, out, scratchpad, None, None)
    else:
        ids, weights = routing_out
        names = (*contract.MONO, "out", *contract.ROUTING_OUT)
        contract.check_outputs(names, (*inputs, out, ids, weights), len(inputs))
        kernel(*inputs, out, scratchpad, ids, weights)
    return out


def _launch_fused(
    kernel: Callable[..., None],
    inputs: tuple[torch.Tensor, ...],
    expert_map: torch.Tensor | None,
    output_scale: float,
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
) -> torch.Tensor:
    """Launch, as `_launch_mono` does."""
    x, ids = inputs[:2]
    if out is None:
        out = torch.empty_like(x)
    else:
        _check_apart(out, x, ids)
        _check_apart(out, x, inputs[2])
        if expert_map is not None:
            _check_apart(out, x, expert_map)
    if scratchpad is None:
        layout = contract.scratch_layout(inputs[5].shape[2], ids.shape[1])
        scratchpad = layout.allocate(x.device)
    elif scratchpad.data_ptr() % BASE_ALIGN:
        raise ValueError("scratchpad: expected other alignment")
    kernel(*inputs, out, scratchpad, expert_map, output_scale)
    return out


def _reference(activations: str) -> Callable[..., torch.Tensor]:
    fp8 = activations == "fp8"
    return reference.moe_block_fp8_routed if fp8 else reference.moe_fp32_routed


def _spec(
    shape: contract.Shape, weights: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> MoeSpec:
    """The kernel variant for checked options and inputs on a GPU."""
    names = contract.scale_names(weights)
    sm_count = device_facts(weights[0].get_device()).sm_count
    return MoeSpec(**shape.of_spec(), **names, **options, grid=sm_count)


def _check_apart(out: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> None:
    """Raise ValueError where `out` overlaps `x`, as large as it, or `other`; for every launch.

    The checks that follow find the name.
    """
    start, nbytes = out.data_ptr(), out.nbytes
    past_other = start - other.data_ptr()
    if -nbytes < start - x.data_ptr() < nbytes or -nbytes < past_other < other.nbytes:
        raise ValueError("out: expected memory of its own")
