"""Horizontal bars in groups, on one axis from zero, each with its number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from docs.figures.draw.shapes import write
from docs.figures.draw.style import DARK, GRID, INK, LINE, MUTED, PAGE, POINTS, SMALL, WIDTH

RIGHT = WIDTH * POINTS - 14
LETTER = 5.9  # the mean width of a letter of a note


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. note: words behind its number; spread: an interval around its value; rest: a part behind it, in pale."""

    label: str
    value: float
    colour: str
    note: str = ""
    spread: tuple[float, float] | None = None
    rest: float = 0.0
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Bars under a heading, or without one."""

    heading: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis and the measures of bars. most: value at the right edge; reference: a value with a line through all bars;
    left: where bars begin, labels being before it; row: the height of a bar with its gap; gap: between groups.
    """

    most: float
    ticks: Sequence[float]
    unit: str
    left: float = 132.0
    form: str = "{:,.0f}"
    reference: float | None = None
    row: float = 19.0
    gap: float = 14.0

    def x(self, value: float) -> float:
        """Where a value is."""
        return self.left + value * (RIGHT - self.left) / self.most


def height(groups: Sequence[Group], scale: Scale) -> float:
    """How high groups are drawn, in points."""
    return sum((18 if each.heading else 0) + scale.row * len(each.bars) + scale.gap for each in groups) + 22


def draw_bars(axes: Axes, top: float, groups: Sequence[Group], scale: Scale) -> float:
    """Draws groups of bars below `top`; returns their lower edge."""
    y = top
    for group in groups:
        if group.heading:
            write(axes, 12, y + 8, group.heading, weight="bold")
            y += 18
        grid(axes, (y - 1, y + scale.row * len(group.bars) + 1), scale)
        for bar in group.bars:
            _bar(axes, y + scale.row / 2, bar, scale)
            y += scale.row
        y += scale.gap
    y -= scale.gap
    numbers(axes, y + 11, scale)
    return y + 22


def legend(axes: Axes, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Colours and their meaning, side by side."""
    x = 12.0
    for colour, text in entries:
        axes.add_patch(Rectangle((x, y - 5.5), 11, 11, facecolor=colour, linewidth=0))
        write(axes, x + 17, y, text, fontsize=SMALL)
        x += 40 + LETTER * len(text)


def grid(axes: Axes, span: tuple[float, float], scale: Scale) -> None:
    """Lines at the ticks and at the reference, over a span of heights."""
    for tick in scale.ticks:
        colour = LINE if tick == 0 else GRID
        axes.plot((scale.x(tick), scale.x(tick)), span, color=colour, linewidth=1, zorder=0)
    if scale.reference is not None:
        x = scale.x(scale.reference)
        axes.plot((x, x), span, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2)


def numbers(axes: Axes, y: float, scale: Scale) -> None:
    """The numbers of the axis, and its unit."""
    for tick in scale.ticks:
        write(axes, scale.x(tick), y, f"{tick:g}", ha="center", fontsize=SMALL, color=MUTED)
    write(axes, scale.left - 8, y, scale.unit, ha="right", fontsize=SMALL, color=MUTED)


def _bar(axes: Axes, y: float, bar: Bar, scale: Scale) -> None:
    weight, high = "bold" if bar.strong else "normal", 0.7 * scale.row
    start, end = scale.x(0), scale.x(bar.value)
    axes.add_patch(Rectangle((start, y - high / 2), end - start, high, facecolor=bar.colour, linewidth=0, zorder=1))
    if bar.rest:
        rest = scale.x(bar.rest) - start
        axes.add_patch(
            Rectangle((end, y - high / 2), rest, high, facecolor="white", edgecolor=bar.colour, linewidth=1, zorder=1)
        )
        end += rest
    write(axes, scale.left - 8, y, bar.label, ha="right", fontsize=SMALL, weight=weight)
    if bar.spread is not None:
        low, most = (scale.x(each) for each in bar.spread)
        end = max(end, most)
        axes.plot((low, most), (y, y), color=INK, linewidth=1.1, zorder=3)
        for x in (low, most):
            axes.plot((x, x), (y - 3, y + 3), color=INK, linewidth=1.1, zorder=3)
    text = scale.form.format(bar.value + bar.rest) + (f"  {bar.note}" if bar.note else "")
    if end + LETTER * len(text) < RIGHT + 6:
        pad = {"facecolor": PAGE, "edgecolor": "none", "pad": 0.8}  # numbers stand on lines of the grid
        write(axes, end + 6, y, text, fontsize=SMALL, weight=weight, bbox=pad)
    else:
        colour = "white" if bar.colour in DARK else INK
        write(axes, scale.x(bar.value) - 6, y, text, fontsize=SMALL, weight=weight, ha="right", color=colour)
