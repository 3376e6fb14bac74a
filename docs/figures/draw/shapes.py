"""Boxes, arrows and captions of diagrams, in the points of `style.page`."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from docs.figures.draw.style import INK, LINE, MUTED, PALE, SMALL, TEXT, TITLE


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", colour: str = LINE, **look: Any
) -> None:
    """A rounded box with its upper left corner at (x, y) and text in its middle.

    Args:
        axes: The page.
        x: Left edge.
        y: Upper edge.
        width: Width.
        height: Height.
        text: The text, of one or more lines.
        colour: Its edge; the box is filled with the pale colour that belongs to it, or with `fill`.
        look: `fill`, `dashed`, `line` (width of the edge), `rounding`, and properties of the text.
    """
    fill, dashed = look.pop("fill", PALE.get(colour, "white")), look.pop("dashed", False)
    line, rounding = look.pop("line", 1.2), look.pop("rounding", 4)
    style = f"round,pad=0,rounding_size={rounding}"
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle=style, facecolor=fill, edgecolor=colour, linewidth=line,
            linestyle=(0, (3, 2)) if dashed else "solid",
        )
    )  # fmt: skip
    if text:
        write(axes, x + width / 2, y + height / 2, text, ha="center", **look)


def write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    """Text whose left end (or `ha`) is at x and whose middle (or `va`) is at y."""
    look = {"va": "center", "fontsize": TEXT, "linespacing": 1.25, **look}
    if "\n" not in text and look["va"] == "center":  # letters with and without descenders stand on one line
        y, look["va"] = y + 0.36 * look["fontsize"], "baseline"
    axes.text(x, y, text, **look)


def heading(axes: Axes, y: float, text: str, below: str = "") -> None:
    """A title, and a muted line below it."""
    write(axes, 12, y, text, fontsize=TITLE, weight="bold")
    if below:
        write(axes, 12, y + 18, below, fontsize=SMALL, color=MUTED)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **look: Any) -> None:
    """An arrow from start to end; bend: its curvature."""
    bend, head = look.pop("bend", 0.0), look.pop("head", True)
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>,head_length=4.5,head_width=2.4" if head else "-", shrinkA=0, shrinkB=0,
            connectionstyle=f"arc3,rad={bend}", **{"color": INK, "linewidth": 1.2, **look},
        )
    )  # fmt: skip


def elbow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **look: Any) -> None:
    """A line of a tree that grows to the right: level, down or up in the middle, level."""
    middle = (start[0] + end[0]) / 2
    xs, ys = (start[0], middle, middle, end[0]), (start[1], start[1], end[1], end[1])
    axes.plot(xs, ys, **{"color": LINE, "linewidth": 1.2, "solid_joinstyle": "round", **look})
