"""The engine's own time per step at batch 1, outside of the models."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import machine, read
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "engine_overhead_cpu.json"
TITLE = "The engine's own time per step"
DESCRIPTION = (
    "Milliseconds per step outside of the models at batch 1, eager, float32, for plain decoding and for the drafters "
    "ngram and draft_model, at temperature 1 and 0, on the two newest machines."
)


def draw() -> Figure:
    """Draws one group for each machine and number of threads."""
    machines = sorted(read(RESULT)["machines"], key=lambda each: str(each["environment"]["date"]))[:-3:-1]
    groups = [
        Group(f"{'AB'[at]}, {threads} thread{'s' if threads > 1 else ''}", _bars(each["rows"], threads))
        for at, each in enumerate(machines)
        for threads in (1, 2)
    ]
    scale = Scale(0.52, (0, 0.1, 0.2, 0.3, 0.4, 0.5), "ms", 132, "{:.2f}", row=15)
    figure, axes = page(height(groups, scale) + 118)
    heading(axes, 18, "Time of the engine per step", "outside of the models, float32, eager, batch 1, median")
    legend(axes, 56, ((BARS[0], "temperature 1"), (BARS[2], "temperature 0")))
    bottom = draw_bars(axes, 74, groups, scale)
    words = [f"{'AB'[at]}: {machine(each['environment'])}" for at, each in enumerate(machines)]
    lines = "\n".join([*words, f"benchmarks/results/{RESULT}"])
    write(axes, 12, bottom + 26, lines, fontsize=SMALL, color=MUTED)
    return figure


def _bars(rows: list[dict[str, Any]], threads: int) -> list[Bar]:
    found = {
        (row["drafter"], row["temperature"]): row["overhead_ms_per_step_alone"] for row in rows
        if row["threads"] == threads and row["dtype"] == "float32" and not row["compiled"]
    }  # fmt: skip
    return [
        Bar(drafter if temperature else "", found[drafter, temperature], BARS[0] if temperature else BARS[2])
        for drafter in ("plain", "ngram", "draft_model")
        for temperature in (1.0, 0.0)
    ]
