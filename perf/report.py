"""README tables from the results: `python perf/report.py` rewrites, `--check` only compares."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol import ROUTINGS, Row, from_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results" / "h200"
BLOCK = re.compile(r"(<!-- perf:moe -->\n).*?(<!-- /perf:moe -->)", re.DOTALL)


def floor_of(rows: Sequence[Row], row: Row) -> Row | None:
    """The floor that `row` is measured against: same tokens, routing and cache (eager: cold)."""
    cache = "cold" if row.cache == "eager" else row.cache
    return find(rows, "floor", row.tokens, row.routing, cache) if row.tokens else None


def find(rows: Sequence[Row], contestant: str, tokens: int, routing: str, cache: str) -> Row | None:
    """The row of that kind, if it was measured."""
    key = (contestant, tokens, routing, cache)
    found = (r for r in rows if (r.contestant, r.tokens, r.routing, r.cache) == key)
    return next(found, None)


def moe_table(rows: Sequence[Row]) -> str:
    """Markdown: one line per routing and M, µs of all contestants, ours as a ratio to the floor."""
    cold = [row for row in rows if row.tokens and row.cache == "cold"]
    peers = [n for n in dict.fromkeys(r.contestant for r in cold) if n not in ("floor", "cute_moe")]
    names = ["routing", "M", "experts", "MB", "floor µs", "cute_moe µs", "cute_moe / floor"]
    names += [f"{peer} µs" for peer in peers] + ["warm µs", "eager µs"]
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    keys = {(row.routing, row.tokens) for row in cold}
    for routing, tokens in sorted(keys, key=lambda key: (ROUTINGS.index(key[0]), key[1])):

        def cell(name: str, cache: str = "cold", at=(tokens, routing)) -> str:
            row = find(rows, name, *at, cache)
            return f"{row.us:.1f}" if row else ""

        ours = find(rows, "cute_moe", tokens, routing, "cold")
        floor = find(rows, "floor", tokens, routing, "cold")
        values = [routing, str(tokens), f"{ours.experts:.1f}", f"{ours.bytes / 1e6:.1f}"]
        values += [cell("floor"), cell("cute_moe"), f"{ours.us / floor.us:.2f}"]
        values += [cell(peer) for peer in peers]
        values += [cell("cute_moe", "warm"), cell("cute_moe", "eager")]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def replaced(readme: str, table: str) -> str:
    """README with the table between its marks. Raises ValueError when there are no marks."""
    text, count = BLOCK.subn(lambda found: found[1] + table + found[2], readme)
    if count != 1:
        raise ValueError("README.md: expected one <!-- perf:moe --> ... <!-- /perf:moe --> block")
    return text


def read_rows(path: Path = RESULTS / "moe.json") -> list[Row]:
    """Rows of a results file."""
    return from_json(json.loads(path.read_text(encoding="utf-8")))


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite README.md; with --check, 1 when it disagrees with the results."""
    parser = argparse.ArgumentParser(prog="perf/report.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = replaced(before, moe_table(read_rows()))
    if check:
        if before != after:
            print("README.md disagrees with perf/results; run python perf/report.py")
        return int(before != after)
    path.write_text(after, encoding="utf-8")
    print(moe_table(read_rows()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
