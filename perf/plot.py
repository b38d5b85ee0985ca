"""Plots of the benchmarks as SVG, from results files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contest import OURS
from figures import INK, svg
from protocol import Row, base_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_OF_BASE = 4.0  # slower contestants would flatten all curves: a remark names them instead
WIDTH = 8.6  # inches
# Colours that people with any kind of colour vision tell apart (Okabe and Ito), and shapes.
STYLES = {
    "cute_moe": ("#0072b2", "o"),
    "cute_moe_bf16": ("#56b4e9", "s"),
    "cute_moe_programmatic": ("#009e73", "D"),
    "flashinfer": ("#d55e00", "^"),
    "vllm_triton": ("#e69f00", "v"),
    "sglang_triton": ("#cc79a7", "P"),
    "torch": ("#d55e00", "X"),
    "torch_compile": ("#e69f00", "P"),
    "torch_select": ("#cc79a7", "v"),
    "torch_amin": ("#cc79a7", "^"),
}
Side = tuple[tuple[int, int], str, str]  # offset in points, horizontal and vertical alignment
ABOVE: Side = ((0, 8), "center", "bottom")
LEFT: Side = ((-8, 0), "right", "center")
RIGHT: Side = ((8, 0), "left", "center")
OTHER_STYLE = ("#777777", "*")
BASE_LINE = {"color": INK, "linestyle": (0, (5, 2)), "linewidth": 1.4}


def style(name: str) -> dict[str, object]:
    """Colour and marker of a contestant."""
    colour, marker = STYLES.get(name, OTHER_STYLE)
    return {"color": colour, "marker": marker, "markersize": 5.5 + (name == OURS)}


def digits(value: float) -> str:
    """A positive number with at least three digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def by_contestant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each contestant, those with a style first and in that order."""
    names = [*STYLES, *sorted({row.contestant for row in rows} - set(STYLES))]
    found = {name: [row for row in rows if row.contestant == name] for name in names}
    return {name: members for name, members in found.items() if members}


def remarks(series: Mapping[str, Sequence[Row]], base: str) -> list[str]:
    """What is said of the contestants that are too slow to draw."""
    ratios = {n: [row.of_floor or 1.0 for row in members] for n, members in series.items()}
    return [
        f"{name}: {min(found):.0f} to {max(found):.0f} × {base}, not drawn"
        for name, found in ratios.items()
        if min(found) > MOST_OF_BASE
    ]


def note(axes: Axes, where: tuple[float, float], text: str, side: Side) -> None:
    """A figure beside a point of ours."""
    back = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85}
    offset, ha, va = side
    axes.annotate(text, where, offset, textcoords="offset points", ha=ha, va=va, fontsize=7.5,
                  color=STYLES[OURS][0], bbox=back, zorder=5)  # fmt: skip


def paint_curves(figure: Figure, title: str, rows: Sequence[Row]) -> None:
    """Time and ratio to the base against M, each contestant a line."""
    series = by_contestant(rows)
    base = base_of(series)
    said = remarks(series, base)
    slow = {remark.partition(":")[0] for remark in said}
    left, right = figure.subplots(1, 2)
    for name, members in series.items():
        members = sorted(members, key=lambda row: row.tokens)
        tokens = [row.tokens for row in members]
        times = [row.us for row in members]
        ratios = [row.of_floor or math.nan for row in members]
        if name == base:
            left.plot(tokens, times, label=name, zorder=3, **BASE_LINE)
        elif name not in slow:
            left.plot(tokens, times, label=name, **style(name))
            right.plot(tokens, ratios, **style(name))
        if name == OURS:
            for i, side in ((0, LEFT), (-1, RIGHT)):
                note(left, (tokens[i], times[i]), digits(times[i]), side)
                note(right, (tokens[i], ratios[i]), f"{ratios[i]:.2f}", side)
    right.axhline(1.0, **BASE_LINE)
    left.set(title="µs per launch", ylim=(0, None))
    right.set(title=f"ratio to the {base}")
    sizes = {row.tokens: row.bytes / 1e6 for row in rows}
    for axes in (left, right):
        axes.set_xticks(sorted(sizes), [f"{m}\n{sizes[m]:.0f}" for m in sorted(sizes)])
        axes.set_xlim(min(sizes) - 1.0, max(sizes) + 1.0)
        axes.set_xlabel("M (tokens), and MB of weights that a launch must read")
        axes.grid(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)
    labels = figure.legend(loc="outside lower left", ncols=5)
    if said:
        labels.set_title("; ".join(said), prop={"size": 8.5})
        labels.set_alignment("left")


def paint_dots(figure: Figure, title: str, rows: Sequence[Row]) -> None:
    """The ratio to the base of every contestant, a line for each case, ours with its time."""
    series = by_contestant(rows)
    base = base_of(series)
    cases = {row.case: row for row in rows if row.contestant == base}
    places = {case: -i for i, case in enumerate(cases)}
    axes: Axes = figure.subplots()
    axes.axvline(1.0, label=base, **BASE_LINE)
    for name, members in series.items():
        found = [row for row in members if row.of_floor and row.case in places]
        if found:
            ratios, at = [row.of_floor for row in found], [places[row.case] for row in found]
            on_top = 4 if name == OURS else 3
            axes.plot(ratios, at, label=name, linestyle="none", zorder=on_top, **style(name))
        for row in found if name == OURS else ():
            where = (row.of_floor, places[row.case])
            note(axes, where, f"{digits(row.us)} µs", ABOVE)
    names = [f"{case}\n{digits(row.bytes / 1e6)} MB, {row.cache}, {base} {digits(row.us)} µs"
             for case, row in cases.items()]  # fmt: skip
    axes.set_yticks(list(places.values()), names, fontsize=8)
    axes.set_ylim(-len(cases) + 0.4, 0.7)
    axes.set_xscale("log")
    low, high = axis_range([row.of_floor for row in rows if row.of_floor])
    axes.set_xlim(low, high)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick < high]
    axes.set_xticks(ticks, [f"{tick}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"time / time of the {base} (logarithmic)")
    axes.grid(True)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5)
    figure.legend(loc="outside lower left", ncols=6)


def axis_range(ratios: Sequence[float]) -> tuple[float, float]:
    """From below the least ratio, or 1, to above the largest one."""
    return 0.85 * min([1.0, *ratios]), 1.2 * max([1.0, *ratios])


@dataclass(frozen=True)
class Plot:
    """One file: which rows of a mode, who paints them, inches of height and for each case."""

    title: str
    keep: Callable[[Row], bool]
    paint: Callable[[Figure, str, Sequence[Row]], None]
    height: float
    height_of_case: float = 0.0


def _in_graph(row: Row) -> bool:
    return row.cache != "eager" and row.bytes > 0


PLOTS: Mapping[str, Plot] = {
    "moe": Plot(
        "MoE layer, one launch: uniform routing, cold weights",
        lambda row: row.cache == "cold" and row.routing == "uniform" and row.tokens is not None,
        paint_curves,
        height=4.2,
    ),
    "dispatch": Plot("Dispatch, sort, permute and combine", _in_graph, paint_dots, 1.4, 0.42),
    "argmin": Plot("Argmin and argmax", _in_graph, paint_dots, 1.4, 0.42),
}


def draw(mode: str, rows: Sequence[Row]) -> str:
    """The SVG of a mode in PLOTS. Raises ValueError when it has no rows to draw."""
    plot = PLOTS[mode]
    shape = next((row.shape for row in rows if row.shape), None)
    title = f"{plot.title}, {shape}" if shape else plot.title
    kept = [row for row in rows if plot.keep(row)]
    if not kept:
        raise ValueError(f"{plot.title}: expected rows to draw, got none")
    height = plot.height + plot.height_of_case * len({row.case for row in kept})
    return svg(WIDTH, height, lambda figure: plot.paint(figure, title, kept))
