"""Matplotlib figures as SVG text: equal input gives an equal file, byte for byte.

matplotlib is imported where it draws, so that measuring does without it. Letters stay text: small
files that can be searched. Their width is that of DejaVu Sans, which is wider than most fonts that
a browser may take instead, so nothing overlaps then.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MORE_DECIMALS = re.compile(r"(\d\.\d\d)\d+")  # than two, which are hundredths of a point
INK, FAINT = "#222222", "#e3e3e3"
SETTINGS = {
    "svg.hashsalt": "cute-moe",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


def svg(width: float, height: float, paint: Callable[[Figure], None]) -> str:
    """The SVG of a white figure of that size in inches, which `paint` fills.

    Raises ModuleNotFoundError where matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS}):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
        paint(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in text.getvalue().splitlines())
    return MORE_DECIMALS.sub(r"\1", "\n".join(lines) + "\n")
