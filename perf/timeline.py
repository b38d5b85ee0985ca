"""The timeline inside the kernel as SVG: `python perf/timeline.py [--tokens 1,8] [--out DIR]`.

A trace is a table of times: one row per CTA, one column per named event, in ns of the GPU's global
timer; 0 where the event did not happen. With trace files as arguments no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import protocol
import tool
import torch
from bench_moe import Pool, floor_contestant, make_case, make_pool
from contest import take_turns
from stamps import Trace, read, record, to_json
from timeline_plot import draw

from cute_moe.kernels.moe.spec import MoeSpec
from cute_moe.reference import relative_error


def table(trace: Trace) -> str:
    """Markdown: CTAs where each event happened, and its min, median and max over them in µs."""
    lines = ["| event | CTAs | min µs | median µs | max µs |", "|---|---:|---:|---:|---:|"]
    for name in trace.names:
        times = trace.microseconds(name)
        times = times[~np.isnan(times)]
        figures = [f"{f(times):.2f}" if times.size else "" for f in (np.min, np.median, np.max)]
        lines.append(f"| {name} | {times.size} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def collect(pool: Pool, tokens: int) -> Trace:
    """Record the traced kernel at M = tokens: cold L2, uniform routing, a graph as in bench_moe.

    Of the graph's launches the one of median length is taken; the floor is that of its experts.
    Raises RuntimeError when an output of the traced kernel is wrong.
    """
    case = make_case(pool, tokens, "uniform")
    outs = [torch.empty_like(x) for x in case.xs]
    calls = [
        (case.xs[i], case.logits[i], *pool.copies[i % case.copies], out)
        for i, out in enumerate(outs)
    ]
    names, stamps = record(calls, MoeSpec(top_k=protocol.TOP_K, grid=pool.spec.grid))
    error = max(relative_error(out, want) for out, want in zip(outs, case.want, strict=True))
    if not error <= protocol.MAX_ERROR:
        raise RuntimeError(f"the traced kernel is wrong: error {error:.3g}")
    launch = median_launch(stamps.numpy())
    lists = [case.lists[launch]] * len(calls)
    probe = floor_contestant(pool, lists, case.copies)
    floor = take_turns({"floor": probe}, protocol.REPLAYS)["floor"]
    if floor.check != protocol.OK:
        raise RuntimeError(f"the floor probe is wrong: {floor.check}")
    return Trace(
        names,
        stamps[launch].numpy(),
        protocol.summary(floor.times)[0],
        f"M = {tokens}, {len(lists[0])} experts, cold L2",
    )


def median_launch(stamps: np.ndarray) -> int:
    """Index of the launch of median length; stamps: integers [launches, CTAs, events]."""
    first = np.where(stamps > 0, stamps, stamps.max()).min(axis=(1, 2))
    return int(np.argsort(stamps.max(axis=(1, 2)) - first, kind="stable")[len(stamps) // 2])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="perf/timeline.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="traces to draw (.json); needs no GPU")
    add("--tokens", type=tool.parse_tokens, default=(1, 8), help="what to record without files")
    add("--out", type=Path, default=Path("."), help="folder of the results (default: here)")
    add("--commit", help="recorded commit (default: git's)")
    return parser.parse_args(argv)


def recorded(tokens: Sequence[int], out: Path, commit: str | None) -> dict[str, Trace]:
    """New traces by name, each also as a file in `out`."""
    pool = make_pool(protocol.COPIES)
    traces = {}
    for m in tokens:
        name, trace = f"timeline_m{m}", collect(pool, m)
        trace = replace(trace, meta=protocol.metadata(tool.facts(), {"tokens": m}, commit))
        (out / f"{name}.json").write_text(to_json(trace), encoding="utf-8")
        traces[name] = trace
    return traces


def main(argv: Sequence[str] | None = None) -> int:
    """Draw files, or record and draw; 2 where nothing can be recorded."""
    args = parse_args(argv)
    reason = None if args.files else tool.why_not_here()
    if reason:
        print(f"cannot record here: {reason}")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    if args.files:
        traces = {path.stem: read(path) for path in args.files}
    else:
        traces = recorded(args.tokens, args.out, args.commit)
    for name, trace in traces.items():
        floor = "unknown" if trace.floor_us is None else f"{trace.floor_us:.2f} µs"
        print(f"{trace.title}; floor {floor}; timer ticks of {trace.tick_ns} ns\n{table(trace)}")
        try:
            (args.out / f"{name}.svg").write_text(draw(trace), encoding="utf-8")
        except ModuleNotFoundError as error:  # a machine that only measures
            print(f"{name}.svg is not drawn: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
