"""Speed of plain decoding and of drafter `auto` on real models, beside transformers' own decoding."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.bars import Scale, grid, numbers
from docs.figures.draw.results import machine, read
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BLUE, LINE, MUTED, ORANGE, SMALL, page

RESULT = "real_models_cpu.json"
TITLE = "Real models beside transformers"
DESCRIPTION = (
    "For two real models in float32 and bfloat16 and six tasks, the speed of plain decoding and of decoding with "
    "drafter auto, as a multiple of the speed of transformers' generate. Auto gains most where a text repeats its "
    "prompt."
)
THREADS = 2
ROW = 15.0


def draw() -> Figure:
    """Draws a group per model and data type, with a line per task."""
    rows = [row for row in read(RESULT)["rows"] if row["threads"] == THREADS and row["temperature"] == 0]
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        tasks = groups.setdefault(f"{row['model']}, {row['dtype']}", {})
        tasks.setdefault(row["task"], {})[row["side"]] = row["speed_vs_transformers"]
    most = max(max(sides["plain"], sides["auto"]) for tasks in groups.values() for sides in tasks.values())
    scale = Scale(most * 1.05, range(0, int(most) + 1, 5 if most > 12 else 1), "times", 84, reference=1.0)
    environments = dict.fromkeys(machine(row["environment"]) for row in rows)
    lines = sum(len(tasks) for tasks in groups.values())
    caption = "\n".join(wrap(f"Measured on {' and '.join(environments)}. benchmarks/results/{RESULT}", 72))
    high = 74 + ROW * lines + 26 * len(groups) + 40 + 13 * (caption.count("\n") + 1)
    figure, axes = page(high)
    heading(
        axes, 18, "Speed relative to transformers", f"temperature 0, batch 1, {THREADS} threads; dashed: transformers"
    )
    for x, colour, text in ((12, ORANGE, "specdec-fast, plain"), (152, BLUE, "specdec-fast, drafter auto")):
        _dot(axes, x + 5, 56, colour)
        write(axes, x + 17, 56, text, fontsize=SMALL)
    y = 80.0
    for title, tasks in groups.items():
        write(axes, 12, y, title, weight="bold")
        y += 10
        grid(axes, (y, y + ROW * len(tasks)), scale)
        for task, sides in tasks.items():
            _line(axes, y + ROW / 2, task, sides, scale)
            y += ROW
        y += 16
    numbers(axes, y - 5, scale)
    write(axes, 12, y + 12, caption, fontsize=SMALL, color=MUTED, va="top")
    return figure


def _dot(axes: Axes, x: float, y: float, colour: str) -> None:
    axes.plot([x], [y], "o", markersize=6, color=colour, markerfacecolor="none" if colour == ORANGE else colour)


def _line(axes: Axes, y: float, task: str, sides: dict[str, Any], scale: Scale) -> None:
    write(axes, scale.left - 8, y, task, ha="right", fontsize=SMALL)
    axes.plot((scale.x(sides["plain"]), scale.x(sides["auto"])), (y, y), color=LINE, linewidth=1)
    _dot(axes, scale.x(sides["plain"]), y, ORANGE)
    _dot(axes, scale.x(sides["auto"]), y, BLUE)
