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
    return _each({**specs, **_moe_shapes()}, kernel.build)


def _moe_shapes() -> dict[str, Any]:
    """Models whole and in slices: one or two stages a step, slices or none, partial blocks, one or
    two column blocks a CTA, down weights in registers or in the ring."""
    from cute_moe.kernels.moe.spec import MoeSpec

    given = {"routing": "ids"}
    return {
        "mono_moe, E512 K2048 N512 k10, routing out": MoeSpec(512, 2048, 512, 10, routing_out=True),
        "mono_moe, E513 K512 N128 k16, fp32 logits": MoeSpec(
            513, 512, 128, 16, logits_dtype="float32", renormalize=False
        ),
        "mono_moe, E1024 K512 N128 k16, all weights": MoeSpec(
            1024, 512, 128, 16, renormalize=False
        ),
        "mono_moe, E160 K5120 N1536 k8, e8m0 scales": MoeSpec(
            160,
            5120,
            1536,
            8,
            scales_up_dtype="float8_e8m0fnu",
            scales_down_dtype="float8_e8m0fnu",
        ),
        "mono_moe, E64 K2048 N768 k8": MoeSpec(64, 2048, 768, 8),
        "mono_moe, E64 K7168 N256 k8, sigmoid, 114 SMs": MoeSpec(
            64, 7168, 256, 8, scoring_func="sigmoid", grid=114
        ),
        "fused_experts, E256 K2048 N512 k8, programmatic": MoeSpec(**given, programmatic=True),
        "fused_experts, E128 K4096 N192 k8, blocks of 64, int64, map": MoeSpec(
            128,
            4096,
            192,
            8,
            **given,
            ids_dtype="int64",
            mapped_experts=512,
            scale_block=64,
            scale_block_hidden=64,
            weights_dtype="bfloat16",
        ),
        "fused_experts, E128 K4096 N352 k8, blocks of 32": MoeSpec(
            128, 4096, 352, 8, **given, scale_block=32
        ),
        "fused_experts, E32 K2048 N352 k8, blocks of 32, also of K": MoeSpec(
            32, 2048, 352, 8, **given, scale_block=32, scale_block_hidden=32
        ),
        "fused_experts, E33 K4096 N384 k9": MoeSpec(33, 4096, 384, 9, **given),
        "fused_experts, E256 K7168 N2048 k8, 78 SMs": MoeSpec(256, 7168, 2048, 8, **given, grid=78),
        "fused_experts, E160 K5120 N1536 k8, bf16 activations": MoeSpec(
            160, 5120, 1536, 8, **given, activations="bf16"
        ),
        "fused_experts, E8 K4096 N14336 k2": MoeSpec(8, 4096, 14336, 2, **given),
        "fused_experts, E128 K4096 N704 k8, blocks of 64, bf16 activations": MoeSpec(
            128, 4096, 704, 8, **given, scale_block=64, activations="bf16"
        ),
    }


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
