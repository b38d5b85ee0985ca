"""Argmin and argmax over one dimension: torch's semantics, at memory speed on sm_90 GPUs."""

from __future__ import annotations

import functools
import math

import torch

from cute_moe.host.check import Contract, TensorRule, check_apart, check_tensor, dtype_name
from cute_moe.host.device import device_facts
from cute_moe.host.launch import KernelCache, build_from
from cute_moe.kernels.argmin.spec import COMBINE, Plan, plan
from cute_moe.kernels.device.options import check_bool, type_name
from cute_moe.ops import register

_INPUT = Contract(
    [
        TensorRule(
            "x",
            (torch.float32, torch.bfloat16, torch.float16, torch.int32),
            None,
            align=1,
            strides="any",
        )
    ]
)
_TORCH = {False: torch.argmin, True: torch.argmax}  # by `largest`


def argmin(
    x: torch.Tensor,
    dim: int | None = 1,
    *,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index of the smallest element along `dim`, int64; all results are those of `torch.argmin`.

      x        fp32, bf16, fp16 or int32, any shape; a copy is made unless it is contiguous
      dim      may be negative; None: over all elements, of the flattened x
      keepdim  keep the reduced dimension, with size 1
      out      int64, contiguous, of the result's shape, not overlapping x; allocated when None

    NaN wins over everything, -0.0 equals 0.0, and of equals the first wins. Returns out. One
    launch, or two where CTAs share a reduction (few outputs, long reductions); these allocate 12
    bytes for every output and CTA that shares it. Nothing synchronises, and a CUDA graph can
    capture the call once one like it has run outside. Works under torch.compile(fullgraph=True);
    no gradient. CPU tensors go to torch.
    Raises TypeError or ValueError, naming the argument, and torch's IndexError for a `dim` out of
    range or an empty reduction, before anything is launched or written; RuntimeError where the GPU
    cannot run the kernel or the first call like it lies inside a capture.
    """
    return _call(False, x, dim, keepdim, out)


def argmax(
    x: torch.Tensor,
    dim: int | None = 1,
    *,
    keepdim: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index of the largest element along `dim`, int64: as `argmin` with the order reversed.

    NaN wins over everything here too, and of equals the first wins.
    """
    return _call(True, x, dim, keepdim, out)


def _call(
    largest: bool, x: torch.Tensor, dim: int | None, keepdim: bool, out: torch.Tensor | None
) -> torch.Tensor:
    check_tensor("x", x)
    if out is not None:
        check_tensor("out", out)
    if isinstance(dim, bool) or not (dim is None or isinstance(dim, int)):
        raise TypeError(f"dim: expected an int or None, got {type_name(dim)}")
    check_bool("keepdim", keepdim)
    if out is None:
        return _OPS[int(largest)](x, dim, keepdim)
    _OPS_OUT[int(largest)](x, dim, keepdim, out)
    return out


def _result_shape(largest: bool, x: torch.Tensor, dim: int | None, keepdim: bool) -> list[int]:
    """Shape of the result. Raises ValueError for x's dtype, and what torch raises for `dim`."""
    _INPUT.check((x,))
    rank = x.dim()
    if dim is None:
        empty, shape = x.numel() == 0, [1] * rank if keepdim else []
    elif not -max(rank, 1) <= dim < max(rank, 1):
        empty, shape = True, []
    elif rank == 0:
        empty, shape = False, []
    else:
        shape = list(x.shape)
        empty = shape[dim] == 0
        if keepdim:
            shape[dim] = 1
        else:
            del shape[dim]
    if empty:
        _TORCH[largest](torch.empty(()).expand(x.shape), dim, keepdim)  # raises
    return shape


def _check_out(x: torch.Tensor, shape: list[int], out: torch.Tensor) -> None:
    right = out.dtype is torch.int64 and list(out.shape) == shape and out.device == x.device
    if not (right and out.is_contiguous()):
        rule = TensorRule("out", (torch.int64,), tuple(shape), align=1)
        Contract([rule]).check([out], x.device)  # raises


def _sizes(x: torch.Tensor, dim: int | None) -> tuple[int, int, int]:
    """x as [outer, reduce, inner]."""
    shape = x.shape
    if dim is None or not shape:
        return 1, x.numel(), 1
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


_KERNELS = KernelCache(build_from("cute_moe.kernels.argmin.kernel"))
_plan = functools.lru_cache(maxsize=1024)(plan)


def _launch(made: Plan, x: torch.Tensor, out: torch.Tensor) -> None:
    """Launch the scan and, where it is partial, the combine kernel, on torch's current stream."""
    device = x.device
    if made.walk.splits == 1:
        _KERNELS.launch(made.scan, device, x, out, made.walk)
        return
    pairs = torch.empty(made.pair_words, dtype=torch.int64, device=device)
    _KERNELS.launch(made.scan, device, x, pairs, made.walk)
    sizes = (made.outputs, made.walk.splits, made.combine_tx)
    _KERNELS.launch(COMBINE, device, pairs, out, *sizes)


def _compute(
    largest: bool, x: torch.Tensor, dim: int | None, keepdim: bool, out: torch.Tensor
) -> None:
    """The result into a checked out."""
    if out.numel() == 0:
        return
    if x.device.type != "cuda":
        out.copy_(_TORCH[largest](x, dim, keepdim))
        return
    x = x.contiguous()
    device = x.device
    made = _plan(
        *_sizes(x, dim),
        dtype_name(x.dtype),
        largest,
        x.data_ptr() % 16,
        device_facts(device.index).sm_count,
    )
    _launch(made, x.view(-1), out.view(-1))


def _register(largest: bool) -> tuple:
    """The operators without and with `out`."""
    name = "argmax" if largest else "argmin"

    def run(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        out = x.new_empty(_result_shape(largest, x, dim, keepdim), dtype=torch.int64)
        _compute(largest, x, dim, keepdim, out)
        return out

    def fake(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
        return x.new_empty(_result_shape(largest, x, dim, keepdim), dtype=torch.int64)

    def run_out(x: torch.Tensor, dim: int | None, keepdim: bool, out: torch.Tensor) -> None:
        fake_out(x, dim, keepdim, out)
        check_apart(out, {"x": x})
        _compute(largest, x, dim, keepdim, out)

    def fake_out(x: torch.Tensor, dim: int | None, keepdim: bool, out: torch.Tensor) -> None:
        _check_out(x, _result_shape(largest, x, dim, keepdim), out)

    arguments = "Tensor x, int? dim, bool keepdim"
    return (
        register(f"{name}({arguments}) -> Tensor", run, fake),
        register(f"{name}_out({arguments}, Tensor(a!) out) -> ()", run_out, fake_out),
    )


_OPS, _OPS_OUT = zip(_register(False), _register(True), strict=True)
