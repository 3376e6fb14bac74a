"""The common style: page, fonts, colours, and SVG files whose bytes depend on the drawing alone.

A page is 6.4 inches wide, so that its text stays readable when a phone shows it 390 pixels wide. The colours are those
of Okabe and Ito 2008, darkened where text stands in them, on an opaque light page that also suits dark websites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH = 6.4  # inches; 460.8 points
POINTS = 72
TEXT, SMALL, TITLE = 11.0, 10.0, 13.0  # points
MONO = "DejaVu Sans Mono"

PAGE, INK, MUTED, LINE, GRID = "#fcfcfa", "#1d2530", "#4d5866", "#7d8894", "#dde2e7"
BLUE, GREEN, ORANGE, PURPLE, GREY = "#0f62a8", "#00745a", "#b34a00", "#8a3d78", "#6a7480"
PALE = {BLUE: "#d5e6f6", GREEN: "#cdebe0", ORANGE: "#fbe0c6", PURPLE: "#efdbea", GREY: "#eceff2"}
BARS = (BLUE, "#e08a2e", "#6db3e6", "#9aa4af")
DARK = (BLUE, GREEN, ORANGE, PURPLE, GREY, INK)
"""Colours on which text is white."""

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "text.parse_math": False,
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": TEXT,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "svg.fonttype": "path",  # every viewer shows the same letters
    "svg.hashsalt": "specdec-fast",
    "path.simplify": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """The settings of all figures, for as long as one is drawn and written."""
    with rc_context({**_RC, "backend": "svg"}):
        yield


def page(height: float) -> tuple[Figure, Axes]:
    """An empty page for a diagram. Its coordinates are points from the upper left corner; height is in points."""
    figure = Figure(figsize=(WIDTH, height / POINTS))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH * POINTS), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def chart(height: float, rows: int = 1, **layout: Any) -> tuple[Figure, Any]:
    """A page with one plot, or with several below each other; height is in points."""
    figure = Figure(figsize=(WIDTH, height / POINTS), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr]
    return figure, figure.subplots(rows, **layout)


def svg(draw: Callable[[], Figure], title: str, description: str) -> str:
    """The file of a figure. The same drawing gives the same bytes on any day."""
    with styled():
        figure, stream = draw(), StringIO()
        FigureCanvasSVG(figure)
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", stream.getvalue(), flags=re.DOTALL)
    text = re.sub(r"(?<=\d)\.(\d{3})\d+", r".\1", text)  # a thousandth of a point is enough
    text = re.sub(r"\s*\n\s*", "\n", text)
    return text.replace("</title>", f"</title>\n<desc>{escape(description)}</desc>", 1)
