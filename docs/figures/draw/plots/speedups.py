"""Tokens per second of the bundled pair in specdec-fast and in transformers, in the settings of one run."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height
from docs.figures.draw.results import read, source
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "end_to_end_cpu.json"
TITLE = "Measured speed against transformers"
DESCRIPTION = (
    "Tokens per second at temperature 1 on two CPU cores: plain and assisted generation of transformers, plain and "
    "speculative decoding of specdec-fast, in float32 and bfloat16, with eager, compiled and fused forward passes."
)
MEDIANS = "Ratios are medians of one ratio per round, not quotients of the bars."
SETTINGS = {
    "float32-2thread-eager-batch1-T1": "float32, eager",
    "bfloat16-2thread-eager-batch1-T1": "bfloat16, eager",
    "float32-2thread-compiled-batch1-T1": "float32, torch.compile on both sides",
    "float32-2thread-whole-batch1-T1": "float32, fused forward (transformers compiled)",
}


def bars(row: dict[str, Any]) -> list[Bar]:
    """The bars of one setting, with the ratios that were recorded."""
    speed = row["tokens_per_s"]
    speculative = [f"{row['speculative_vs_plain']:.2f}\u00d7 plain"]
    found = [Bar("transformers", speed["transformers"], BARS[3])]
    if "transformers assisted" in speed:
        found.append(Bar("transformers, assisted", speed["transformers assisted"], BARS[1]))
        speculative.append(f"{row['speculative_vs_assisted']:.2f}\u00d7 assisted")
    note = f"{row['plain_vs_transformers']:.2f}\u00d7 transformers"
    return [
        *found,
        Bar("specdec-fast, plain", speed["plain"], BARS[2], note),
        Bar("specdec-fast, speculative", speed["speculative"], BARS[0], ", ".join(speculative), strong=True),
    ]


def draw() -> Figure:
    """Draws one group per setting."""
    result = read(RESULT)
    rows = {row["setting"]: row for row in result["rows"]}
    groups = [Group(words, bars(rows[setting])) for setting, words in SETTINGS.items()]
    any_row = rows[next(iter(SETTINGS))]
    most = max(bar.value for group in groups for bar in group.bars)
    ticks = [tick for tick in range(0, 10_000, 500) if tick <= most]
    scale = Scale(most * 1.02, ticks, "tokens/s", left=164)
    figure, axes = page(height(groups, scale) + 100)
    below = f"temperature 1, one request, {any_row['prompts']} prompts, {any_row['new_tokens']} new tokens each"
    heading(axes, 18, "Tokens per second, bundled pair on a CPU", below)
    bottom = draw_bars(axes, 52, groups, scale)
    caption = f"{source(RESULT, result['environment'])}\n{MEDIANS}"
    write(axes, 12, bottom + 10, caption, fontsize=SMALL, color=MUTED, va="top")
    return figure
