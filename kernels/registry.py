"""Every kernel that this package ships, for compile checks and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def kernels() -> list[tuple[str, Any, Callable[[str], Any]]]:
    """(name, spec, build): `build(options)` compiles the kernel of `spec` for sm_90a."""
    from cute_moe.kernels.moe import kernel
    from cute_moe.kernels.moe.spec import MoeSpec

    specs = {
        "mono_moe": MoeSpec(),
        "mono_moe, interleaved rows": MoeSpec(raw_rows=False),
        "mono_moe, sigmoid, fp32 logits, bf16 scales, 16 SMs": MoeSpec(
            scoring="sigmoid",
            logits_dtype="float32",
            scales_up_dtype="bfloat16",
            scales_down_dtype="bfloat16",
            grid=16,
        ),
    }
    return [
        (name, spec, lambda options, spec=spec: kernel.build(spec, options))
        for name, spec in specs.items()
    ]
