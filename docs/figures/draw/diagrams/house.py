"""The packages by level, with their imports as arrows."""

from __future__ import annotations

from itertools import pairwise
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, PathPatch
from matplotlib.path import Path

from docs.figures.draw.imports import ROOT, SOURCES, Graph, condensed, graph, levels, reduced
from docs.figures.draw.layered import Layout
from docs.figures.draw.shapes import box, heading, write
from docs.figures.draw.style import BLUE, GREEN, LINE, MONO, MUTED, ORANGE, PAGE, SMALL, page

TITLE = "The packages of specdec_fast and specdec_kernels, by level"
DESCRIPTION = (
    "Packages and modules of specdec_fast from the command line at the top to core at the bottom, with an arrow for "
    "each import that does not follow from others; below them the operators of specdec_kernels and the C++ sources."
)

STEP, HIGH, FRAME, LETTER = 42.0, 22.0, 6.0, 6.1


def draw() -> Figure:
    """Draws the imports of today's code."""
    inside, outside = graph("specdec_fast")
    kernels = condensed(graph("specdec_kernels")[0])
    users = {part for part, packages in outside.items() if "specdec_kernels" in packages}
    heights = [STEP * (max(levels(each).values()) + 1) for each in (inside, kernels)]
    figure, axes = page(50 + heights[0] + 78 + heights[1] + 54)
    heading(axes, 18, "specdec_fast", "An arrow means: imports. Arrows that follow from others are left out.")
    bottom = _graph(axes, 50, "specdec_fast", inside, users)
    axes.plot([18], [bottom + 4], "o", markersize=6, color=ORANGE, markeredgecolor="white")
    write(axes, 28, bottom + 4, "imports specdec_kernels, which imports nothing of specdec_fast", fontsize=SMALL)
    heading(axes, bottom + 34, "specdec_kernels", "A dashed frame: packages that import each other.")
    bottom = _graph(axes, bottom + 68, "specdec_kernels", kernels, set())
    _sources(axes, bottom)
    return figure


def _graph(axes: Axes, top: float, package: str, edges: Graph, marked: set[str]) -> float:
    """Draws the parts of a package; a name of several words is that of a cycle. Returns the lower edge."""
    widths = {part: sum(map(_width, part.split())) + 8 * part.count(" ") + 12 * (" " in part) for part in edges}
    layout = Layout(reduced(edges), levels(edges), widths, (12.0, 449.0))
    y = {name: top + STEP * (len(layout.rows) - 1 - level) for level, row in enumerate(layout.rows) for name in row}
    for path in layout.paths.values():
        upper, lower = (HIGH / 2 + (FRAME if " " in part else 0) for part in (path[0], path[-1]))
        _arrow(axes, [(layout.x[name], y[name] + HIGH / 2) for name in path], upper, lower)
    for part in edges:
        x = layout.x[part] - widths[part] / 2
        if " " in part:
            box(axes, x, y[part] - FRAME, widths[part], HIGH + 2 * FRAME, colour=LINE, fill=PAGE, dashed=True)
            x += 6
        for name in part.split():
            colour = BLUE if (SOURCES[package] / name).is_dir() else LINE
            fill = {"fill": "white"} if colour == LINE else {}
            box(axes, x, y[part], _width(name), HIGH, name, colour, family=MONO, fontsize=SMALL, **fill)
            x += _width(name) + 8
        if part in marked:
            axes.plot([x - 8], [y[part]], "o", markersize=6, color=ORANGE, markeredgecolor="white")
    return top + STEP * len(layout.rows)


def _width(name: str) -> float:
    return LETTER * len(name) + 16


def _sources(axes: Axes, y: float) -> None:
    folders = sorted(each.name for each in (ROOT / "csrc").iterdir() if any(each.glob("*.cpp")))
    text = "\n".join(wrap(f"csrc, the C++ kernels: {', '.join(folders)}", 68))
    box(axes, 12, y, 437, 40, text, GREEN, fontsize=SMALL)


def _arrow(axes: Axes, points: list[tuple[float, float]], upper: float, lower: float) -> None:
    """A smooth line down through points, from the middle of a box to that of another, which have half these heights."""
    (x, y), (end_x, end_y) = points[0], points[-1]
    points = [(x, y + upper), *points[1:-1], (end_x, end_y - lower - 4)]
    corners, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (y0 + y1) / 2
        corners += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Path.CURVE4] * 3
    axes.add_patch(PathPatch(Path(corners, codes), facecolor="none", edgecolor=LINE, linewidth=1.1, zorder=0.5))
    tip = FancyArrowPatch(
        points[-1], (end_x, end_y - lower), arrowstyle="-|>,head_length=4.5,head_width=2.4", color=MUTED,
        shrinkA=0, shrinkB=0, zorder=0.6,
    )  # fmt: skip
    axes.add_patch(tip)
