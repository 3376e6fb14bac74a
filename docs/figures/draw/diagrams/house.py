"""The packages by level, with their imports as arrows."""

from __future__ import annotations

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, PathPatch
from matplotlib.path import Path

from docs.figures.draw.imports import SOURCES, Graph, graph, levels, reduced
from docs.figures.draw.layered import Layout
from docs.figures.draw.shapes import box, heading, write
from docs.figures.draw.style import BLUE, GREEN, LINE, MONO, MUTED, ORANGE, SMALL, page

TITLE = "The packages of specdec_fast and specdec_kernels, by level"
DESCRIPTION = (
    "Packages and modules of specdec_fast from the command line at the top to core at the bottom, with an arrow for "
    "each import that does not follow from others; below them the operators of specdec_kernels and the C++ sources."
)

STEP, HIGH, LETTER = 41.0, 22.0, 6.1


def draw() -> Figure:
    """Draws the imports of today's code."""
    inside, outside = graph("specdec_fast")
    use = {part for part, packages in outside.items() if "specdec_kernels" in packages}
    floor = levels(inside)
    height = 62 + STEP * (max(floor.values()) + 1)
    figure, axes = page(height + 100)
    heading(axes, 18, "specdec_fast", "An arrow means: imports. Arrows that follow from others are left out.")
    bottom = _graph(axes, 50, inside, floor, use)
    _ground(axes, bottom + 8)
    return figure


def _graph(axes: Axes, top: float, edges: Graph, floor: dict[str, int], marked: set[str]) -> float:
    widths = {part: LETTER * len(part) + 16 for part in edges}
    layout = Layout(reduced(edges), floor, widths, (12.0, 449.0))
    y = {name: top + STEP * (len(layout.rows) - 1 - level) for level, row in enumerate(layout.rows) for name in row}
    for path in layout.paths.values():
        _arrow(axes, [(layout.x[name], y[name] + HIGH / 2) for name in path])
    for part in edges:
        x = layout.x[part] - widths[part] / 2
        colour = BLUE if (SOURCES["specdec_fast"] / part).is_dir() else LINE
        fill = {"fill": "white"} if colour == LINE else {}
        box(axes, x, y[part], widths[part], HIGH, part, colour, family=MONO, fontsize=SMALL, **fill)
        if part in marked:
            axes.plot([x + widths[part]], [y[part]], "o", markersize=6, color=ORANGE, markeredgecolor="white")
    return top + STEP * len(layout.rows)


def _arrow(axes: Axes, points: list[tuple[float, float]]) -> None:
    """A smooth line down through points, from the lower edge of a box to the upper edge of another."""
    (x, y), (end_x, end_y) = points[0], points[-1]
    points = [(x, y + HIGH / 2), *points[1:-1], (end_x, end_y - HIGH / 2 - 4)]
    corners, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        corners += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Path.CURVE4] * 3
    axes.add_patch(PathPatch(Path(corners, codes), facecolor="none", edgecolor=LINE, linewidth=1.1, zorder=0.5))
    tip = FancyArrowPatch(
        points[-1], (end_x, end_y - HIGH / 2), arrowstyle="-|>,head_length=4.5,head_width=2.4", color=MUTED,
        shrinkA=0, shrinkB=0, zorder=0.6,
    )  # fmt: skip
    axes.add_patch(tip)


def _ground(axes: Axes, y: float) -> None:
    axes.plot([18], [y], "o", markersize=6, color=ORANGE, markeredgecolor="white")
    write(axes, 28, y, "imports specdec_kernels, which imports nothing of specdec_fast", fontsize=SMALL)
    box(axes, 12, y + 16, 437, 30, "specdec_kernels: operators, each with a reference and backends", ORANGE)
    box(axes, 12, y + 56, 437, 30, "csrc: C++ kernels behind the operators", GREEN)
