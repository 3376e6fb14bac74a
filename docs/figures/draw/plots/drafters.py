"""Speed and tokens per target pass of the drafters, beside plain decoding."""

from __future__ import annotations

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import mark, marked_runs, merged_runs, read, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "drafters_cpu.json"
TITLE = "Drafters: speed beside plain decoding, and tokens per target pass"
DESCRIPTION = (
    "For each drafter, the speed beside plain decoding of the same engine at temperature 1 and at temperature 0, with "
    "the range of rounds and tau, the mean tokens per target pass."
)
MEDIANS = "A speed is the median of one ratio per round; quotients of speeds are approximate."
SHOWN = (
    "draft_model", "draft_tree, tuned shape of 8", "draft_tree, dynamic of 8", "draft_tree 2 1 1", "eagle",
    "eagle, static", "eagle3", "medusa, 8 nodes", "blockwise", "recycling, shared", "suffix, shared", "ngram",
    "lookahead W3 N3 G3", "jacobi, blocks of 4", "layer_skip, tuned",
)  # fmt: skip


def draw() -> Figure:
    """Draws two bars per drafter, the fastest first."""
    result = read(RESULT)
    rows = {(row["drafter"], row["temperature"]): row for row in result["rows"] if row["workload"] == "mixed"}
    order = sorted(SHOWN, key=lambda name: -rows[name, 1.0]["speed_vs_plain"])
    runs = marked_runs(rows[name, temperature] for name in order for temperature in (1.0, 0.0))
    groups = []
    for name in order:
        bars = [
            Bar(name if at == 0 else "", row["speed_vs_plain"], BARS[0] if at == 0 else BARS[2],
                f"tau {row['tau']:.2f}{mark(row, runs)}", tuple(row["speed_vs_plain_range"]))
            for at, row in enumerate((rows[name, 1.0], rows[name, 0.0]))
        ]  # fmt: skip
        groups.append(Group("", bars))
    scale = Scale(2.65, (0, 0.5, 1, 1.5, 2), "times plain", 186, "{:.2f}", 1.0, row=14.5, gap=5)
    caption = f"{source(RESULT, result['environment'])}{merged_runs(runs)}\n{MEDIANS}"
    figure, axes = page(height(groups, scale) + 86 + 13 * (caption.count("\n") + 1))
    any_row = rows[order[0], 1.0]
    below = f"{any_row['prompts']} prompts, {any_row['new_tokens']} new tokens each, float32, one thread, batch 1"
    heading(axes, 18, "Drafters on the bundled pair", below)
    legend(axes, 56, ((BARS[0], "temperature 1"), (BARS[2], "temperature 0")))
    bottom = draw_bars(axes, 74, groups, scale)
    write(axes, 12, bottom + 10, caption, fontsize=SMALL, color=MUTED, va="top")
    return figure
