"""MoE decode layers for NVIDIA Hopper in one kernel launch, written in CuTe DSL."""

from cute_moe.argmin import argmax, argmin
from cute_moe.dispatch import combine, dispatch, moe_dispatch_indices, moe_permute
from cute_moe.layer import MoELayer
from cute_moe.moe import (
    alloc_scratchpad,
    fused_experts,
    get_scratchpad_size_bytes,
    has_monomoe,
    interleave_for_tma_wgmma_up,
    mono_moe,
)

__all__ = [
    "MoELayer",
    "alloc_scratchpad",
    "argmax",
    "argmin",
    "combine",
    "dispatch",
    "fused_experts",
    "get_scratchpad_size_bytes",
    "has_monomoe",
    "interleave_for_tma_wgmma_up",
    "moe_dispatch_indices",
    "moe_permute",
    "mono_moe",
]
