"""How far an output is from the block-FP8 reference, once flips of h are taken out."""

from __future__ import annotations

import torch

from cute_moe import reference

MAX_FLIPS = 2


def unexplained(
    got: torch.Tensor,
    want: torch.Tensor,
    ids: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
) -> float:
    """The relative error of one token that at most MAX_FLIPS flips of h do not explain.

    A feature of h that two correct computations round to neighbouring e4m3 values moves the output
    along its column of the down weights. got, want [K]; ids: the token's experts.
    """
    experts = ids.long().unique()
    columns = reference.dequantize_blocks(w_down[experts], s_down[experts]).double()
    columns = columns.transpose(0, 1).flatten(1)
    directions = columns / columns.norm(dim=0).clamp_min(1e-300)
    change = got.double() - want.double()
    rest, chosen = change, []
    for _ in range(MAX_FLIPS):
        chosen.append(int((rest @ directions).abs().argmax()))
        basis = torch.linalg.qr(columns[:, chosen]).Q
        rest = change - basis @ (basis.T @ change)
    return float(rest.norm() / want.double().norm())
