"""Launches of mono_moe for Nsight: `python perf/nsight/driver.py [--tokens 1,8] [--replays 20]`.

For each M, warm-up launches and then the one to measure, in an NVTX range that names it. Every
launch has its own routing and the next copy of the weights, as in `perf/bench.py moe`: a cold L2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import protocol
import tool
from bench_moe import Pool, make_pool

from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.moe import mono_moe
from cute_moe.reference import moe_block_fp8, relative_error
from cute_moe.timing import capture

WARM_UP_RANGE = "warm-up"


def range_name(tokens: int, experts: int) -> str:
    """Name of the NVTX range of a measured launch; table.py reads it."""
    return f"M={tokens} experts={experts}"


def run(pool: Pool, tokens: int, launches: int, replays: int) -> float:
    """All launches at one M; the error of the measured one against the reference.

    With `replays`, a CUDA graph of the launches is replayed after it, like steps of a decode loop.
    """
    generator = torch.Generator("cuda").manual_seed(tokens)
    logits = protocol.draw_logits(tokens, "uniform", launches, generator, pool.shape)
    options = {"generator": generator, "device": "cuda"}
    xs = [torch.randn(tokens, protocol.SHAPE.hidden, **options).bfloat16() for _ in logits]
    outs = [torch.empty_like(x) for x in xs]

    def call(i: int) -> Callable[[], object]:
        inputs = (xs[i], logits[i], *pool.copies[i % len(pool.copies)])
        return lambda: mono_moe(*inputs, protocol.TOP_K, out=outs[i], scratchpad=pool.scratchpad)

    calls = [call(i) for i in range(launches)]
    experts = len(protocol.active_experts(logits[-1], protocol.TOP_K))
    with torch.cuda.nvtx.range(WARM_UP_RANGE):
        for warm_up in calls[:-1]:
            warm_up()
        torch.cuda.synchronize()
    with torch.cuda.nvtx.range(range_name(tokens, experts)):
        calls[-1]()
        torch.cuda.synchronize()
    if replays:
        with torch.cuda.nvtx.range(WARM_UP_RANGE):
            graph = capture(calls)
        for _ in range(replays):
            with torch.cuda.nvtx.range(f"decode {range_name(tokens, experts)}"):
                graph.replay()
                torch.cuda.synchronize()
    want = moe_block_fp8(xs[-1], logits[-1], *pool.copies[0], protocol.TOP_K)
    return relative_error(outs[-1], want)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="driver.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    everything = tuple(range(1, MAX_TOKENS + 1))
    add("--tokens", type=tool.parse_tokens, default=everything, help="such as 1,8 (default 1..8)")
    add("--launches", type=tool.count, default=4, help="at each M; the last one is measured")
    add("--replays", type=tool.count, default=0, help="of a graph of them (default: no graph)")
    add("--copies", type=tool.count, default=protocol.COPIES, help="weight copies, 0.8 GB each")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all M; 1 when an output is wrong, 2 where nothing can run."""
    args = parse_args(argv)
    reason = tool.why_not_here()
    if reason:
        print(f"cannot run here: {reason}")
        return 2
    pool = make_pool(args.copies)
    errors = {m: run(pool, m, args.launches, args.replays) for m in args.tokens}
    for tokens, error in errors.items():
        print(f"M = {tokens}: error {error:.4f}, at most {protocol.MAX_ERROR}")
    return 0 if all(error <= protocol.MAX_ERROR for error in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
