"""Tree attention on a GPU beside attention of torch: the rate at which each reads the cache."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from matplotlib.figure import Figure

from docs.figures.draw.bars import Bar, Group, Scale, draw_bars, height, legend
from docs.figures.draw.results import read
from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BARS, MUTED, SMALL, page

RESULT = "gpu_h200_peers.json"
TITLE = "Tree attention on an H200"
DESCRIPTION = (
    "Gigabytes per second that tree attention, FlexAttention and scaled_dot_product_attention read for the same trees, "
    "by number of requests, nodes and cached tokens, with the measured read rate of the GPU as a line. Tree attention "
    "comes close to it for 64 requests with 8 nodes each."
)
SIDES = {"ours (triton)": "specdec-fast", "torch FlexAttention": "FlexAttention", "torch sdpa with mask": "SDPA, mask"}


def draw() -> Figure:
    """Draws a group per shape, with a bar per implementation."""
    found = read(RESULT)
    machine, times = found["machine"], [row for row in found["times"] if row["op"] == "tree_attention"]
    groups = []
    for sizes in dict.fromkeys(row["sizes"] for row in times):
        last = {row["backend"]: row for row in times if row["sizes"] == sizes and row["microseconds"]}
        bars = [
            Bar(name, last[side]["gigabytes_per_s"], colour, note=f"{last[side]['microseconds']:,.0f} \u00b5s")
            for (side, name), colour in zip(SIDES.items(), BARS)
            if side in last
        ]
        groups.append(Group(_shape(sizes), bars))
    scale = Scale(
        machine["read"] * 1.22, (0, 1000, 2000, 3000, 4000), "GB/s", 92, reference=machine["read"], row=15, gap=8
    )
    versions = f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, {machine['date'][:10]}"
    shape = "32 heads of width 128, 8 key and value heads, bfloat16; medians of 20 rounds in turns."
    lines = wrap(f"{shape} Measured on {versions}. benchmarks/results/{RESULT}", 72)
    figure, axes = page(height(groups, scale) + 96 + 13 * len(lines))
    heading(
        axes, 18, "Tree attention on a GPU", "GB/s of what attention must read, and time; dashed: measured read rate"
    )
    legend(axes, 56, tuple(zip(BARS, SIDES.values())))
    bottom = draw_bars(axes, 72, groups, scale)
    write(axes, 12, bottom + 12, "\n".join(lines), fontsize=SMALL, color=MUTED, va="top")
    return figure


def _shape(sizes: str) -> str:
    """The shape of a sample in words."""
    found: dict[str, Any] = dict(word.split("=") for word in sizes.split())
    requests = "1 request" if found["rows"] == "1" else f"{found['rows']} requests"
    return f"{requests}, {found['nodes']} nodes, {int(found['length']):,} cached tokens"
