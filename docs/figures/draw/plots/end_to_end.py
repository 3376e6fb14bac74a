"""Speculative beside plain decoding of the same engine in all settings at temperature 1, on two machines."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import machine, read
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULTS = "end_to_end_cpu.json", "end_to_end_zen4_cpu.json"
TITLE = "Speculative beside plain decoding, by setting"
DESCRIPTION = (
    "Speculative decoding beside plain decoding of the same engine at temperature 1, with one request and with eight, "
    "in float32 and bfloat16, on one thread and two, with eager, compiled and fused forward passes, on two machines."
)
HOW = {"eager": 0, "compiled": 1, "fused forward": 2}


def how(row: dict[str, Any]) -> str:
    """How the target's passes run in a setting."""
    whole = row.get("whole", row.get("fused_forward"))
    return "fused forward" if whole else "compiled" if row["compiled"] else "eager"


def draw() -> Figure:
    """Draws a group for each batch and precision, with a bar for each machine."""
    found = [read(name) for name in RESULTS]
    rows = [
        {(row["batch"], row["dtype"], how(row), row["threads"]): row["speculative_vs_plain"] for row in each["rows"]
         if row["temperature"] == 1.0}
        for each in found
    ]  # fmt: skip
    groups = []
    for batch, dtype in ((1, "float32"), (1, "bfloat16"), (8, "float32"), (8, "bfloat16")):
        settings = sorted({key for each in rows for key in each if key[:2] == (batch, dtype)}, key=_order)
        bars = []
        for key in settings:
            label = f"{key[2]}, {key[3]} thread{'s' if key[3] > 1 else ''}"
            for colour, each in zip((BARS[0], BARS[2]), rows):
                if key in each:
                    bars.append(Bar(label, each[key], colour))
                    label = ""
        groups.append(Group(f"{dtype}, {batch} request{'s' if batch > 1 else ''}", bars))
    scale = Scale(2.6, (0, 0.5, 1, 1.5, 2, 2.5), "times plain", 164, "{:.2f}", 1.0, row=14.5, gap=10)
    figure, axes = page(height(groups, scale) + 118)
    heading(axes, 18, "Speculative beside plain decoding", "temperature 1, the bundled pair; both in one run")
    legend(axes, 56, ((BARS[0], "machine A"), (BARS[2], "machine B")))
    bottom = draw_bars(axes, 74, groups, scale)
    words = [f"{name}: {machine(each['environment'])}" for name, each in zip("AB", found)]
    words.append(" ".join(f"benchmarks/results/{name}" for name in RESULTS))
    write(axes, 12, bottom + 26, "\n".join(words), fontsize=SMALL - 0.4, color=MUTED)
    return figure


def _order(key: tuple[int, str, str, int]) -> tuple[int, int]:
    return HOW[key[2]], key[3]
