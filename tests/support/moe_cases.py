"""Weights, inputs and measures shared by the tests of the MoE layer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_moe import reference

E, K, N = 256, 2048, 512


class Shape(NamedTuple):
    """Sizes of a layer; a weight scale belongs to scale_block of N by scale_block_hidden of K."""

    num_experts: int = E
    hidden: int = K
    intermediate: int = N
    top_k: int = 8
    scale_block: int = 128
    scale_block_hidden: int = 128

    def __str__(self) -> str:
        return "-".join(map(str, self))


@dataclass(frozen=True)
class Weights:
    """Block-FP8 weights in call order, and the fp32 weights that they were made from."""

    quantised: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    up_fp32: torch.Tensor
    down_fp32: torch.Tensor


def make_weights(device: torch.device, seed: int = 0) -> Weights:
    """Weights of the largest shape that tests hold in full."""
    return draw_weights(Shape(E, K, N), device, seed)  # the sizes of now, not those of import


def draw_weights(shape: Shape, device: torch.device | str = "cpu", seed: int = 0) -> Weights:
    """Normal weights of standard deviation 0.02, with a spread of block scales."""
    generator = torch.Generator(device).manual_seed(seed)
    e, k, n, _, b, c = shape

    def draw(rows: int, columns: int, high: int, wide: int) -> torch.Tensor:
        w = torch.randn(e, rows, columns, device=device, generator=generator)
        spread = torch.rand(e, rows // high, 1, columns // wide, 1, device=device,
                            generator=generator) + 0.5  # fmt: skip
        w.view(e, rows // high, high, columns // wide, wide).mul_(spread * 0.02)
        return w

    up, down = draw(2 * n, k, b, c), draw(k, n, c, b)
    quantised = (*reference.quantize_blocks(up, b, c), *reference.quantize_blocks(down, c, b))
    return Weights(quantised, up, down)


def draw_inputs(
    shape: Shape, tokens: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x bf16 [tokens, K], logits fp32 [tokens, E]) at random."""
    x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
    return x, torch.randn(tokens, shape.num_experts, device=device)


def make_inputs(
    tokens: int, routing: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activations_in, router_logits) of a named routing distribution."""
    x = torch.randn(tokens, K, device=device).to(torch.bfloat16)
    logits = torch.randn(tokens, E, device=device)
    if routing == "skewed":
        logits -= 1.5 * torch.log(torch.arange(1, E + 1, device=device))[torch.randperm(E)]
    elif routing == "same":
        logits[:] = logits[:1]
    elif routing == "disjoint":
        order = torch.randperm(E, device=device)
        for t in range(tokens):
            logits[t, order[8 * t : 8 * t + 8]] += 20.0
    elif routing == "one":  # One expert that every token has, the rest at random.
        logits[:, 77] = 30.0
    elif routing == "pairs":  # Neighbouring tokens share their experts.
        logits[1::2] = logits[: tokens - tokens % 2 : 2]
    elif routing != "random":
        raise ValueError(f"routing: got {routing!r}")
    return x, logits.to(dtype)


ROUTINGS = ("random", "skewed", "same", "disjoint", "one", "pairs")
