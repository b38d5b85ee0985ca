"""Benchmarks: `python perf/bench.py moe|dispatch|argmin|host|all [--quick] [--json]`.

`moe --shape NAME|all`: other shapes of the layer, each with a results file of its own. The exit
code is 0 only if every contestant's output passed its check, every cold row was cold and no row is
faster than the memory.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import contest
import peers
import plot
import protocol as p
import report
import tool
from contest import Options
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_moe.shapes import DEFAULT_SHAPE, SHAPES

MODES = {
    "moe": "the MoE layer",
    "dispatch": "expert-major dispatch",
    "argmin": "argmin over a middle dimension",
    "host": "first call, warm start, launch overhead",
}
PEERS = ("flashinfer", "vllm_triton", "sglang_triton", "torch", "torch_compile", "copy")


def measure(mode: str, options: Options, console: Console) -> list[p.Row]:
    """All rows of one mode, guarded against what no memory can do."""
    limits = p.limits_of(tool.facts())
    text = TextColumn("{task.description}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(mode, total=None, completed=-1)

        def advance(description: str, steps: int) -> None:
            progress.update(task, description=f"{mode}: {description}", total=steps, advance=1)

        rows = importlib.import_module(f"bench_{mode}").measure(options, advance)
        progress.update(task, description=mode, advance=1)
    return [p.guarded(row, limits) for row in rows]


def print_rows(rows: Sequence[p.Row], console: Console) -> None:
    """The table, every row with its spread, bytes, ratio to the run's base and check."""
    base = p.base_of({row.contestant for row in rows})
    shape = next((row.shape for row in rows if row.shape), None)
    table = Table(
        "M or case", "routing", "cache", "contestant", "experts", "MB", "µs", "p10..p90", "TB/s",
        f"of {base}", "reuse MB", "check", title=shape, title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.case or f"{row.tokens}",
            row.routing,
            row.cache,
            row.contestant,
            f"{row.experts:.1f}" if row.experts else "-",
            f"{row.bytes / 1e6:.1f}" if row.bytes else "-",
            f"{row.us:.2f}",
            f"{row.spread_us[0]:.2f}..{row.spread_us[1]:.2f}",
            f"{row.bytes / row.us / 1e6:.2f}" if row.bytes and row.us else "-",
            f"{row.of_floor:.3f}" if row.of_floor else "-",
            f"{row.reuse_bytes / 1e6:.0f}" if row.reuse_bytes else "-",
            row.check if row.passed else f"[bold red]{row.check}[/]",
        )
    console.print(table)
    cold = [row.reuse_bytes for row in rows if row.cache == "cold" and row.reuse_bytes]
    if cold:
        l2 = tool.facts().l2_bytes
        console.print(
            f"L2 {l2 / 1e6:.0f} MB; at least {min(cold) / 1e6:.0f} MB lie between two uses of the "
            "same data in the cold rows. experts and MB are means over one graph."
        )


def parse_peers(text: str) -> tuple[str, ...] | None:
    """auto is None, none is (), else names. Raises argparse's error for an unknown name."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    names = tuple(text.split(","))
    if not set(names) <= set(PEERS):
        raise argparse.ArgumentTypeError(f"expected auto, none or {', '.join(PEERS)}; got {text!r}")
    return names


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="perf/bench.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("mode", choices=(*MODES, "all"), help="; ".join(f"{k}: {v}" for k, v in MODES.items()))
    add("--tokens", type=tool.parse_tokens, help="such as 1,2,8 (default 1..8)")
    add("--shape", choices=(*SHAPES, "all"), default=DEFAULT_SHAPE, help="of the MoE layer")
    add("--peers", type=parse_peers, default=None, help="auto, none or names, such as flashinfer")
    add("--json", type=Path, nargs="?", const=report.RESULTS, help="write the results: a folder, "
        "by default perf/results/h200, or for one mode a file")  # fmt: skip
    add("--plot", type=Path, metavar="DIR", help="draw plots of these results into a folder")
    add("--quick", action="store_true", help="few cases")
    add("--replays", type=tool.count, default=p.REPLAYS)
    add("--copies", type=tool.count, default=p.COPIES, help="weight copies, 0.7 to 2.2 GB each")
    add("--commit", help="recorded commit (default: git's)")
    args = parser.parse_args(argv)
    args.modes = tuple(MODES) if args.mode == "all" else (args.mode,)
    args.shapes = tuple(SHAPES) if args.shape == "all" else (args.shape,)
    if args.shape != DEFAULT_SHAPE and "moe" not in args.modes:
        parser.error(f"--shape: {args.mode} has no shapes of a layer")
    if args.json is report.RESULTS and (args.quick or args.tokens):
        parser.error(f"--json: a run of few cases must not overwrite {report.RESULTS}; name a path")
    if args.json and args.json.suffix == ".json" and "all" in (args.mode, args.shape):
        parser.error("--json: expected a folder for the results of several runs, got a file")
    return args


def stem(mode: str, options: Options) -> str:
    """Name of the files of a run, without their suffix."""
    return f"{mode}_{options.shape_name}" if mode == "moe" else mode


def write_json(
    mode: str, args: argparse.Namespace, options: Options, rows: Sequence[p.Row]
) -> None:
    """The results file of one run."""
    path = args.json if args.json.suffix == ".json" else args.json / f"{stem(mode, options)}.json"
    facts = tool.facts()
    settings = {
        "text": " ".join((importlib.import_module(f"bench_{mode}").__doc__ or "").split()),
        "tokens": args.tokens,
        "peers": "auto" if args.peers is None else args.peers,
        "skipped": dict(contest.SKIPPED),
        "replays": args.replays,
        "quick": args.quick,
        "copies": args.copies,
        "statistic": "median and [p10, p90] of the replays, µs per launch",
        "limits_bytes_per_us": vars(p.limits_of(facts)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = p.metadata(facts, settings, args.commit)
    meta["versions"] |= peers.versions()
    content = p.to_json(meta, rows)
    path.write_text(p.to_text(content), encoding="utf-8")


def run_mode(mode: str, args: argparse.Namespace, options: Options, console: Console) -> int:
    """Measures, writes and prints one run; returns the number of rows that failed."""
    contest.SKIPPED.clear()
    rows = measure(mode, options, console)
    if args.json:
        write_json(mode, args, options, rows)
    print_rows(rows, console)
    if args.plot and mode in plot.PLOTS:
        args.plot.mkdir(parents=True, exist_ok=True)
        drawn = plot.draw(mode, rows)
        (args.plot / f"{stem(mode, options)}.svg").write_text(drawn, encoding="utf-8")
    return sum(not row.passed for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 when a check failed, 2 where they cannot run."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    reason = tool.why_not_here()
    if reason:
        console.print(f"cannot measure here: {reason}")
        return 2
    common = Options(args.tokens, args.quick, args.replays, args.copies, args.peers)
    failed = 0
    runs = [(mode, name) for mode in args.modes
            for name in (args.shapes if mode == "moe" else (DEFAULT_SHAPE,))]  # fmt: skip
    for mode, name in runs:
        options = replace(common, shape_name=name)
        try:
            failed += run_mode(mode, args, options, console)
        except Exception:  # The results of the other runs are worth keeping.
            console.print_exception()
            failed += 1
    if failed:
        console.print(f"[bold red]{failed} FAILED[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
