"""Two runs side by side: `python perf/compare.py A.json B.json [--limit 0.03]`.

Prints the largest change of every contestant's ratio to the base of its run (floor or copy), and
which rows only one of the runs has; 1 when a change exceeds the limit.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from protocol import Row, base_of
from report import read_rows
from rich.console import Console
from rich.table import Table


def key(row: Row) -> tuple[object, ...]:
    """What makes a row of one run the same as a row of another."""
    return row.op, row.contestant, row.tokens, row.case, row.routing, row.cache


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[float, Row, Row]]:
    """(relative change of the ratio to the base, row before, row after), the largest first."""
    others = {key(row): row for row in after if row.of_floor}
    found = []
    for row in before:
        other = others.get(key(row))
        if row.of_floor and other:
            found.append((other.of_floor / row.of_floor - 1.0, row, other))
    return sorted(found, key=lambda change: -abs(change[0]))


def alone(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """How many rows have no partner in the other run, by contestant: "2 (cute_moe 1, floor 1)"."""
    partners = {key(row) for row in others}
    counts = Counter(row.contestant for row in rows if key(row) not in partners)
    names = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{counts.total()} ({names})" if names else "0"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 when a ratio changed by more than the limit, 2 when nothing can be compared."""
    parser = argparse.ArgumentParser(prog="perf/compare.py", description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, default=0.03, help="relative change of a ratio")
    args = parser.parse_args(argv)
    old, new = read_rows(args.before), read_rows(args.after)
    print(f"rows only in {args.before}: {alone(old, new)}")
    print(f"rows only in {args.after}: {alone(new, old)}")
    found = changes(old, new)
    if not found:
        print("no rows in common that have a ratio to floor or copy")
        return 2
    base = base_of({row.contestant for row in new})
    columns = ("contestant", "cache", "rows", "largest change", "at", "before", "after")
    table = Table(*columns, title=f"ratio to {base}")
    groups: dict[tuple[str, str], list[tuple[float, Row, Row]]] = {}
    for change in found:
        groups.setdefault((change[1].contestant, change[1].cache), []).append(change)
    for (contestant, cache), members in sorted(groups.items()):
        change, before, after = members[0]
        at = f"{before.case or f'M={before.tokens}'} {before.routing}"
        ratios = (f"{before.of_floor:.3f}", f"{after.of_floor:.3f}")
        table.add_row(contestant, cache, str(len(members)), f"{change:+.2%}", at, *ratios)
    Console().print(table)
    return int(abs(found[0][0]) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
