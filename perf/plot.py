"""Roofline-style plots as SVG, from results files alone: µs of a launch against the bytes it moves.

Written by hand, so that the same results give the same file on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from protocol import BASES, Row, base_of

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 52
MOST_OF_BASE = 4.0  # slower contestants would flatten all others: the legend names them instead
COLOURS = {
    "floor": "#333333",
    "cute_moe": "#0072b2",
    "cute_moe_bf16": "#56b4e9",
    "cute_moe_programmatic": "#0b3d91",
    "flashinfer": "#d55e00",
    "vllm_triton": "#009e73",
    "sglang_triton": "#cc79a7",
    "torch": "#b8860b",
    "torch_compile": "#6a3d9a",
    "copy": "#777777",
}
OTHER_COLOUR = "#8c564b"
Point = tuple[float, float, str]  # MB, µs, label


@dataclass(frozen=True)
class Axis:
    """A range of values on `start`..`end` pixels, linear or logarithmic, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def place(self, value: float) -> float:
        """The pixel of a value."""
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return self.start + (scale(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Values to label: 1, 2, 5 of every decade, or about six equal steps from zero."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
            inside = [value for value in values if self.low <= value <= self.high]
            return inside if len(inside) <= 9 else [v for v in inside if f"{v:e}"[0] == "1"]
        raw = (self.high - self.low) / 6
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
        return [step * i for i in range(1, int(self.high / step) + 1)]


def axis(values: Iterable[float], start: float, end: float, log: bool) -> Axis:
    """An axis with a little room around `values`; a linear one starts at zero."""
    found = list(values)
    if log:
        return Axis(min(found) / 1.4, max(found) * 1.4, start, end, log)
    return Axis(0.0, max(found) * 1.06, start, end, log)


def series_of(rows: Sequence[Row]) -> tuple[dict[str, list[Point]], list[str]]:
    """Points of each contestant by bytes, and remarks on those that are too slow to draw."""
    found: dict[str, list[Point]] = {}
    ratios: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        label = f"{row.tokens}" if row.tokens else ""
        found.setdefault(row.contestant, []).append((row.bytes / 1e6, row.us, label))
        ratios.setdefault(row.contestant, []).append(row.of_floor or 1.0)
    slow = {n: r for n, r in ratios.items() if min(r) > MOST_OF_BASE}
    base = base_of(found)
    remarks = [f"{n}: {min(r):.0f} to {max(r):.0f} x {base}" for n, r in sorted(slow.items())]
    order = [*COLOURS, *sorted(set(found) - set(COLOURS))]
    return {name: found[name] for name in order if name in found and name not in slow}, remarks


def scatter(title: str, rows: Sequence[Row], log: bool) -> str:
    """An SVG of rows; on logarithmic axes, where rows are of many kinds, only BASES are lines.

    Raises ValueError when there are no rows.
    """
    series, remarks = series_of(rows)
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{title}: expected rows to draw, got none")
    x = axis((p[0] for p in points), LEFT, WIDTH - RIGHT, log)
    y = axis((p[1] for p in points), HEIGHT - BOTTOM, TOP, log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 24, title, "start", ' font-size="15"'),
        *_grid(x, y),
    ]
    for name, line in series.items():
        placed = [(x.place(mb), y.place(us), label) for mb, us, label in line]
        parts += _polyline(name, placed) if name in BASES or not log else []
        parts += _dots(name, placed) if name not in BASES else []
    parts += _legend(list(series), remarks)
    return "\n".join([*parts, "</svg>"]) + "\n"


def colour_of(name: str) -> str:
    """The colour of a contestant."""
    return COLOURS.get(name, OTHER_COLOUR)


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in x.ticks():
        at = x.place(value)
        parts.append(f'<path d="M{at:.1f} {y.end}V{y.start}" stroke="#e4e4e4"/>')
        parts.append(_text(at, y.start + 18, f"{value:g}"))
    for value in y.ticks():
        at = y.place(value)
        parts.append(f'<path d="M{x.start} {at:.1f}H{x.end}" stroke="#e4e4e4"/>')
        parts.append(_text(x.start - 8, at + 4, f"{value:g}", "end"))
    parts.append(f'<path d="M{x.start} {y.end}V{y.start}H{x.end}" fill="none" stroke="#222222"/>')
    parts.append(_text((x.start + x.end) / 2, y.start + 40, "MB that a launch must move"))
    middle = (y.start + y.end) / 2
    turn = f' transform="rotate(-90 18 {middle:.1f})"'
    return [*parts, _text(18, middle, "µs per launch", "middle", turn)]


def _polyline(name: str, points: Sequence[Point]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    return [f'<polyline points="{path}" fill="none" {_stroke(name)}/>']


def _dots(name: str, points: Sequence[Point]) -> list[str]:
    """A dot for each point, with its label at ours."""
    fill = f'r="4" fill="{colour_of(name)}"'
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" {fill}/>' for x, y, _ in points]
    if name == "cute_moe":
        parts += [_text(x, y - 10, f"M={label}") for x, y, label in points if label]
    return parts


def _stroke(name: str) -> str:
    dash = ' stroke-dasharray="6 4"' if name in BASES else ""
    return f'stroke="{colour_of(name)}" stroke-width="2"{dash}'


def _legend(names: Sequence[str], remarks: Sequence[str]) -> list[str]:
    parts = []
    left = WIDTH - RIGHT + 16
    for i, name in enumerate(names):
        y = TOP + 12 + 20 * i
        parts.append(f'<path d="M{left} {y}H{left + 24}" {_stroke(name)}/>')
        parts.append(_text(left + 32, y + 4, name, "start"))
    for i, remark in enumerate(remarks):
        y = TOP + 28 + 20 * (len(names) + i)
        parts.append(_text(left, y, remark, "start", ' font-size="10"'))
    return parts


@dataclass(frozen=True)
class Plot:
    """One file: which rows of a mode, and how they are drawn."""

    title: str
    keep: Callable[[Row], bool]
    log: bool


def _in_graph(row: Row) -> bool:
    return row.cache != "eager" and row.bytes > 0


PLOTS: Mapping[str, Plot] = {
    "moe": Plot(
        "MoE layer, uniform routing, cold weights, M = 1..8",
        lambda row: row.cache == "cold" and row.routing == "uniform" and row.tokens is not None,
        log=False,
    ),
    "dispatch": Plot("Dispatch, sort, permute and combine", _in_graph, log=True),
    "argmin": Plot("Argmin", _in_graph, log=True),
}


def draw(mode: str, rows: Sequence[Row]) -> str:
    """The SVG of a mode in PLOTS."""
    plot = PLOTS[mode]
    return scatter(plot.title, [row for row in rows if plot.keep(row)], plot.log)
