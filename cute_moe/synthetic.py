"""Writes a one-layer checkpoint with random weights, in the layout of Qwen3.5-35B-A3B-FP8."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from cute_moe.checkpoint import LAYER_PREFIXES, layer_index
from cute_moe.checkpoint_files import INDEX_NAME
from cute_moe.reference import BLOCK, E4M3, E4M3_MAX
from cute_moe.shapes import LayerShape

WEIGHT_STD = 0.02  # of the weights meant, as in trained models of this size


def write_synthetic_checkpoint(
    directory: str | Path,
    layer: int = 0,
    shape: LayerShape | None = None,
    seed: int = 0,
    shards: int = 4,
) -> None:
    """Writes config.json, an index and `shards` files into `directory`, made if need be.

    The default shape takes 0.8 GB. Equal arguments write equal bytes. Raises ValueError when a
    size is no multiple of 128, there are fewer experts than shards or than a token uses, or
    `layer` or `seed` is negative.
    """
    shape = LayerShape() if shape is None else shape
    layer = layer_index(layer)
    for size in (shape.hidden, shape.intermediate):
        if size < 1 or size % BLOCK:
            raise ValueError(f"shape: expected sizes that are multiples of {BLOCK}, got {shape}")
    if not 1 <= shape.top_k <= shape.num_experts:
        raise ValueError(f"shape: expected 1 <= top_k <= num_experts, got {shape}")
    if not 1 <= shards <= shape.num_experts:
        raise ValueError(f"shards: expected 1..{shape.num_experts}, got {shards}")
    if seed < 0:
        raise ValueError(f"seed: expected an int >= 0, got {seed}")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    random = _RandomWeights(seed)
    prefix = LAYER_PREFIXES[0].format(layer)

    weight_map: dict[str, str] = {}
    total_bytes = 0
    for shard, experts in enumerate(np.array_split(np.arange(shape.num_experts), shards)):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        tensors = dict(_expert_tensors(f"{prefix}.experts", experts.tolist(), shape, random))
        if shard == 0:
            tensors.update(_dense_tensors(prefix, shape, random))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())

    _write_json(folder / "config.json", _config(shape, layer))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / INDEX_NAME, index)


class _RandomWeights:
    """Random block-FP8 matrices, looked up in a table: drawing normals is several times slower.

    A uniform 16-bit number selects the e4m3 code of the normal quantile there, the largest one
    being 448 as in a block that was quantised.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.SFC64(seed))
        levels = 1 << 16
        middle = (torch.arange(levels, dtype=torch.float64, device="cpu") + 0.5) / levels
        quantile = torch.special.ndtri(middle)
        codes = (quantile / quantile[-1] * E4M3_MAX).float().to(E4M3)
        self._codes = codes.view(torch.uint8).numpy()
        self._scale = WEIGHT_STD * float(quantile[-1]) / E4M3_MAX

    def weight(self, rows: int, columns: int) -> torch.Tensor:
        """e4m3 [rows, columns]."""
        words = self._generator.integers(0, 1 << 64, size=rows * columns // 4, dtype=np.uint64)
        codes = self._codes[words.view(np.uint16)].reshape(rows, columns)
        return torch.from_numpy(codes).view(E4M3)

    def scale(self, rows: int, columns: int) -> torch.Tensor:
        """bf16 scales of such a weight: spread by about a fifth from block to block."""
        spread = self._generator.standard_normal((rows // BLOCK, columns // BLOCK))
        return torch.from_numpy(self._scale * np.exp(0.2 * spread)).to(torch.bfloat16)

    def dense(self, rows: int, columns: int) -> torch.Tensor:
        """bf16 [rows, columns]."""
        values = self._generator.standard_normal((rows, columns), dtype=np.float32)
        return torch.from_numpy(values * np.float32(WEIGHT_STD)).to(torch.bfloat16)


def _mlp_tensors(
    prefix: str, shape: LayerShape, random: _RandomWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    wide, tall = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    for name, size in (("gate_proj", wide), ("up_proj", wide), ("down_proj", tall)):
        yield f"{prefix}.{name}.weight", random.weight(*size)
        yield f"{prefix}.{name}.weight_scale_inv", random.scale(*size)


def _expert_tensors(
    prefix: str, experts: list[int], shape: LayerShape, random: _RandomWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    for expert in experts:
        yield from _mlp_tensors(f"{prefix}.{expert}", shape, random)


def _dense_tensors(
    prefix: str, shape: LayerShape, random: _RandomWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}.gate.weight", random.dense(shape.num_experts, shape.hidden)
    yield from _mlp_tensors(f"{prefix}.shared_expert", shape, random)
    yield f"{prefix}.shared_expert_gate.weight", random.dense(1, shape.hidden)


def _config(shape: LayerShape, layer: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "moe_intermediate_size": shape.intermediate,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "num_hidden_layers": layer + 1,
            "shared_expert_intermediate_size": shape.intermediate,
        },
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
