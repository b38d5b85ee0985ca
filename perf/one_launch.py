"""A few launches of the MoE layer, checked: `python perf/one_launch.py [--tokens 1,8]`.

The program to run under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product

import protocol
import tool
import torch
from cases import make_inputs, make_weights

import cute_moe
from cute_moe import reference

LAUNCHES = 3  # at each M: both parities of h, and the first of them again
MAX_ERROR = {"fp8": protocol.MAX_ERROR, "bf16": protocol.MAX_ERROR_BF16}
REFERENCES = {"fp8": reference.moe_block_fp8, "bf16": reference.moe_fp32}


def work(args: argparse.Namespace) -> int:
    """Every M with every kind of activations; 1 when an output is wrong."""
    torch.manual_seed(0)
    device = tool.device()
    weights = make_weights(device).quantised
    pad = cute_moe.alloc_scratchpad(device)
    failed = 0
    for tokens, kind in product(args.tokens, args.activations):
        inputs = (*make_inputs(tokens, "random", device), *weights, protocol.TOP_K)
        for _ in range(LAUNCHES):
            got = cute_moe.mono_moe(*inputs, scratchpad=pad, activations=kind)
        error = reference.relative_error(got, REFERENCES[kind](*inputs))
        name = f"M = {tokens}, {kind}, relative error {error:.4f}"
        failed |= tool.verdict(name, error <= MAX_ERROR[kind])
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all outputs are right, 1 when one is wrong, 2 where nothing can run."""
    parser = tool.parser("one_launch", __doc__, seconds=540)
    add = parser.add_argument
    add("--tokens", type=tool.parse_tokens, default=(1, 8), help="such as 1,2,8 (default 1,8)")
    add("--activations", nargs="+", choices=MAX_ERROR, default=list(MAX_ERROR))
    return tool.checked(parser, work, argv)


if __name__ == "__main__":
    sys.exit(main())
