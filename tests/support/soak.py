"""Replays of a CUDA graph of one launch, each output compared bit by bit with the first.

`PYTHONPATH=tests/support python tests/support/soak.py [--replays 200000]`; 1 when one differed.
The graph poisons the output, launches and compares, so nothing is left to the host.
"""

import argparse
import sys
import time

import torch
from moe_cases import make_inputs, make_weights

import cute_moe
from cute_moe import reference

MAX_ERROR = 0.075  # against fp32 from the dequantised weights


def differing(tokens: int, weights, replays: int, **options: object) -> bool:
    """Whether any of `replays` replays at M = `tokens` gave other bits than a first launch."""
    x, logits = make_inputs(tokens, "random", torch.device("cuda"))
    pad = cute_moe.alloc_scratchpad("cuda")
    out = torch.empty_like(x)
    arguments = (x, logits, *weights.quantised, 8)
    cute_moe.mono_moe(*arguments, out=out, scratchpad=pad, **options)
    first = out.clone()
    exact = reference.moe_fp32(x, logits, *weights.quantised, 8)
    if not reference.relative_error(first, exact) <= MAX_ERROR:
        raise RuntimeError(f"M = {tokens}: the first output is wrong")
    bad = torch.zeros((), dtype=torch.bool, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.fill_(torch.nan)
        cute_moe.mono_moe(*arguments, out=out, scratchpad=pad, **options)
        bad.logical_or_((out.view(torch.int16) != first.view(torch.int16)).any())
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    return bool(bad)


def main() -> int:
    """All M, for each kind of activations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=200_000)
    parser.add_argument("--activations", nargs="+", default=["fp8", "bf16"])
    parser.add_argument("--programmatic", action="store_true")
    args = parser.parse_args()
    weights = make_weights(torch.device("cuda"))
    failed = False
    for activations in args.activations:
        for tokens in range(1, 9):
            started = time.perf_counter()
            options = {"activations": activations, "programmatic": args.programmatic}
            bad = differing(tokens, weights, args.replays, **options)
            failed |= bad
            seconds = time.perf_counter() - started
            verdict = "DIFFERENT BITS" if bad else "same bits"
            print(f"{activations} M={tokens}: {args.replays} replays, {verdict}, {seconds:.1f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
