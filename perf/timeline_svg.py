"""Drawing of a kernel's timeline as SVG, for light pages: one panel per role, one row per CTA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, LEFT, RIGHT = 1000, 24, 110  # the labels of late events need room on the right
PANEL_HEIGHT, MIN_ROW, MAX_ROW = 160.0, 0.5, 12.0
LABEL_HEIGHT, LETTER_WIDTH = 13, 5.8
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
TICK_STEPS = 14  # at most so many steps on the time axis
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


WAIT, WAIT_FOR_H = "#e2e8f0", "#fecaca"
PANELS = (
    Panel(
        "producer warp: the weight stream",
        (
            Phase("start"),
            Phase("first_copy", "routes its first unit", "#94a3b8"),
            Phase("up_issued", "issues up weights", "#2563eb"),
            Phase("down_issued", "issues down weights", "#38bdf8"),
            Phase("landed", "waits for the last", "#bae6fd"),
        ),
    ),
    Panel(
        "list warp",
        (
            Phase("start"),
            Phase("routed", "waits for the routing", WAIT),
            Phase("lists", "lists", "#0d9488"),
            Phase("scales", "weight scales", "#99e0d6"),
        ),
    ),
    Panel(
        "loader warp 0",
        (
            Phase("lists"),
            Phase("up_issued", "waits for the gate", WAIT),
            Phase("h_first", "waits for h", WAIT_FOR_H),
            Phase("h_ready", "h to FP8", "#f59e0b"),
        ),
    ),
    Panel(
        "consumers 0",
        (
            Phase("start"),
            Phase("x_ready", "x to FP8", "#a8a29e"),
            Phase("scales", "waits for lists", "#d6d3d1"),
            Phase("first_tile", "for a tile", WAIT),
            Phase("up_done_0", "up", "#15803d"),
            Phase("down_start", "waits for tiles or h", WAIT),
            Phase("h_go", "for h", WAIT_FOR_H),
            Phase("first_product", "first product", "#c084fc"),
            Phase("down_done_0", "down", "#7e22ce"),
            Phase("down_done_1", "waits for consumers 1", WAIT),
            Phase("end", "sum, store", "#111827"),
        ),
    ),
    Panel(
        "consumers 1",
        (
            Phase("x_ready"),
            Phase("scales", "waits for lists", "#d6d3d1"),
            Phase("up_done_1", "up", "#15803d"),
            Phase("down_done_1", "down, h included", "#7e22ce"),
        ),
    ),
)


@dataclass(frozen=True)
class Trace:
    """Names of the events and their times, integers [CTAs, events] in ns, 0 = did not happen.

    `floor_us` is the time of the memory floor for the same launch, if known. Raises ValueError
    unless names and array fit together and at least one event happened.
    """

    names: tuple[str, ...]
    array: np.ndarray
    floor_us: float | None = None
    title: str = "timeline"

    def __post_init__(self) -> None:
        shape, kind = self.array.shape, self.array.dtype
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"names: expected different names, got {list(self.names)}")
        if kind.kind not in "iu" or len(shape) != 2 or shape[1] != len(self.names):
            raise ValueError(
                f"array: expected integers [CTAs, {len(self.names)}], got {kind} {list(shape)}"
            )
        if not (self.array > 0).any() or (self.array < 0).any():
            raise ValueError("array: expected times in ns, 0 where none, got no or negative times")

    def microseconds(self, name: str) -> np.ndarray:
        """Times of one event on all CTAs since the earliest time of the trace; nan where none."""
        if name not in self.names:
            return np.full(len(self.array), np.nan)
        ns = self.array[:, self.names.index(name)]
        since = (ns - self.array[self.array > 0].min()) / 1e3
        return np.where(ns > 0, since, np.nan)

    @property
    def last(self) -> float:
        """The latest time of all, in µs."""
        return float(self.array.max() - self.array[self.array > 0].min()) / 1e3

    @property
    def tick_ns(self) -> int:
        """Greatest common divisor of all differences: how finely the timer ticks at best."""
        times = self.array[self.array > 0]
        return int(np.gcd.reduce(times - times.min()))


@dataclass(frozen=True)
class Scale:
    """Where a time lies on the page."""

    pixels_per_us: float

    def x(self, us: float) -> float:
        return LEFT + us * self.pixels_per_us


def draw(trace: Trace) -> str:
    """SVG of 1000 px width: one panel per role, one row per CTA, coloured by span.

    Dashed lines mark the medians of the events over the CTAs, a red line the floor, if known.
    """
    end = max(trace.last, trace.floor_us or 0.0, 1e-3)
    scale = Scale((WIDTH - LEFT - RIGHT) / end)
    row = min(MAX_ROW, max(MIN_ROW, PANEL_HEIGHT / len(trace.array)))
    parts = [f'<text x="{LEFT}" y="24" font-size="16" fill="#111827">{escape(trace.title)}</text>']
    y = 34.0
    for panel in with_unknown_events(trace):
        panel_parts, y = draw_panel(trace, panel, scale, y, row)
        parts += panel_parts
    parts += draw_axis(scale, end, y)
    if trace.floor_us is not None:
        parts += draw_floor(scale, trace.floor_us, y)
    height = y + 46
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>\n"])


def with_unknown_events(trace: Trace) -> list[Panel]:
    """The panels; events that none of them knows are marked in a panel of their own."""
    known = {phase.event for panel in PANELS for phase in panel.phases}
    unknown = tuple(Phase(name) for name in trace.names if name not in known)
    return [*PANELS, Panel("other events", unknown)] if unknown else list(PANELS)


def draw_panel(
    trace: Trace, panel: Panel, scale: Scale, y: float, row: float
) -> tuple[list[str], float]:
    """One panel from `y` on: title, legend, labels, rows; and the y below it."""
    y += 24
    marks = medians(trace, panel)
    levels = label_levels([(scale.x(us), label) for us, label in marks])
    top = y + 6 + LABEL_HEIGHT * (max(levels, default=-1) + 1)
    bottom = top + row * len(trace.array)
    parts = [f'<text x="{LEFT}" y="{y:.1f}" font-weight="bold" fill="#111827">{panel.title}</text>']
    parts.append(f'<rect x="{LEFT}" y="{top:.1f}" width="{WIDTH - 2 * LEFT}" '
                 f'height="{bottom - top:.1f}" fill="#f8fafc"/>')  # fmt: skip
    legend_x = LEFT + 8 + 1.2 * LETTER_WIDTH * len(panel.title)
    for phase, begins, ends in phase_times(trace, panel):
        path = rows_path(begins, ends, scale, top, row)
        if path:
            parts.append(f'<path stroke="{phase.colour}" stroke-width="{row:.2f}" d="{path}"/>')
            parts += draw_key(phase, legend_x, y)
            legend_x += 26 + LETTER_WIDTH * len(phase.label)
    for (us, label), level in zip(marks, levels, strict=True):
        label_y = y + 4 + LABEL_HEIGHT * (level + 1)
        parts.append(f'<path d="M{scale.x(us):.1f} {label_y - 9:.1f}V{bottom:.1f}" '
                     'stroke="#111827" stroke-width="0.7" stroke-dasharray="3 2"/>')  # fmt: skip
        parts.append(f'<text x="{scale.x(us) + 3:.1f}" y="{label_y:.1f}" font-size="10" '
                     f'fill="#111827">{escape(label)}</text>')  # fmt: skip
    return parts, bottom


def draw_key(phase: Phase, x: float, y: float) -> list[str]:
    """Colour and label of a phase."""
    return [
        f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" fill="{phase.colour}"/>',
        f'<text x="{x + 14:.1f}" y="{y:.1f}" fill="#374151">{phase.label}</text>',
    ]


def phase_times(trace: Trace, panel: Panel) -> list[tuple[Phase, np.ndarray, np.ndarray]]:
    """Begin and end in µs on every CTA of each phase but the first; nan where there is none."""
    times = [trace.microseconds(phase.event) for phase in panel.phases]
    begins = np.fmax.accumulate(times, axis=0)  # the latest so far; nan counts as absent
    return list(zip(panel.phases[1:], begins[:-1], times[1:], strict=True))


def rows_path(begins: np.ndarray, ends: np.ndarray, scale: Scale, top: float, row: float) -> str:
    """SVG path with a line for every CTA on which the phase took time."""
    return "".join(
        f"M{scale.x(a):.1f} {top + (i + 0.5) * row:.1f}h{(b - a) * scale.pixels_per_us:.1f}"
        for i, (a, b) in enumerate(zip(begins, ends, strict=True))
        if a < b  # False for nan
    )


def medians(trace: Trace, panel: Panel) -> list[tuple[float, str]]:
    """(median in µs, label) of the events of a panel that happened, in order of time."""
    found = []
    for phase in panel.phases:
        times = trace.microseconds(phase.event)
        if not np.isnan(times).all():
            median = float(np.nanmedian(times))
            found.append((median, f"{phase.event} {median:.1f}"))
    return sorted(found)


def label_levels(labels: Sequence[tuple[float, str]]) -> list[int]:
    """A line for each label (x, text), sorted by x, such that no two overlap."""
    ends: list[float] = []
    levels = []
    for x, text in labels:
        level = next((i for i, end in enumerate(ends) if end <= x), len(ends))
        if level == len(ends):
            ends.append(0.0)
        ends[level] = x + 8 + LETTER_WIDTH * len(text)
        levels.append(level)
    return levels


def draw_axis(scale: Scale, end: float, y: float) -> list[str]:
    """Ticks in µs since the earliest event."""
    step = next((t for t in TICKS if end / t <= TICK_STEPS), end / TICK_STEPS)
    parts = []
    for i in range(int(end / step) + 1):
        x = scale.x(i * step)
        parts.append(f'<path d="M{x:.1f} {y:.1f}v5" stroke="#6b7280"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle" '
                     f'fill="#374151">{i * step:g}</text>')  # fmt: skip
    parts.append(f'<text x="{LEFT}" y="{y + 36:.1f}" fill="#374151">'
                 "µs since the first CTA started; one row per CTA, CTA 0 on top; "
                 "dashed: median over the CTAs</text>")  # fmt: skip
    return parts


def draw_floor(scale: Scale, floor_us: float, y: float) -> list[str]:
    """The line of the memory floor through all panels, and its label on the nearer side."""
    x = scale.x(floor_us)
    side, anchor = (-4, "end") if x > WIDTH / 2 else (4, "start")
    return [
        f'<path d="M{x:.1f} 34V{y:.1f}" stroke="{FLOOR_COLOUR}" stroke-width="1.5"/>',
        f'<text x="{x + side:.1f}" y="42" text-anchor="{anchor}" fill="{FLOOR_COLOUR}">'
        f"floor {floor_us:.1f} µs</text>",
    ]
