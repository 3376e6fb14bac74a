"""One CUDA-graph step: what the graph contains, what the host does, and the ring of results between them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.imports import constant, home
from docs.figures.draw.shapes import arrow, box, heading, write
from docs.figures.draw.style import BLUE, GREEN, GREY, INK, LINE, MONO, MUTED, ORANGE, PURPLE, SMALL, page

TITLE = "One CUDA-graph step"
DESCRIPTION = (
    "The host reserves pages, replays a captured graph and reads the results of the step before. The graph contains "
    "propose, plan, score, verify, commit, append and observe over tensors that stay in place, and its results are "
    "copied to a ring of pinned buffers."
)

HOST, WIDE, DEVICE, RIGHT = 12.0, 150.0, 206.0, 449.0
STAGES = (
    ("propose", "draft passes", PURPLE), ("plan", "tree_plan", BLUE), ("score", "target pass", BLUE),
    ("verify", "rule", GREEN), ("commit", "keys, values", BLUE), ("append", "tokens, lengths", ORANGE),
    ("observe", "drafter state", PURPLE),
)  # fmt: skip


def draw() -> Figure:
    """Draws the graph beside the host, and three steps in time."""
    figure, axes = page(590)
    heading(axes, 18, "One CUDA-graph step", Path(home("StepProgram")).parent.as_posix())
    write(axes, HOST, 58, "Host", weight="bold")
    write(axes, DEVICE, 58, "Device", weight="bold")
    _device(axes)
    _host(axes)
    _times(axes, 452)
    return figure


def _device(axes: Axes) -> None:
    box(axes, DEVICE, 70, RIGHT - DEVICE, 238, colour=GREY, fill="#f3f5f7", dashed=True)
    write(axes, DEVICE + 10, 84, "CUDA graph, captured once per", fontsize=SMALL, color=MUTED)
    write(axes, DEVICE + 10, 98, "capacity: rows, nodes, greedy or not", fontsize=SMALL, color=MUTED)
    for at, (verb, what, colour) in enumerate(STAGES):
        y = 112 + at * 27
        box(axes, DEVICE + 10, y, 82, 21, verb, colour, weight="bold", fontsize=SMALL)
        write(axes, DEVICE + 102, y + 10.5, what, fontsize=SMALL)
        if at:
            arrow(axes, (DEVICE + 51, y - 6), (DEVICE + 51, y))
    box(
        axes,
        DEVICE,
        322,
        RIGHT - DEVICE,
        40,
        "tensors that stay in place: tokens,\nlengths, page table, keys, values",
        LINE,
    )
    arrow(axes, (DEVICE + 120, 322), (DEVICE + 120, 308))
    arrow(axes, (DEVICE + 134, 308), (DEVICE + 134, 322))


def _host(axes: Axes) -> None:
    words = (
        ("reserve pages for the\nstep under way and this", 84),
        ("set inputs, if changed:\nrows, live, most drafts", 144),
        ("replay the graph\nof step t", 204),
        ("read results of t \u2212 1", 318),
        ("emit tokens, retire\nfinished requests", 384),
    )
    for at, (text, y) in enumerate(words):
        box(axes, HOST, y, WIDE, 38, text, BLUE if at == 2 else LINE, fontsize=SMALL)
        if at:
            arrow(axes, (HOST + WIDE / 2, words[at - 1][1] + 38), (HOST + WIDE / 2, y))
    arrow(axes, (HOST + WIDE, 223), (DEVICE, 223), color=BLUE, linewidth=2)
    count = constant("RING_SIZE", "CudaGraphRunner")
    left, y, wide = DEVICE, 392.0, (RIGHT - DEVICE) / count
    for at in range(count):
        name = ("t \u2212 1", "t", "", "")[at] if at < 4 else ""
        colour = (GREEN, ORANGE)[at] if at < 2 else LINE
        box(axes, left + at * wide + 2, y, wide - 4, 24, name, colour, fontsize=SMALL, family=MONO)
    write(axes, left, y + 36, f"ring of {count} pinned results on the host", fontsize=SMALL, color=MUTED)
    arrow(axes, (left + 1.5 * wide, 362), (left + 1.5 * wide, y), color=ORANGE, linewidth=1.6)
    axes.plot(
        (left + wide / 2, left + wide / 2, DEVICE - 22, DEVICE - 22), (y, 376, 376, 337), color=GREEN, linewidth=1.6
    )
    arrow(axes, (DEVICE - 22, 337), (HOST + WIDE, 337), color=GREEN, linewidth=1.6)


def _times(axes: Axes, top: float) -> None:
    write(axes, 12, top + 8, "The host reads one step behind", weight="bold")
    for lane, y in (("device", top + 36), ("host", top + 90)):
        write(axes, 12, y, lane, fontsize=SMALL, color=MUTED)
    starts = 92.0, 190.0, 298.0, 406.0  # of steps on the device
    for at, (start, end) in enumerate(pairwise(starts), 1):
        box(axes, start, top + 24, end - start - 3, 24, f"step {at}", BLUE, fontsize=SMALL)
    for text, x, step in (("replay 1", 66, 0), ("replay 2", 122, 1), ("replay 3", 242, 2)):
        box(axes, x, top + 78, 54, 24, text, LINE, fontsize=SMALL)
        arrow(axes, (x + 27, top + 78), (starts[step] + 4, top + 48), color=BLUE)
    for text, x, step in (("read 1", 192, 1), ("read 2", 300, 2)):
        box(axes, x, top + 78, 47, 24, text, GREEN, fontsize=SMALL)
        arrow(axes, (starts[step] - 6, top + 48), (x + 24, top + 78), color=GREEN)
    arrow(axes, (66, top + 114), (RIGHT, top + 114), color=INK)
    write(axes, RIGHT, top + 124, "time", fontsize=SMALL, color=MUTED, ha="right")
