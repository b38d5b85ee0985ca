"""Weights, inputs and measures shared by the tests of the MoE layer."""

from dataclasses import dataclass

import torch

from cute_moe import reference

E, K, N = 256, 2048, 512


@dataclass(frozen=True)
class Weights:
    """Block-FP8 weights in call order, and the fp32 weights that they were made from."""

    quantised: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    up_fp32: torch.Tensor
    down_fp32: torch.Tensor


def make_weights(device: torch.device, seed: int = 0) -> Weights:
    """Normal weights of standard deviation 0.02, with a spread of block scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        w = torch.randn(E, rows, columns, device=device, generator=generator)
        spread = torch.rand(E, rows // 128, 1, columns // 128, 1, device=device,
                            generator=generator) + 0.5  # fmt: skip
        w.view(E, rows // 128, 128, columns // 128, 128).mul_(spread * 0.02)
        return w

    up, down = draw(2 * N, K), draw(K, N)
    return Weights((*reference.quantize_blocks(up), *reference.quantize_blocks(down)), up, down)


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
