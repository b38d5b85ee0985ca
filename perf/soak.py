"""Replays of one launch, each output compared bit by bit: `python perf/soak.py [--replays N]`.

The CUDA graph poisons the output, launches and compares it with that of a first launch, so nothing
is left to the host.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import product

import protocol
import tool
import torch
from cases import Weights, make_inputs, make_weights

import cute_moe
from cute_moe import reference
from cute_moe.kernels.moe.spec import MAX_TOKENS

MAX_ERROR = 0.075  # against fp32 from the dequantised weights


def differing(tokens: int, weights: Weights, replays: int, **options: object) -> bool:
    """Whether any of `replays` replays at M = `tokens` gave other bits than a first launch.

    Raises RuntimeError when that launch is wrong.
    """
    device = weights.quantised[0].device
    inputs = (*make_inputs(tokens, "random", device), *weights.quantised, protocol.TOP_K)
    pad = cute_moe.alloc_scratchpad(device)
    out = torch.empty_like(inputs[0])
    cute_moe.mono_moe(*inputs, out=out, scratchpad=pad, **options)
    first = out.clone()
    if not reference.relative_error(first, reference.moe_fp32(*inputs)) <= MAX_ERROR:
        raise RuntimeError(f"M = {tokens}: the first output is wrong")
    bad = torch.zeros((), dtype=torch.bool, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.fill_(torch.nan)
        cute_moe.mono_moe(*inputs, out=out, scratchpad=pad, **options)
        bad.logical_or_((out.view(torch.int16) != first.view(torch.int16)).any())
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return bool(bad)


def work(args: argparse.Namespace) -> int:
    """Every M with every kind of activations; 1 when an output differed."""
    torch.manual_seed(0)
    weights = make_weights(tool.device())
    failed = 0
    for kind, tokens in product(args.activations, args.tokens):
        started = time.perf_counter()
        options = {"activations": kind, "programmatic": args.programmatic}
        same = not differing(tokens, weights, args.replays, **options)
        took = f"{args.replays} replays in {time.perf_counter() - started:.1f} s"
        failed |= tool.verdict(f"{kind}, M = {tokens}, {took}", same)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all outputs have the same bits, 1 when one differs, 2 where nothing can run."""
    parser = tool.parser("soak", __doc__, seconds=540)
    add = parser.add_argument
    everything = tuple(range(1, MAX_TOKENS + 1))
    add("--replays", type=tool.count, default=200_000, help="at each M (default 200000)")
    add("--tokens", type=tool.parse_tokens, default=everything, help="such as 1,8 (default 1..8)")
    add("--activations", nargs="+", choices=("fp8", "bf16"), default=["fp8", "bf16"])
    add("--programmatic", action="store_true", help="launches that start before the last one ends")
    return tool.checked(parser, work, argv)


if __name__ == "__main__":
    sys.exit(main())
