"""Errors of the MoE layer over many random cases: `python perf/accuracy.py [--draws 25]`.

For each top_k and routing the mean and the worst relative error against the block-FP8 reference,
and how many cases lie over the bound of the tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import protocol
import tool
import torch
from cases import ROUTINGS, make_inputs, make_weights

import cute_moe
from cute_moe import reference

TOKENS, TOP_KS = (1, 2, 5, 8), (1, 2, 8)
BOUND = protocol.MAX_ERROR  # of the tests, which take few draws
MAX_ERROR = 0.05  # far beyond what flips of quantised values do


def work(args: argparse.Namespace) -> int:
    """A line for each top_k and routing; 1 when an error is over MAX_ERROR or not a number."""
    torch.manual_seed(1)
    device = tool.device()
    weights = make_weights(device).quantised
    failed = 0
    for top_k in TOP_KS:
        pad = cute_moe.alloc_scratchpad(device, top_k=top_k)
        for routing in ROUTINGS:
            errors = []
            for _ in range(args.draws):
                for tokens in TOKENS:
                    inputs = (*make_inputs(tokens, routing, device), *weights, top_k)
                    got = cute_moe.mono_moe(*inputs, scratchpad=pad)
                    want = reference.moe_block_fp8(*inputs)
                    errors.append(reference.relative_error(got, want))
            over = sum(not error <= BOUND for error in errors)
            print(
                f"top_k {top_k}, {routing}: mean {statistics.mean(errors):.4f}, worst "
                f"{max(errors):.4f}, over {BOUND}: {over} of {len(errors)}",
                flush=True,
            )
            failed |= not all(error <= MAX_ERROR for error in errors)
    return int(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all errors are explained, 1 when one is not, 2 where nothing can run."""
    parser = tool.parser("accuracy", __doc__, seconds=540)
    parser.add_argument("--draws", type=tool.count, default=25, help="cases of each M (default 25)")
    return tool.checked(parser, work, argv)


if __name__ == "__main__":
    sys.exit(main())
