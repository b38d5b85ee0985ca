"""All row permutations on small inputs, a part of them hostile: `python perf/one_dispatch.py`.

The program to run under compute-sanitizer; every result is checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import tool
import torch
from cases import Guarded, bytes_as, draw_pairs, same_bytes

import cute_moe
from cute_moe import dispatch_reference as reference

HOSTILE = (-1, 1 << 20, 2**31 - 1, -(2**31))


def spoilt(indices: torch.Tensor) -> torch.Tensor:
    """Every seventh index is out of range."""
    result = indices.clone()
    flat = result.view(-1)
    bad = torch.tensor(HOSTILE, device=indices.device, dtype=indices.dtype)
    where = torch.arange(0, flat.numel(), 7, device=indices.device)
    flat[where] = bad[where % len(HOSTILE)]
    return result


def dispatch(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Vectors of 16 and of 1 byte; all rows filled, some not, many left over."""
    for dtype, columns, rows in ((torch.float32, 128, 300), (torch.uint8, 3, 300),
                                 (torch.float32, 128, 700)):  # fmt: skip
        x = bytes_as((300, columns), dtype, device)
        expert, slot, offsets = draw_pairs("random", 300, 16, device)
        for pairs in ((expert, slot), (spoilt(expert), spoilt(slot))):
            out = Guarded((rows, columns), dtype, device)
            got = cute_moe.dispatch(x, *pairs, offsets, out=out.matrix)
            same = same_bytes(got, reference.dispatch(x, *pairs, offsets, rows))
            yield f"dispatch {dtype} into {rows} rows", same and out.intact()


def permute_and_combine(device: torch.device) -> Iterator[tuple[str, bool]]:
    """Few tokens (one launch), many (two), and rows that bulk copies cannot move."""
    for tokens, columns in ((32, 512), (1200, 1024), (1200, 3)):
        x = torch.randn(tokens, columns, device=device)
        ids = spoilt(torch.rand(tokens, 64, device=device).topk(8, dim=1).indices.contiguous())
        packed, slots, offsets, row_token = cute_moe.moe_permute(x, ids, 64)
        same = torch.equal(packed, reference.permute(x, row_token))
        yield f"permute {tokens} x {columns}", same
        weights = torch.rand(tokens, 8, device=device)
        got = cute_moe.combine(packed, ids, slots, offsets, weights)
        want = x * (((ids >= 0) & (ids < 64)) * weights).sum(1, keepdim=True)
        near = torch.allclose(got, want, rtol=1e-4, atol=1e-4)
        yield f"combine {tokens} x {columns}", near


def work(args: argparse.Namespace) -> int:
    """Everything; 1 at the first wrong result."""
    device = tool.device()
    torch.manual_seed(0)
    for tried in (dispatch, permute_and_combine):
        for name, good in tried(device):
            if tool.verdict(name, good):
                return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all results are right, 1 when one is wrong, 2 where nothing can run."""
    return tool.checked(tool.parser("one_dispatch", __doc__, seconds=540), work, argv)


if __name__ == "__main__":
    sys.exit(main())
