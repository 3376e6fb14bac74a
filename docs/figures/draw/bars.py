"""Horizontal bars in groups, on one axis from zero, each with its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from docs.figures.draw.shapes import write
from docs.figures.draw.style import DARK, GRID, INK, LINE, MUTED, POINTS, SMALL, WIDTH

ROW, BAR, GAP = 19, 13, 14
RIGHT = WIDTH * POINTS - 14


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. note: words behind its number; spread: an interval around its value."""

    label: str
    value: float
    colour: str
    note: str = ""
    spread: tuple[float, float] | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under a heading."""

    heading: str
    bars: Sequence[Bar]


def height(groups: Sequence[Group]) -> float:
    """How high groups are drawn, in points."""
    return sum((18 if group.heading else 0) + ROW * len(group.bars) + GAP for group in groups) + 18


def draw_bars(
    axes: Axes, top: float, groups: Sequence[Group], most: float, ticks: Sequence[float], unit: str, left: float = 132,
    form: str = "{:,.0f}", reference: float | None = None,
) -> float:  # fmt: skip
    """Draws groups of bars.

    Args:
        axes: The page.
        top: Upper edge.
        groups: The groups.
        most: The value at the right edge.
        ticks: Numbers on the axis.
        unit: What the axis counts.
        left: Where bars begin; labels are before it.
        form: Format of a bar's number.
        reference: A value with a line through all groups.

    Returns:
        The lower edge.
    """
    scale, bottom = (RIGHT - left) / most, top + height(groups) - 18 - GAP / 2
    for tick in ticks:
        write(axes, left + tick * scale, bottom + 9, f"{tick:g}", ha="center", fontsize=SMALL, color=MUTED)
    write(axes, left - 8, bottom + 9, unit, ha="right", fontsize=SMALL, color=MUTED)
    y = top
    for group in groups:
        if group.heading:
            write(axes, 12, y + 8, group.heading, weight="bold")
            y += 18
        span = (y - 1, y + ROW * len(group.bars) + 1)
        for tick in ticks:
            x = left + tick * scale
            axes.plot((x, x), span, color=LINE if tick == 0 else GRID, linewidth=1, zorder=0)
        if reference is not None:
            x = left + reference * scale
            axes.plot((x, x), span, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
        for bar in group.bars:
            _bar(axes, y + ROW / 2, bar, scale, left, form)
            y += ROW
        y += GAP
    return bottom + 18


def _bar(axes: Axes, y: float, bar: Bar, scale: float, left: float, form: str) -> None:
    weight = "bold" if bar.strong else "normal"
    axes.add_patch(Rectangle((left, y - BAR / 2), bar.value * scale, BAR, facecolor=bar.colour, linewidth=0, zorder=1))
    write(axes, left - 8, y, bar.label, ha="right", fontsize=SMALL, weight=weight)
    end = bar.value
    if bar.spread is not None:
        low, high = (left + each * scale for each in bar.spread)
        end = max(end, bar.spread[1])
        axes.plot((low, high), (y, y), color=INK, linewidth=1.1, zorder=3)
        for x in (low, high):
            axes.plot((x, x), (y - 3, y + 3), color=INK, linewidth=1.1, zorder=3)
    text = form.format(bar.value) + (f"  {bar.note}" if bar.note else "")
    if left + end * scale + 5.6 * len(text) < RIGHT + 10:
        write(axes, left + end * scale + 6, y, text, fontsize=SMALL, weight=weight)
    else:
        colour = "white" if bar.colour in DARK else INK
        write(axes, left + bar.value * scale - 6, y, text, fontsize=SMALL, weight=weight, ha="right", color=colour)
