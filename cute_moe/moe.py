"""The MoE decode layer: one kernel launch on sm_90 GPUs, the reference arithmetic on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_moe import reference
from cute_moe.host.check import Contract, TensorRule, check_apart, check_tensor, dtype_name
from cute_moe.host.device import device_facts, has_sm90
from cute_moe.host.launch import KernelCache, build_from, current_device
from cute_moe.host.scratch import BASE_ALIGN, Region, ScratchLayout
from cute_moe.kernels.moe.spec import MAX_TOKENS, MoeSpec

SHAPE = MoeSpec()
_FP8 = torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.bfloat16)
_SCRATCH = ScratchLayout([Region(n, size, zeroed=True) for n, size in SHAPE.scratch_regions])


def _rules() -> list[TensorRule]:
    e, k, n = SHAPE.num_experts, SHAPE.hidden, SHAPE.intermediate
    return [
        TensorRule("activations_in", (torch.bfloat16,), ("M", k)),
        TensorRule("router_logits", _FLOATS[::-1], ("M", e)),
        TensorRule("expert_weights_up", (_FP8,), (e, 2 * n, k)),
        TensorRule("expert_scales_up", _FLOATS, (e, 2 * n // 128, k // 128)),
        TensorRule("expert_weights_down", (_FP8,), (e, k, n)),
        TensorRule("expert_scales_down", _FLOATS, (e, k // 128, n // 128)),
        TensorRule("out", (torch.bfloat16,), ("M", k)),
    ]


_CONTRACT = Contract(_rules(), {"M": (0, MAX_TOKENS)})
_INPUTS = Contract(_rules()[:-1], {"M": (0, MAX_TOKENS)})
_TENSORS = [rule.name for rule in _INPUTS.rules]


_KERNELS = KernelCache(build_from("cute_moe.kernels.moe.kernel"))


def has_monomoe() -> bool:
    """Whether a GPU here can run the kernel (sm_90). Never raises."""
    return has_sm90()


def get_scratchpad_size_bytes() -> int:
    """Bytes of the scratchpad that `mono_moe` needs."""
    return _SCRATCH.nbytes


def alloc_scratchpad(device: torch.device | str | int = "cuda") -> torch.Tensor:
    """A zeroed scratchpad, uint8 [get_scratchpad_size_bytes()].

    It may be used by any number of launches that do not overlap: one per stream. A buffer from
    elsewhere must be zeroed once before its first use; the kernel keeps it in order after that.
    """
    return _SCRATCH.allocate(device)


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
) -> torch.Tensor:
    """One MoE layer for M = 0..8 tokens, in one kernel launch on torch's current stream.

    E = 256 experts, K = 2048, N = 512; all tensors contiguous, on one device.
      activations_in       [M, K] bf16
      router_logits        [M, E] bf16 or fp32 (NaN counts as -inf; ties go to the lowest expert)
      expert_weights_up    [E, 2N, K] e4m3: gate rows, then up rows; with interleave_up=False as
                           `interleave_for_tma_wgmma_up` orders them
      expert_scales_up     [E, 2N/128, K/128] fp32 or bf16, multiplies (order of raw rows always)
      expert_weights_down  [E, K, N] e4m3
      expert_scales_down   [E, K/128, N/128] fp32 or bf16
      top_k                1..8;  scoring_func "softmax" or "sigmoid"
      renormalize          divide the top_k weights by their sum
      out                  [M, K] bf16, not overlapping an input; allocated when None
      scratchpad           from `alloc_scratchpad`, one per stream; a fresh one when None
      activations          "fp8": x and h are quantised to e4m3 per token and 128 features, the
                           usual block-FP8 arithmetic; "bf16": x and h keep bf16 precision
      programmatic         programmatic dependent launch: the kernel starts while the one ahead of
                           it on the stream drains, and waits for that one's end before it reads

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
        key = (top_k, scoring_func, renormalize, interleave_up, activations, programmatic,
               router_logits.dtype, expert_scales_up.dtype, expert_scales_down.dtype,
               index, current_device() if index >= 0 else index)  # fmt: skip
        kernel = _KERNELS.lookup(key)
        # True and 8.0 find what 1 and 8 find, hence the look at the types.
        flags = type(renormalize) is type(interleave_up) is type(programmatic) is bool
        exact = flags and type(top_k) is int
        if kernel is not None and exact and 0 < activations_in.shape[0] <= MAX_TOKENS:
            return _launch(kernel, inputs, out, scratchpad)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        failure = error
    # These two name the wrong argument, if there is one.
    options: dict[str, Any] = dict(
        top_k=top_k, scoring_func=scoring_func, renormalize=renormalize,
        interleave_up=interleave_up, activations=activations, programmatic=programmatic,
    )  # fmt: skip
    MoeSpec(**options)
    tokens = _check_tensors(inputs, out, scratchpad)
    if failure:
        raise failure
    if tokens and activations_in.device.type == "cuda":
        kernel = _KERNELS.get(_spec(options, inputs), activations_in.device, key)
        return _launch(kernel, inputs, out, scratchpad)
    if out is None:
        out = torch.empty_like(activations_in)
    if tokens and out.device.type != "meta":
        weights = expert_weights_up if interleave_up else _deinterleave(expert_weights_up)
        compute = reference.moe_block_fp8 if activations == "fp8" else reference.moe_fp32
        with torch.inference_mode():  # as the kernel does, it may write an inference tensor
            tensors = (*inputs[:2], weights, *inputs[3:])
            out.copy_(compute(*tensors, top_k, scoring_func, renormalize))
    return out


def _launch(
    kernel: Callable[..., None],
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor | None,
    scratchpad: torch.Tensor | None,
) -> torch.Tensor:
    """Launch; the compiled code itself rejects tensors that break the contract, in its words."""
    x = inputs[0]
    if out is None:
        out = torch.empty_like(x)
    else:
        _check_apart(out, x, inputs[1])
    if scratchpad is None:
        scratchpad = alloc_scratchpad(x.device)
    elif scratchpad.numel() != _SCRATCH.nbytes or scratchpad.data_ptr() % BASE_ALIGN:
        _SCRATCH.check(scratchpad, x.device)
        scratchpad = scratchpad[: _SCRATCH.nbytes]
    kernel(*inputs, out, scratchpad)
    return out


def _check_tensors(
    inputs: tuple[torch.Tensor, ...], out: torch.Tensor | None, scratchpad: torch.Tensor | None
) -> int:
    """The number of tokens. Raises TypeError or ValueError that names the wrong argument."""
    if out is None:
        tokens = _INPUTS.check(inputs)["M"]
    else:
        tokens = _CONTRACT.check((*inputs, out))["M"]
        check_apart(out, dict(zip(_TENSORS, inputs, strict=True)))
    if scratchpad is not None:
        _SCRATCH.check(scratchpad, inputs[0].device)
    return tokens


def _spec(options: dict[str, Any], inputs: tuple[torch.Tensor, ...]) -> MoeSpec:
    """The kernel variant for checked options and inputs on a GPU."""
    x, logits, _, scales_up, _, scales_down = inputs
    return MoeSpec(
        **options,
        logits_dtype=dtype_name(logits.dtype),
        scales_up_dtype=dtype_name(scales_up.dtype),
        scales_down_dtype=dtype_name(scales_down.dtype),
        grid=device_facts(x.get_device()).sm_count,
    )


def _check_apart(out: torch.Tensor, x: torch.Tensor, logits: torch.Tensor) -> None:
    """`check_apart` for two inputs, `x` as large as `out`: quick, for every launch."""
    start, nbytes = out.data_ptr(), out.nbytes
    for_logits = start - logits.data_ptr()
    if -nbytes < start - x.data_ptr() < nbytes or -nbytes < for_logits < logits.nbytes:
        check_apart(out, {"activations_in": x, "router_logits": logits})
