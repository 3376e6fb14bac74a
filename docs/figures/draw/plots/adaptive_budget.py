"""Speed of drafters with a fixed budget and with the budget `goodput`, which drops drafts that do not pay."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.bars import Scale, grid, numbers
from docs.figures.draw.results import machine, mark, marked_runs, merged_runs, read
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BLUE, INK, LINE, MUTED, ORANGE, SMALL, page

FIXED, ADAPTIVE = "drafters_cpu.json", "goodput_cpu.json"
TITLE = "Fixed budgets and the budget goodput"
DESCRIPTION = (
    "For each drafter at temperature 1, its speed beside plain decoding with a fixed number of draft tokens and with "
    "the budget goodput. With goodput no drafter falls far below plain decoding."
)
ROW = 14.5


def draw() -> Figure:
    """Draws one line per drafter, the slowest with a fixed budget last."""
    fixed, adaptive = read(FIXED), read(ADAPTIVE)
    rows = {row["drafter"]: row for row in fixed["rows"] if row["temperature"] == 1.0 and row["workload"] == "mixed"}
    before = {name: row["speed_vs_plain"] for name, row in rows.items()}
    after = {row["drafter"]: row for row in adaptive["rows"] if row["temperature"] == 1.0}
    names = sorted(set(before) & set(after), key=lambda name: -before[name])
    runs = marked_runs(rows[name] for name in names)
    scale = Scale(2.0, (0, 0.5, 1, 1.5), "times plain", 206, reference=1.0)
    machines = dict.fromkeys(machine(each["environment"]) for each in (adaptive, fixed))
    files = f"benchmarks/results/{ADAPTIVE}, benchmarks/results/{FIXED}"
    caption = f"Measured on {' and '.join(machines)}\n{files}{merged_runs(runs)}"
    figure, axes = page(74 + ROW * len(names) + 46 + 13 * (caption.count("\n") + 1))
    heading(axes, 18, "Fixed budget and goodput", "temperature 1, float32, one thread, batch 1")
    for x, colour, text in ((12, ORANGE, "fixed budget"), (122, BLUE, "goodput, with 95 % interval")):
        axes.plot(
            [x + 5], [56], "o", markersize=6, color=colour, markerfacecolor="none" if colour == ORANGE else colour
        )
        write(axes, x + 17, 56, text, fontsize=SMALL)
    bottom = 74 + ROW * len(names)
    grid(axes, (70, bottom), scale)
    for at, name in enumerate(names):
        label = name.replace(", fixed threshold", ", fixed") + mark(rows[name], runs)
        _line(axes, 74 + (at + 0.5) * ROW, label, before[name], after[name], scale)
    numbers(axes, bottom + 11, scale)
    write(axes, 12, bottom + 27, caption, fontsize=SMALL, color=MUTED, va="top")
    return figure


def _line(axes: Axes, y: float, name: str, before: float, row: dict[str, object], scale: Scale) -> None:
    write(axes, scale.left - 8, y, name, ha="right", fontsize=SMALL)
    after: float = row["speed_vs_plain"]  # type: ignore[assignment]
    low, high = row["speed_vs_plain_95"]  # type: ignore[misc]
    axes.plot((scale.x(before), scale.x(after)), (y, y), color=LINE, linewidth=1)
    axes.plot((scale.x(low), scale.x(high)), (y, y), color=INK, linewidth=1.1)
    axes.plot([scale.x(before)], [y], "o", markersize=5.5, color=ORANGE, markerfacecolor="none")
    axes.plot([scale.x(after)], [y], "o", markersize=5.5, color=BLUE)
