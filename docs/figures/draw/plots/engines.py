"""Distance between the texts of engines and the model's distribution, beside what exact draws stay below."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import read, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import GREEN, MUTED, ORANGE, SMALL, page

RESULT = "engines_cpu.json"
TITLE = "Whose sampling is lossless: distance of three tokens from the exact distribution"
DESCRIPTION = (
    "For each engine and way of drafting, the total variation between drawn texts of three tokens and their exact "
    "distribution, divided by the limit below which exact draws stay in 999 of 1,000 experiments."
)


def draw() -> Figure:
    """Draws a bar for each setting that ran without filters, in a group for each version of an engine."""
    result = read(RESULT)
    groups: dict[str, list[Bar]] = {}
    for row in result["rows"]:
        if row["sampling"]["top_k"] == 0 and row["distance"] is not None:  # else it did not run
            title = f"{row['engine']} {row['versions'].get(row['engine'], '')}"
            groups.setdefault(title, []).append(_bar(row))
    most = max(bar.value for bars in groups.values() for bar in bars)
    scale = Scale(1.12 * most, range(int(most) + 1), "of the limit", 150, "{:.2f}", 1.0, row=15.5)
    shown = [Group(title, bars) for title, bars in groups.items()]
    figure, axes = page(height(shown, scale) + 112)
    below = "temperature 0.9; total variation of three tokens, divided by its limit for exact draws"
    heading(axes, 18, "Distance from the model's distribution", below)
    legend(axes, 56, ((GREEN, "matches"), (ORANGE, "differs: p < 1e-5")))
    bottom = draw_bars(axes, 74, shown, scale)
    write(axes, 12, bottom + 10, source(RESULT, result["environment"]), fontsize=SMALL, color=MUTED, va="top")
    return figure


def _bar(row: dict[str, Any]) -> Bar:
    differs = row["verdict"] == "differs"
    return Bar(row["setting"], row["distance"] / row["limit"], ORANGE if differs else GREEN, strong=differs)
