"""The shapes of the MoE layers of published models and of their tensor-parallel slices."""

from __future__ import annotations

from cute_moe.kernels.moe.spec import MoeSpec

# (hidden K, experts E, top_k, intermediate N) of one GPU.
SHAPES = {
    "Qwen3-30B-A3B": (2048, 128, 8, 768),
    "Qwen3-235B": (4096, 128, 8, 1536),
    "Qwen3-Next-80B": (2048, 512, 10, 512),
    "Qwen3.6-35B": (2048, 256, 8, 512),
    "Qwen3.5-122B": (3072, 256, 8, 1024),
    "Qwen3.5-397B": (4096, 512, 10, 1024),
    "DeepSeek-V3": (7168, 256, 8, 2048),
    "GLM-4.5-Air": (4096, 128, 8, 1408),
    "GLM-4.6": (5120, 160, 8, 1536),
    "MiniMax-M2": (3072, 256, 8, 1536),
    "Kimi-K2": (7168, 384, 8, 2048),
    "Mixtral-8x7B": (4096, 8, 2, 14336),
    "30B/TP2": (2048, 128, 8, 384),
    "30B/TP4": (2048, 128, 8, 192),
    "235B/TP4": (4096, 128, 8, 384),
    "235B/TP8": (4096, 128, 8, 192),
    "Next/TP2": (2048, 512, 10, 256),
    "35B/TP2": (2048, 256, 8, 256),
    "Air/TP2": (4096, 128, 8, 704),
    "Air/TP4": (4096, 128, 8, 352),
    "GLM46/TP8": (5120, 160, 8, 192),
    "DSV3/TP8": (7168, 256, 8, 256),
    "Kimi/TP8": (7168, 384, 8, 256),
    "M2/TP4": (3072, 256, 8, 384),
    "397B/TP4": (4096, 512, 10, 256),
    "Mixtral/TP8": (4096, 8, 2, 1792),
}


def spec_of(name: str, **options) -> MoeSpec:
    """The spec of a shape, with the largest block of scales that divides N."""
    hidden, experts, top_k, intermediate = SHAPES[name]
    block = next(b for b in (128, 64, 32) if intermediate % b == 0)
    options = {"scale_block": block, **options}
    return MoeSpec(experts, hidden, intermediate, top_k, **options)
