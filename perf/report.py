"""README tables and plots from the results: `perf/report.py` writes them, `--check` compares.

Plots of one release of matplotlib are compared byte by byte, of different ones by their texts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import plot
import stamps
import timeline_plot
from protocol import ROUTINGS, Row, base_of, from_json

from cute_moe.shapes import DEFAULT_SHAPE, SHAPES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results" / "h200"
TIMELINES = RESULTS / "timelines"  # traces that perf/timeline.py recorded
PLOTS = ROOT / "docs" / "plots"
RELEASE = re.compile(r"Matplotlib v[\d.]+")  # which drew an SVG
TEXTS = re.compile(r"<text[^>]*>([^<]*)</text>")
US_PER_S = 1e6
TARGETS_US = {
    "first call, cold JIT": 4e6,
    "first call, warm disk cache": 0.5e6,
    "call of mono_moe": 12.0,
}


def find(rows: Sequence[Row], contestant: str, key: tuple) -> Row | None:
    """The row of a contestant with that (tokens, case, routing, cache), if it was measured."""
    found = (
        r
        for r in rows
        if (r.contestant, r.tokens, r.case, r.routing, r.cache) == (contestant, *key)
    )
    return next(found, None)


def markdown(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    head = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines]) + "\n"


def contestants(rows: Sequence[Row], first: Sequence[str]) -> list[str]:
    """Contestants in the order of the rows, those of `first` before the others."""
    names = dict.fromkeys(row.contestant for row in rows)
    return [n for n in first if n in names] + [n for n in names if n not in first]


def us(row: Row | None) -> str:
    """µs with three digits that matter; empty for no row."""
    return "" if row is None else f"{row.us:.1f}" if row.us >= 10 else f"{row.us:.2f}"


def ratio(row: Row | None, other: Row | None = None) -> str:
    """A row's ratio to the floor, or by way of the floor to `other`."""
    if row is None or row.of_floor is None or (other and other.of_floor is None):
        return ""
    return f"{row.of_floor / (other.of_floor if other else 1.0):.2f}"


def moe_table(rows: Sequence[Row]) -> str:
    """One line per routing and M: µs of all contestants, ratios to the floor and to FlashInfer."""
    cold = [row for row in rows if row.tokens and row.cache == "cold"]
    peers = [n for n in contestants(cold, ()) if n not in ("floor", "cute_moe")]
    names = ["routing", "M", "experts", "MB", "floor µs", "cute_moe µs", "cute_moe / floor"]
    names += [f"{peer} µs" for peer in peers]
    names += ["flashinfer / cute_moe"] * ("flashinfer" in peers) + ["warm µs", "eager µs"]
    lines = []
    keys = {(row.routing, row.tokens) for row in cold}
    for routing, tokens in sorted(keys, key=lambda key: (ROUTINGS.index(key[0]), key[1])):
        at = {c: (tokens, None, routing, c) for c in ("cold", "warm", "eager")}
        ours, theirs = (find(rows, n, at["cold"]) for n in ("cute_moe", "flashinfer"))
        line = [routing, str(tokens), f"{ours.experts:.1f}", f"{ours.bytes / 1e6:.1f}"]
        line += [us(find(rows, "floor", at["cold"])), us(ours), ratio(ours)]
        line += [us(find(rows, peer, at["cold"])) for peer in peers]
        line += [ratio(theirs, ours)] * ("flashinfer" in peers)
        lines.append(line + [us(find(rows, "cute_moe", at[c])) for c in ("warm", "eager")])
    return markdown(names, lines)


def case_table(rows: Sequence[Row]) -> str:
    """One line per case: µs of all contestants and our ratio to the run's floor or copy."""
    names = contestants(rows, ("cute_moe",))
    lines = []
    for key in dict.fromkeys((row.tokens, row.case, row.routing, row.cache) for row in rows):
        of_case = [find(rows, name, key) for name in names]
        ours, nbytes = of_case[0], next(row.bytes for row in of_case if row)
        label = f"{key[1]}, {key[3]}" if key[3] != "cold" else key[1]
        lines.append([label, f"{nbytes / 1e6:.1f}", *map(us, of_case), ratio(ours)])
    last = f"cute_moe / {base_of(names)}"
    return markdown(["case", "MB", *(f"{n} µs" for n in names), last], lines)


def host_table(rows: Sequence[Row]) -> str:
    """One line per figure, with its target where there is one."""
    lines = []
    for row in rows:
        target = TARGETS_US.get(row.case) if row.contestant == "cute_moe" else None
        spread = " .. ".join(duration(value) for value in row.spread_us)
        line = [f"{row.contestant}: {row.case}", duration(row.us), spread]
        lines.append([*line, duration(target) if target else ""])
    return markdown(["what", "median", "p10 .. p90", "target"], lines)


def duration(us: float) -> str:
    """In s from a hundredth of a second on, else in µs, with three digits."""
    return f"{us / US_PER_S:.3g} s" if us >= US_PER_S / 100 else f"{us:.3g} µs"


def shapes_table(rows: Sequence[Row]) -> str:
    """One line per shape and M: uniform routing, cold weights, µs of all contestants."""
    cold = [row for row in rows if row.tokens and (row.cache, row.routing) == ("cold", "uniform")]
    names = contestants(cold, ("floor", "cute_moe"))
    lines = []
    for shape in dict.fromkeys(row.shape for row in cold):
        of_shape = [row for row in cold if row.shape == shape]
        for tokens in sorted({row.tokens for row in of_shape}):
            at = [find(of_shape, name, (tokens, None, "uniform", "cold")) for name in names]
            first, ours = next(row for row in at if row), at[names.index("cute_moe")]
            line = [shape, str(tokens), f"{first.experts:.1f}", f"{first.bytes / 1e6:.1f}"]
            lines.append([*line, *map(us, at), ratio(ours)])
    head = ["shape", "M", "experts", "MB", *(f"{name} µs" for name in names)]
    return markdown([*head, "cute_moe / floor"], lines)


TABLES = {"moe": moe_table, "dispatch": case_table, "argmin": case_table, "host": host_table}
STEMS = {mode: f"moe_{DEFAULT_SHAPE}" if mode == "moe" else mode for mode in TABLES}
OTHERS = "moe_shapes"  # the block of the other shapes


def place(content: Mapping[str, object]) -> str:
    """Where and when something was measured."""
    meta = content["meta"]
    clocks = str(meta["clocks"]).split(",")[0]
    where = f"{meta['gpu']}, SM clock {clocks}, driver {meta['driver']}, commit {meta['commit']}"
    return f"{where}, {meta['date']}."


def block(mode: str, content: Mapping[str, object]) -> str:
    """What stands between the marks of a mode: where and when it was measured, and the table."""
    return f"{place(content)}\n\n{TABLES[mode](from_json(content))}"


def others_block(contents: Sequence[Mapping[str, object]]) -> str:
    """The same for the shapes of the layer that have no table of their own; they may be none."""
    if not contents:
        return ""
    places = "\n".join(dict.fromkeys(map(place, contents)))
    rows = [row for content in contents for row in from_json(content)]
    return f"{places}\n\n{shapes_table(rows)}"


def replaced(readme: str, mode: str, text: str) -> str:
    """README with `text` between the marks of a mode. Raises ValueError when there are no marks."""
    marks = re.compile(f"(<!-- perf:{mode} -->\n).*?(<!-- /perf:{mode} -->)", re.DOTALL)
    result, count = marks.subn(lambda found: found[1] + text + found[2], readme)
    if count != 1:
        raise ValueError(f"README.md: expected one <!-- perf:{mode} --> block, got {count}")
    return result


def read(path: Path) -> dict[str, object]:
    """A results file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(path: Path) -> list[Row]:
    """Rows of a results file."""
    return from_json(read(path))


def outputs() -> dict[Path, str]:
    """Every file that is made from the results, with its content."""
    readme = ROOT / "README.md"
    made = {readme: readme.read_text(encoding="utf-8")}
    others = [RESULTS / f"moe_{name}.json" for name in SHAPES if name != DEFAULT_SHAPE]
    contents = {path.stem: read(path) for path in others if path.exists()}
    made[readme] = replaced(made[readme], OTHERS, others_block(list(contents.values())))
    for name, content in contents.items():
        made[PLOTS / f"{name}.svg"] = plot.draw("moe", from_json(content))
    for mode in TABLES:
        path = RESULTS / f"{STEMS[mode]}.json"
        content = read(path) if path.exists() else None
        text = block(mode, content) if content else ""
        made[readme] = replaced(made[readme], mode, text)
        if content and mode in plot.PLOTS:
            made[PLOTS / f"{STEMS[mode]}.svg"] = plot.draw(mode, from_json(content))
    for path in sorted(TIMELINES.glob("*.json")):
        made[PLOTS / f"{path.stem}.svg"] = timeline_plot.draw(stamps.read(path))
    return made


def same(text: str, other: str) -> bool:
    """Whether two files say the same: texts to the letter, plots as in the module's header."""
    releases = [RELEASE.search(content) for content in (text, other)]
    if not all(releases) or releases[0][0] == releases[1][0]:
        return text == other
    return TEXTS.findall(text) == TEXTS.findall(other)


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite README.md and the plots; with --check, 1 when one disagrees with the results."""
    parser = argparse.ArgumentParser(prog="perf/report.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    stale = 0
    for path, text in outputs().items():
        if path.exists() and same(path.read_text(encoding="utf-8"), text):
            continue
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        stale += 1
        said = "disagrees with perf/results" if check else "written"
        print(f"{path.relative_to(ROOT)}: {said}")
    return int(check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
