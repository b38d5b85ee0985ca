"""Runs before and after a change: `python perf/compare.py BEFORE.. AFTER.. [--limit 0.01]`.

The first half of the paths is before, the second half after; each is a results file or a folder of
them, from one start of one machine. What is compared is the ratio to the base of the run (floor or
copy) or, for rows that have none, the time. A row of ours is worse when its mean over the runs rose
by more than the limit and by more than the runs of either side lie apart.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from contest import OURS
from protocol import Row
from report import read_rows
from rich.console import Console
from rich.table import Table

from cute_moe.shapes import DEFAULT_SHAPE

Key = tuple[object, ...]
Run = Mapping[Key, Row]  # one run, by what makes a row the same as one of another run


def key(row: Row) -> Key:
    """What makes a row of one run the same as a row of another."""
    return row.op, row.shape, row.contestant, row.tokens, row.case, row.routing, row.cache


def read_run(path: Path) -> Run:
    """All rows of a results file, or of the results files in a folder.

    Raises FileNotFoundError for a path that is not there or a folder without results, ValueError
    for a row whose check failed: its time says nothing.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path}: expected results files, got none")
    rows = {key(row): row for file in files for row in read_rows(file)}
    for row in rows.values():
        if not row.passed:
            raise ValueError(f"{path}: {row.contestant}, {place_of(row)}: {row.check}")
    return rows


def place_of(row: Row) -> str:
    """Which row of its contestant this is."""
    case = row.case or f"M={row.tokens}"
    if row.shape and row.shape != DEFAULT_SHAPE:
        case = f"{row.shape} {case}"
    return case if row.routing == "none" else f"{case} {row.routing}"


@dataclass(frozen=True)
class Change:
    """One row in all runs: its ratios to the base or, where one has none, its times in µs."""

    row: Row
    unit: str  # "" for ratios
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def relative(self) -> float:
        """Relative change of the mean."""
        return mean(self.after) / mean(self.before) - 1.0

    @property
    def spread(self) -> float:
        """How far apart the runs of one side lie at most, relative to the lower one."""
        return max(max(values) / min(values) - 1.0 for values in (self.before, self.after))

    def worse(self, limits: Mapping[str, float]) -> bool:
        """Whether a row of ours rose by more than the limit of its unit and than the spread."""
        ours = self.row.contestant.startswith(OURS)
        return ours and self.relative > max(limits[self.unit], self.spread)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def changes(before: Sequence[Run], after: Sequence[Run]) -> list[Change]:
    """Every row that all runs have, the largest rise first."""
    found = []
    for place, row in before[0].items():
        runs = [run.get(place) for run in (*before, *after)]
        if all(runs):
            ratios = [run.of_floor for run in runs]
            unit, values = ("", ratios) if all(ratios) else (" µs", [run.us for run in runs])
            half = len(before)
            found.append(Change(row, unit, tuple(values[:half]), tuple(values[half:])))
    return sorted(found, key=lambda change: -change.relative)


def alone(rows: Run, others: Run) -> str:
    """How many rows have no partner in the other run, by contestant: "2 (cute_moe 1, floor 1)"."""
    counts = Counter(row.contestant for place, row in rows.items() if place not in others)
    names = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{counts.total()} ({names})" if names else "0"


def table(title: str, found: Sequence[Change]) -> Table:
    """A line for each change."""
    columns = ("mode", "contestant", "cache", "row", "change", "spread", "before", "after")
    made = Table(*columns, title=title, title_justify="left")
    for change in found:
        values = ["  ".join(f"{v:.4g}" for v in side) for side in (change.before, change.after)]
        values = [f"{value}{change.unit}" for value in values]
        row = change.row
        figures = (f"{change.relative:+.2%}", f"{change.spread:.2%}")
        made.add_row(row.op, row.contestant, row.cache, place_of(row), *figures, *values)
    return made


def largest_rises(found: Sequence[Change]) -> list[Change]:
    """The first change of each mode, contestant, cache and unit."""
    first: dict[Key, Change] = {}
    for change in found:
        row = change.row
        first.setdefault((row.op, row.contestant, row.cache, change.unit), change)
    return [change for _, change in sorted(first.items())]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 when a row of ours is worse, 2 when nothing can be compared."""
    parser = argparse.ArgumentParser(prog="perf/compare.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("paths", type=Path, nargs="+", help="as many runs before as after, such as A1 A2 B1 B2")
    add("--limit", type=float, default=0.01, help="rise of a ratio (default 0.01)")
    add("--time-limit", type=float, default=0.05, help="rise of a time (default 0.05)")
    args = parser.parse_args(argv)
    if len(args.paths) % 2:
        parser.error(f"expected as many runs before as after, got {len(args.paths)} paths")
    try:
        runs = [read_run(path) for path in args.paths]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    half = len(runs) // 2
    before, after = runs[:half], runs[half:]
    print(f"rows only in {args.paths[0]}: {alone(before[0], after[0])}")
    print(f"rows only in {args.paths[half]}: {alone(after[0], before[0])}")
    found = changes(before, after)
    if not any(change.row.contestant.startswith(OURS) for change in found):
        print("no rows of ours in common")
        return 2
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table("largest rise of each kind of ratio or time", largest_rises(found)))
    worse = [change for change in found if change.worse({"": args.limit, " µs": args.time_limit})]
    if worse:
        console.print(table(f"{len(worse)} WORSE than before", worse))
    else:
        ratios = sum(not change.unit for change in found)
        print(f"none of ours worse, of {ratios} ratios and {len(found) - ratios} times")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
