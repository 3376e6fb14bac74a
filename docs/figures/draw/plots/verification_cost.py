"""The time of verification beside one read of the logits, both functions of one C++ program."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import newest, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "verify_ops_cpu.json"
TITLE = "Verification beside one read of the logits"
DESCRIPTION = (
    "The time of verifying a chain of seven draft tokens over 151,936 ids, divided by the time of one read of the "
    "eight rows of logits, with logits in memory and in the caches, for rules rejection and block."
)
DRAFTS = {"near": "usual draft", "same": "all accepted"}


def draw() -> Figure:
    """Draws one group per precision and number of threads."""
    machine = newest(RESULT)
    rows = [row for row in machine["rows"] if row["benchmark"] == "the_kernel_beside_reading_the_logits"]
    groups: list[Group] = []
    for dtype, threads in sorted(
        {(row["dtype"], row["threads"]) for row in rows}, key=lambda each: (each[0][::-1], each)
    ):
        own = [row for row in rows if (row["dtype"], row["threads"]) == (dtype, threads)]
        bars = []
        for rule, draft in dict.fromkeys((row["rule"], row["draft"]) for row in own):
            at = {row["where"]: row["median_ratio"] for row in own if (row["rule"], row["draft"]) == (rule, draft)}
            bars.append(Bar(f"{rule}, {DRAFTS[draft]}", at["memory"], BARS[0]))
            bars.append(Bar("", at["cached"], BARS[2]))
        groups.append(Group(f"{dtype}, {threads} thread{'s' if threads > 1 else ''}", bars))
    most = max(bar.value for group in groups for bar in group.bars)
    scale = Scale(most * 1.05, [tick for tick in range(10) if tick <= most], "reads", 164, "{:.2f}", 1.0, row=14.5)
    figure, axes = page(height(groups, scale) + 110)
    below = "a chain of 7 draft tokens over 151,936 ids; 1 is one read of the logits"
    heading(axes, 18, "Verification beside one read of the logits", below)
    legend(axes, 56, ((BARS[0], "logits in memory"), (BARS[2], "logits in caches")))
    bottom = draw_bars(axes, 74, groups, scale)
    write(axes, 12, bottom + 18, source(RESULT, machine["environment"]), fontsize=SMALL, color=MUTED)
    return figure
