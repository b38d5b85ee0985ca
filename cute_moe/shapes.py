"""Shapes of MoE layers, and those of models that the demo and the benchmarks know by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer: E experts, hidden size K, intermediate size N."""

    num_experts: int = 256
    hidden: int = 2048
    intermediate: int = 512
    top_k: int = 8

    @property
    def up_bytes(self) -> int:
        """Bytes of the e4m3 gate and up weights of one expert."""
        return 2 * self.hidden * self.intermediate

    @property
    def down_bytes(self) -> int:
        """Bytes of the e4m3 down weights of one expert."""
        return self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Bytes of the e4m3 weights of one expert."""
        return self.up_bytes + self.down_bytes


DEFAULT_SHAPE = "qwen3.5-35b"
SHAPES = {  # "tp4": one of four parts of a layer that is cut along N
    DEFAULT_SHAPE: LayerShape(),
    "qwen3-30b": LayerShape(128, 2048, 768, 8),
    "qwen3-next": LayerShape(512, 2048, 512, 10),
    "qwen3-235b-tp4": LayerShape(128, 4096, 384, 8),
    "glm-4.5-air": LayerShape(128, 4096, 1408, 8),
    "deepseek-v3-tp8": LayerShape(256, 7168, 256, 8),
    "minimax-m2-tp4": LayerShape(256, 3072, 384, 8),
    "mixtral-8x7b-tp2": LayerShape(8, 4096, 7168, 2),
}
