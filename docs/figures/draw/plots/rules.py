"""Tokens per target pass of the rules, on chains and on trees with the same number of draft tokens."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height
from docs.figures.draw.results import read, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "rules_cpu.json"
TITLE = "Rules: tokens per target pass"
DESCRIPTION = (
    "Mean tokens per target pass with 95 % intervals: rejection, block and replay on chains of six draft tokens; "
    "recursive_rejection, traversal and replay on trees of depth 2 with six draft tokens, by how siblings were sampled."
)


def draw() -> Figure:
    """Draws one group for chains and one for trees."""
    result = read(RESULT)
    chains, trees = [], []
    for row in result["rows"]:
        shape, _, siblings = row["proposals"].partition(", ")
        name = row["rule"]
        spread = row["tau"] - row["half_width_95"], row["tau"] + row["half_width_95"]
        colour = BARS[2] if row["rule"] == "replay" else BARS[0] if row["rule"] in ("block", "traversal") else BARS[3]
        bar = Bar(f"{name}, {siblings}" if siblings else name, row["tau"], colour, spread=spread)
        (chains if shape.startswith("chain") else trees).append(bar)
    groups = [
        Group("Chains of 6 draft tokens, at most 7 tokens per pass", chains),
        Group("Trees of 6 draft tokens and depth 2, at most 3 tokens per pass", trees),
    ]
    scale = Scale(5.2, (0, 1, 2, 3, 4, 5), "tau", 258, "{:.2f}")
    figure, axes = page(height(groups, scale) + 88)
    below = f"temperature {result['temperature']:g}, {result['rows'][0]['texts']} texts each; lines: 95 % intervals"
    heading(axes, 18, "Tokens per target pass by rule", below)
    bottom = draw_bars(axes, 52, groups, scale)
    write(axes, 12, bottom + 18, source(RESULT, result["environment"]), fontsize=SMALL, color=MUTED)
    return figure
