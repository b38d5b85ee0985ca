"""Benchmarks: `python perf/bench.py moe [--tokens 1,2,..] [--json FILE] [--quick]`.

The exit code is 0 only if every contestant's output passed its check and the cold rows were cold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import protocol as p
import report
import torch
from floor import (
    LANES,
    EmptySpec,
    FloorSpec,
    empty_function,
    expected_sums,
    floor_function,
    samples,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cute_moe import reference
from cute_moe.host.device import device_facts, why_unsupported
from cute_moe.kernels.moe.spec import MAX_TOKENS
from cute_moe.moe import alloc_scratchpad, mono_moe
from cute_moe.timing import capture

MAX_ERROR = 1.5e-2  # relative Frobenius error against the block-FP8 reference
COPIES = 12  # weight copies: 11 launches lie between two uses of one, 277 MB at M = 1
QUICK_TOKENS, QUICK_ROUTINGS = (1, 8), ("uniform",)
POISON = -0x5A5A5A5B  # in the probe's sums; outputs are poisoned with NaN
COPY_BYTES = 1 << 30

Check = Callable[[], str]


@dataclass(frozen=True)
class Pool:
    """Weight copies in call order (w_up, s_up, w_down, s_down), and what the probe must see."""

    copies: list[tuple[torch.Tensor, ...]]
    up_samples: torch.Tensor
    down_samples: torch.Tensor
    grid: int
    scratchpad: torch.Tensor


@dataclass(frozen=True)
class Contestant:
    """Launches of one graph, and how their outputs are poisoned and checked."""

    launches: list[Callable[[], object]]
    poison: Callable[[], object]
    check: Check


@dataclass(frozen=True)
class Case:
    """Inputs of the launches of one graph; `want` are the reference outputs."""

    tokens: int
    routing: str
    xs: list[torch.Tensor]
    logits: list[torch.Tensor]
    lists: list[list[int]]
    want: list[torch.Tensor]
    copies: int

    def repeated(self) -> Case:
        """Launch 0 again and again, from one weight copy: the warm case."""
        count = len(self.xs)
        fields = (self.xs, self.logits, self.lists, self.want)
        return Case(self.tokens, self.routing, *([f[0]] * count for f in fields), copies=1)


def make_pool(copies: int, seed: int = 0) -> Pool:
    """Random weights with a spread of block scales; the copies are equal and lie apart."""
    generator = torch.Generator("cuda").manual_seed(seed)
    e, k, n = p.SHAPE.num_experts, p.SHAPE.hidden, p.SHAPE.intermediate

    def draw(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"generator": generator, "device": "cuda"}
        q, scale = reference.quantize_blocks(torch.randn(e, rows, columns, **options) * 0.02)
        return q, scale * (torch.rand(scale.shape, **options) + 0.5)

    weights = (*draw(2 * n, k), *draw(k, n))
    torch.cuda.empty_cache()
    spec = FloorSpec()
    return Pool(
        copies=[weights, *(tuple(t.clone() for t in weights) for _ in range(copies - 1))],
        up_samples=samples(weights[0], spec.up_chunks),
        down_samples=samples(weights[2], spec.down_chunks),
        grid=device_facts(torch.cuda.current_device()).sm_count,
        scratchpad=alloc_scratchpad("cuda"),
    )


def make_case(pool: Pool, tokens: int, routing: str) -> Case:
    """Inputs of LAUNCHES launches and their reference outputs."""
    generator = torch.Generator("cuda").manual_seed(1000 * tokens + p.ROUTINGS.index(routing))
    logits = p.draw_logits(tokens, routing, p.LAUNCHES, generator)
    options = {"generator": generator, "device": "cuda"}
    xs = [torch.randn(tokens, p.SHAPE.hidden, **options).bfloat16() for _ in logits]
    want = [
        reference.moe_block_fp8(x, router, *pool.copies[0], p.TOP_K)
        for x, router in zip(xs, logits, strict=True)
    ]
    lists = [p.active_experts(router) for router in logits]
    return Case(tokens, routing, xs, logits, lists, want, len(pool.copies))


def moe_contestant(pool: Pool, case: Case) -> Contestant:
    """`mono_moe` with an output of its own for every launch."""
    outs = [torch.empty_like(x) for x in case.xs]

    def launch(i: int) -> Callable[[], object]:
        args = (case.xs[i], case.logits[i], *pool.copies[i % case.copies])
        out = outs[i]
        return lambda: mono_moe(*args, top_k=p.TOP_K, out=out, scratchpad=pool.scratchpad)

    def check() -> str:
        errors = [reference.relative_error(o, w) for o, w in zip(outs, case.want, strict=True)]
        bad = [e for e in errors if not e <= MAX_ERROR]
        return f"{len(bad)} of {len(errors)} wrong, error {bad[0]:.3g}" if bad else p.OK

    def poison() -> None:
        for out in outs:
            out.fill_(torch.nan)

    return Contestant([launch(i) for i in range(len(outs))], poison, check)


def floor_contestant(pool: Pool, lists: Sequence[Sequence[int]], copies: int) -> Contestant:
    """The probe on the experts of each launch."""
    function = floor_function(FloorSpec(grid=pool.grid))
    experts = [torch.tensor(ids, dtype=torch.int32, device="cuda") for ids in lists]
    sums = torch.empty(len(lists), pool.grid * LANES, dtype=torch.int32, device="cuda")
    seen = (pool.up_samples, pool.down_samples)
    want = torch.stack([expected_sums(*seen, ids, pool.grid) for ids in lists])

    def launch(i: int) -> Callable[[], object]:
        w_up, _, w_down, _ = pool.copies[i % copies]
        args = (*(w.view(torch.uint8).view(-1) for w in (w_up, w_down)), experts[i], sums[i])
        return lambda: function(*args)

    def check() -> str:
        bad = int((sums != want).any(dim=1).sum())
        return f"{bad} of {len(lists)} launches saw other bytes" if bad else p.OK

    launches = [launch(i) for i in range(len(lists))]
    return Contestant(launches, lambda: sums.fill_(POISON), check)


def empty_contestant(grid: int) -> Contestant:
    """A kernel that does nothing: what a launch in a graph costs."""
    function = empty_function(EmptySpec(grid=grid))
    where = torch.empty(1, dtype=torch.int32, device="cuda")
    launches = [lambda: function(where)] * p.LAUNCHES
    return Contestant(launches, lambda: None, lambda: p.NOTHING_TO_CHECK)


def copy_contestant() -> Contestant:
    """One device-to-device copy of COPY_BYTES."""
    source = torch.randint(-128, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)

    def check() -> str:
        return p.OK if torch.equal(source, target) else "the copy differs"

    return Contestant([lambda: target.copy_(source)], lambda: target.zero_(), check)


def race(contestants: dict[str, Contestant], replays: int) -> dict[str, tuple[list[float], str]]:
    """µs per launch of each contestant's graph, the graphs taking turns, and its check."""
    graphs = {name: capture(c.launches) for name, c in contestants.items()}
    for contestant in contestants.values():
        contestant.poison()
    times = p.interleave({name: graph.replay for name, graph in graphs.items()}, replays)
    return {
        name: ([t / len(c.launches) for t in times[name]], c.check())
        for name, c in contestants.items()
    }


def moe_row(case: Case, contestant: str, cache: str, times: list[float], check: str) -> p.Row:
    """A row with tokens; a cold one fails when the L2 cache could have helped."""
    us, spread = p.summary(times)
    experts = p.mean_experts(case.lists)
    reuse = p.reuse_bytes(case.lists, case.copies) if cache != "warm" else 0
    least = p.COLD_FACTOR * device_facts(torch.cuda.current_device()).l2_bytes
    if cache == "cold" and check == p.OK and reuse <= least:
        check = f"not cold: {reuse / 1e6:.0f} MB between two uses"
    return p.Row(
        op="moe",
        contestant=contestant,
        tokens=case.tokens,
        case=None,
        routing=case.routing,
        cache=cache,
        us=us,
        spread_us=spread,
        bytes=round(experts * p.EXPERT_BYTES),
        experts=experts,
        reuse_bytes=reuse,
        check=check,
    )


def moe_rows(pool: Pool, tokens: int, routing: str, replays: int) -> list[p.Row]:
    """Cold rows of one M and routing; for uniform routing also warm rows and an eager one."""
    case = make_case(pool, tokens, routing)
    rows = []
    caches = [("cold", case)] + ([("warm", case.repeated())] if routing == "uniform" else [])
    for cache, inputs in caches:
        contestants = {
            "cute_moe": moe_contestant(pool, inputs),
            "floor": floor_contestant(pool, inputs.lists, inputs.copies),
        }
        for name, (times, check) in race(contestants, replays).items():
            rows.append(moe_row(inputs, name, cache, times, check))
    if routing == "uniform":
        contestant = moe_contestant(pool, case)
        contestant.poison()
        times = p.eager_microseconds(contestant.launches, replays)
        rows.append(moe_row(case, "cute_moe", "eager", times, contestant.check()))
    return rows


def context_rows(pool: Pool, replays: int) -> list[p.Row]:
    """What the figures are to be read against: empty launches, a copy, one long stream."""
    everything = [list(range(p.SHAPE.num_experts))] * len(pool.copies)
    contestants = {
        "empty": empty_contestant(pool.grid),
        "copy": copy_contestant(),
        "floor": floor_contestant(pool, everything, len(pool.copies)),
    }
    cases = {
        "empty": ("empty kernel", 0, 0),
        "copy": ("device copy, bytes read and written", 2 * COPY_BYTES, 0),
        "floor": ("all experts", p.SHAPE.num_experts * p.EXPERT_BYTES, p.SHAPE.num_experts),
    }
    rows = []
    for name, (times, check) in race(contestants, replays).items():
        us, spread = p.summary(times)
        case, nbytes, experts = cases[name]
        rows.append(
            p.Row("moe", name, None, case, "none", "cold", us, spread, nbytes, experts, 0, check)
        )
    return rows


def bench_moe(args: argparse.Namespace, console: Console) -> list[p.Row]:
    """All rows of the layer."""
    tokens = args.tokens or (QUICK_TOKENS if args.quick else tuple(range(1, MAX_TOKENS + 1)))
    routings = QUICK_ROUTINGS if args.quick else p.ROUTINGS
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("weights", total=len(tokens) * len(routings) + 1)
        pool = make_pool(args.copies)
        rows = context_rows(pool, args.replays)
        progress.advance(task)
        for routing in routings:
            for m in tokens:
                progress.update(task, description=f"M={m} {routing}")
                rows += moe_rows(pool, m, routing, args.replays)
                progress.advance(task)
    return rows


def print_rows(rows: Sequence[p.Row], console: Console) -> None:
    """The table, every row with its spread, bytes and check."""
    table = Table(
        "M", "routing", "cache", "contestant", "experts", "MB", "µs", "p10..p90", "TB/s",
        "of floor", "reuse MB", "check",
    )  # fmt: skip
    for row in rows:
        floor = report.floor_of(rows, row)
        table.add_row(
            str(row.tokens or "-"),
            row.routing if row.case is None else row.case,
            row.cache,
            row.contestant,
            f"{row.experts:.1f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.us:.2f}",
            f"{row.spread_us[0]:.2f}..{row.spread_us[1]:.2f}",
            f"{row.bytes / row.us / 1e6:.2f}",
            f"{row.us / floor.us:.3f}" if floor else "-",
            f"{row.reuse_bytes / 1e6:.0f}" if row.reuse_bytes else "-",
            row.check if row.passed else f"[bold red]{row.check}[/]",
        )
    console.print(table)


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,2,8" as numbers of tokens. Raises argparse's error for anything else."""
    try:
        tokens = tuple(int(part) for part in text.split(","))
    except ValueError:
        tokens = ()
    if not tokens or not all(1 <= m <= MAX_TOKENS for m in tokens):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to {MAX_TOKENS}, got {text!r}")
    return tokens


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="perf/bench.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("moe", "the MoE layer"), ("all", "everything")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--tokens", type=parse_tokens, help="such as 1,2,8 (default 1..8)")
        command.add_argument(
            "--json",
            type=Path,
            nargs="?",
            const=report.RESULTS / "moe.json",
            help="write the results; without FILE to perf/results/h200/moe.json",
        )
        command.add_argument("--quick", action="store_true", help="M = 1 and 8, uniform only")
        command.add_argument("--replays", type=int, default=p.REPLAYS)
        command.add_argument(
            "--copies", type=int, default=COPIES, help="weight copies, 0.8 GB each"
        )
        command.add_argument("--commit", help="recorded commit (default: git's)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 1 when a check failed, 2 where they cannot run."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    facts = device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else None
    reason = why_unsupported(facts)
    if reason:
        console.print(f"cannot measure here: {reason}")
        return 2
    rows = bench_moe(args, console)
    settings = {
        "launches": p.LAUNCHES,
        "replays": args.replays,
        "weight_copies": args.copies,
        "top_k": p.TOP_K,
        "statistic": "median and [p10, p90] of the replays, µs per launch",
    }
    if args.json:
        content = p.to_json(p.metadata(facts, settings, args.commit), rows)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(p.to_text(content), encoding="utf-8")
    print_rows(rows, console)
    cold = [row.reuse_bytes for row in rows if row.cache == "cold" and row.reuse_bytes]
    console.print(
        f"L2 {facts.l2_bytes / 1e6:.0f} MB; at least {min(cold) / 1e6:.0f} MB lie between two uses "
        "of an expert's weights in the cold rows. experts and MB are means over one graph."
    )
    failed = [row for row in rows if not row.passed]
    if failed:
        console.print(f"[bold red]{len(failed)} rows FAILED[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
