"""A few reductions by argmin and argmax, checked: `python perf/one_argmin.py [--dtypes float32]`.

The program to run under compute-sanitizer. Its shapes take the kernel with the ring of bulk copies,
with a reduction cut into pieces and with whole ones, and the one that loads by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tool
import torch
from cases import make_values

import cute_moe
from cute_moe.kernels.argmin.spec import ITEM_BYTES

SHAPES = ((2, 300, 4095), (66, 300, 4095), (300, 20, 4095))
DIM = 1
KINDS = ("normal", "ties")  # of values; see argmin_cases.make_values


def work(args: argparse.Namespace) -> int:
    """Every shape, dtype and kind of values; 1 at the first result that is not torch's."""
    torch.manual_seed(0)
    functions = ((cute_moe.argmin, torch.argmin), (cute_moe.argmax, torch.argmax))
    for dtype in args.dtypes:
        for shape in SHAPES:
            for kind in KINDS:
                x = make_values(shape, getattr(torch, dtype), kind, tool.device())
                for ours, theirs in functions:
                    name = f"{theirs.__name__} {list(shape)} {dtype}, {kind}"
                    if tool.verdict(name, torch.equal(ours(x, DIM), theirs(x, DIM))):
                        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all results are right, 1 when one is wrong, 2 where nothing can run."""
    parser = tool.parser("one_argmin", __doc__, seconds=540)
    parser.add_argument("--dtypes", nargs="+", choices=ITEM_BYTES, default=["float32"])
    return tool.checked(parser, work, argv)


if __name__ == "__main__":
    sys.exit(main())
