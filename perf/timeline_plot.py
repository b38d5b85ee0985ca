"""Drawing of a kernel's timeline as SVG: one panel per role, one row per CTA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from figures import INK, svg
from stamps import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 9.2, 10.4  # inches
ROW_INCHES = 1.5 / 132  # thickness of one of 132 lines: no white between them
LEGEND_COLUMNS = 4
FLOOR_COLOUR = "#c1121f"


@dataclass(frozen=True)
class Phase:
    """What a role does until `event`, from the latest of the events before it in its panel on."""

    event: str
    label: str = ""
    colour: str = "none"


@dataclass(frozen=True)
class Panel:
    """One role: its phases in order; the first one only says when the role starts."""

    title: str
    phases: tuple[Phase, ...]


# Waits are grey, those for h sand; work has colours that people with any colour vision tell apart.
WAIT, NEXT_WAIT, WAIT_FOR_H = "#e4e7eb", "#c5ccd5", "#f6e3bd"
UP, DOWN, QUANTISE = "#0072b2", "#cc79a7", "#e69f00"
PANELS = (
    Panel(
        "producer warp: the weight stream",
        (
            Phase("start"),
            Phase("first_copy", "routes its first unit", "#7f8896"),
            Phase("up_issued", "issues up weights", UP),
            Phase("down_issued", "issues down weights", DOWN),
            Phase("landed", "waits for the last", WAIT),
        ),
    ),
    Panel(
        "list warp",
        (
            Phase("start"),
            Phase("lists", "waits for the routing, makes the lists", "#009e73"),
            Phase("scales", "loads weight scales", "#8ed3be"),
        ),
    ),
    Panel(
        "loader warp 0",
        (
            Phase("lists"),
            Phase("up_issued", "waits for the gate", WAIT),
            Phase("h_first", "waits for h", WAIT_FOR_H),
            Phase("h_ready", "h to FP8", QUANTISE),
        ),
    ),
    Panel(
        "consumers 0",
        (
            Phase("start"),
            Phase("x_ready", "x to FP8", QUANTISE),
            Phase("lists", "waits for lists", WAIT),
            Phase("first_tile", "waits for a tile", NEXT_WAIT),
            Phase("up_done_0", "up", UP),
            Phase("down_start", "waits for tiles or h", WAIT),
            Phase("h_go", "waits for h", WAIT_FOR_H),
            Phase("first_product", "first product", "#7d3c68"),
            Phase("down_done_0", "down", DOWN),
            Phase("down_done_1", "waits for consumers 1", NEXT_WAIT),
            Phase("end", "sum, store", INK),
        ),
    ),
    Panel(
        "consumers 1",
        (
            Phase("x_ready"),
            Phase("lists", "waits for lists", WAIT),
            Phase("up_done_1", "up", UP),
            Phase("down_done_1", "down, waits for h included", DOWN),
        ),
    ),
)


def phase_times(trace: Trace, panel: Panel) -> list[tuple[Phase, np.ndarray, np.ndarray]]:
    """Begin and end in µs on every CTA of each phase but the first; nan where there is none."""
    times = [trace.microseconds(phase.event) for phase in panel.phases]
    begins = np.fmax.accumulate(times, axis=0)  # the latest so far; nan counts as absent
    return list(zip(panel.phases[1:], begins[:-1], times[1:], strict=True))


def rows_path(begins: np.ndarray, ends: np.ndarray) -> list[list[tuple[float, int]]]:
    """A line [(begin, CTA), (end, CTA)] for every CTA on which the phase took time."""
    lines = enumerate(zip(begins.tolist(), ends.tolist(), strict=True))
    return [[(a, cta), (b, cta)] for cta, (a, b) in lines if a < b]  # False for nan


def label_of(phase: Phase, ends: np.ndarray) -> str:
    """The legend's text of a phase that happened, with the median of its end."""
    return f"{phase.label} → {np.nanmedian(ends):.1f}"


def paint_panel(axes: Axes, trace: Trace, panel: Panel) -> None:
    """The rows of a role, the medians of its events, and a legend above."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    keys = []
    thickness = 72 * ROW_INCHES * 132 / max(len(trace.array), 12)
    for phase, begins, ends in phase_times(trace, panel):
        lines = rows_path(begins, ends)
        if not lines:
            continue
        codes = [Path.MOVETO, Path.LINETO] * len(lines)
        path = Path([point for line in lines for point in line], codes)
        look = {"edgecolor": phase.colour, "linewidth": thickness, "capstyle": "butt"}
        axes.add_patch(PathPatch(path, facecolor="none", snap=False, **look))
        axes.axvline(np.nanmedian(ends), color=INK, linewidth=0.6, linestyle=(0, (3, 2)))
        keys.append(Patch(facecolor=phase.colour, label=label_of(phase, ends)))
    axes.set_ylim(len(trace.array) - 0.5, -0.5)
    axes.set_yticks([0, len(trace.array) - 1])
    axes.set_ylabel("CTA", labelpad=-8)
    lines_above = -(-len(keys) // LEGEND_COLUMNS)
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(-0.005, 0.98), borderpad=0,
                ncols=LEGEND_COLUMNS, columnspacing=1.4, handlelength=1.0, handleheight=0.8,
                borderaxespad=0.3)  # fmt: skip
    axes.set_title(panel.title, pad=4 + 14 * lines_above)


def paint(figure: Figure, trace: Trace) -> None:
    """All panels over one axis of time, and the floor as a line through them."""
    end = max(trace.last, trace.floor_us or 0.0, 1e-3)
    every = figure.subplots(len(PANELS), 1, sharex=True)
    for axes, panel in zip(every, PANELS, strict=True):
        paint_panel(axes, trace, panel)
        axes.set_xlim(0, 1.01 * end)
        if trace.floor_us is not None:
            axes.axvline(trace.floor_us, color=FLOOR_COLOUR, linewidth=1.6)
    every[-1].set_xlabel(
        "µs since the first CTA started. One row per CTA; → and dashed lines: median end of a phase"
    )
    floor = (
        "" if trace.floor_us is None else f"; red line: the memory floor, {trace.floor_us:.1f} µs"
    )
    figure.suptitle(trace.title + floor, x=0.01, ha="left", fontsize=11.5)


def draw(trace: Trace) -> str:
    """SVG: one panel per role, one row per CTA, coloured by phase; the floor, if known."""
    return svg(WIDTH, HEIGHT, lambda figure: paint(figure, trace))
