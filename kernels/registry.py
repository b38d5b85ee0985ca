"""Every kernel that this package ships, for compile checks and reports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Kernel = tuple[str, Any, Callable[[str], Any]]


def kernels() -> list[Kernel]:
    """(name, spec, build): `build(options)` compiles the kernel of `spec` for sm_90a."""
    return [*_mono_moe(), *_argmin(), *_dispatch()]


def _mono_moe() -> list[Kernel]:
    from cute_moe.kernels.moe import kernel
    from cute_moe.kernels.moe.spec import MoeSpec

    specs = {
        "mono_moe": MoeSpec(),
        "mono_moe, bf16 activations": MoeSpec(activations="bf16"),
        "mono_moe, programmatic": MoeSpec(programmatic=True),
        "mono_moe, interleaved rows": MoeSpec(interleave_up=False),
        "mono_moe, bf16 activations, 78 SMs": MoeSpec(activations="bf16", grid=78),
        "mono_moe, bf16 activations, 16 SMs": MoeSpec(activations="bf16", grid=16),
        "mono_moe, sigmoid, fp32 logits, bf16 scales, 16 SMs": MoeSpec(
            scoring_func="sigmoid",
            logits_dtype="float32",
            scales_up_dtype="bfloat16",
            scales_down_dtype="bfloat16",
            grid=16,
        ),
    }
    return _each(specs, kernel.build)


def _argmin() -> list[Kernel]:
    from cute_moe.kernels.argmin import kernel
    from cute_moe.kernels.argmin.spec import COMBINE, plan

    # (outer, reduce, inner, dtype, largest, address): rows, loads of all widths, bulk copies.
    cases = [
        (4, 102400, 1, "bfloat16", True, 0),
        (4, 4095, 1, "float32", False, 4),
        (4, 4095, 1, "int32", True, 4),
        (4, 100, 255, "float16", True, 0),
        (4, 100, 256, "bfloat16", False, 0),
        (4, 100, 256, "int32", False, 0),
        (128, 4096, 4095, "float32", False, 0),
        (128, 4096, 4095, "bfloat16", True, 2),
    ]
    specs = {}
    for sizes in cases:
        scan = plan(*sizes, 132).scan
        specs[f"argmin, {scan.kind}, {scan.dtype}, vectors of {scan.vector}"] = scan
    return _each({**specs, "argmin, combine": COMBINE}, kernel.build)


def _dispatch() -> list[Kernel]:
    from cute_moe.kernels.dispatch.build import build
    from cute_moe.kernels.dispatch.spec import CombineSpec, CountSpec, DispatchSpec, SortSpec

    indices = ("int64", "int32", "int32")
    specs = {
        "dispatch, vectors of 16": DispatchSpec(16),
        "dispatch, vectors of 1, int64": DispatchSpec(1, "int64", "int64", "int64"),
        "count": CountSpec(128, "int64"),
        "count, beside a copying kernel": CountSpec(128, "int64", threads=256),
        "sort": SortSpec(64, "int64", alone=True, threads=256),
        "sort, 4096 experts, from a table": SortSpec(4096, "int32", alone=False, threads=1024),
        "permute": SortSpec(128, "int64", alone=True, threads=256, vector=16),
        "permute, vectors of 2, from a table": SortSpec(
            256, "int32", alone=False, threads=1024, vector=2
        ),
        "permute, bulk": SortSpec(128, "int64", False, 1024, vector=16, bulk=True),
        "combine, bf16": CombineSpec(16, "bfloat16", "float32", *indices),
        "combine, e4m3": CombineSpec(16, "float8_e4m3fn", "bfloat16", *indices),
        "combine, fp64, vectors of 8": CombineSpec(8, "float64", "float32", *indices),
    }
    return _each(specs, build)


def _each(specs: dict[str, Any], build: Callable[[Any, str], Any]) -> list[Kernel]:
    return [(name, spec, functools.partial(build, spec)) for name, spec in specs.items()]
