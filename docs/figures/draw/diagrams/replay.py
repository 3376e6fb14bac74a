"""Replay: drafter and target add the same Gumbel noise to their log-probabilities, so both often pick one token."""

from __future__ import annotations

from math import log

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.draw.shapes import heading, write
from docs.figures.draw.style import BLUE, GREEN, GREY, GRID, MONO, MUTED, ORANGE, PALE, PURPLE, SMALL, page

TITLE = "Replay: shared Gumbel noise"
DESCRIPTION = (
    "Two positions over a vocabulary of seven tokens. At both, drafter and target add the same noise to their own "
    "log-probabilities and take the largest sum. At the first they pick the same token, which is accepted. At the "
    "second they differ, and the token of the target is emitted."
)

WORDS = ("the", "a", "his", "that", "all", "my", "no")
TARGET = (0.34, 0.20, 0.14, 0.12, 0.10, 0.06, 0.04)
DRAFT = (0.22, 0.30, 0.08, 0.18, 0.06, 0.12, 0.04)
SEED, FIRST = 4, 0
ROW, LEFT, WIDE = 19.0, 66.0, 118.0


def sums(position: int) -> tuple[list[float], list[float], list[float]]:
    """The noise of a position, and the sums of drafter and target."""
    import torch

    from specdec_kernels.random import replay_noise

    seeds, positions = torch.tensor([SEED]), torch.tensor([position], dtype=torch.int32)
    noise = replay_noise(seeds, positions, len(WORDS))[0].tolist()
    return noise, [log(q) + g for q, g in zip(DRAFT, noise)], [log(p) + g for p, g in zip(TARGET, noise)]


def agree(position: int) -> bool:
    """Whether both pick the same token there."""
    _, draft, target = sums(position)
    return draft.index(max(draft)) == target.index(max(target))


def draw() -> Figure:
    """Draws the first position at which both agree and the first at which they do not."""
    places = range(FIRST, FIRST + 50)
    same, other = next(at for at in places if agree(at)), next(at for at in places if not agree(at))
    figure, axes = page(446)
    _position(axes, 18, same, f"Position {same}: the same token, so the draft is accepted")
    _position(axes, 244, other, f"Position {other}: not the same token, so the target's is emitted")
    return figure


def _position(axes: Axes, top: float, position: int, title: str) -> None:
    noise, draft, target = sums(position)
    heading(axes, top, title)
    columns = (("noise g", noise, GREY), ("draft: log q + g", draft, PURPLE), ("target: log p + g", target, BLUE))
    low, high = min(map(min, (noise, draft, target))), max(map(max, (noise, draft, target)))
    scale = (WIDE - 12) / (high - low)
    first = top + 46
    for at, (name, values, colour) in enumerate(columns):
        left = LEFT + at * (WIDE + 12)
        zero = left + 6 - low * scale
        write(axes, left, top + 26, name, fontsize=SMALL, weight="bold", color=colour)
        axes.plot((zero, zero), (first - 8, first + ROW * len(WORDS) - 8), color=GRID, linewidth=1)
        best = values.index(max(values)) if at else None
        for line, value in enumerate(values):
            y = first + line * ROW
            chosen = line == best
            start, width = (zero, value * scale) if value >= 0 else (zero + value * scale, -value * scale)
            face = colour if chosen else PALE[colour]
            axes.add_patch(Rectangle((start, y - 6), width, 12, facecolor=face, edgecolor=colour, linewidth=0.9))
            if chosen:
                axes.plot([left - 3], [y], marker=">", markersize=6, color=colour)
    for line, word in enumerate(WORDS):
        write(axes, 12, first + line * ROW, word, family=MONO, fontsize=SMALL)
    picked, wanted = (WORDS[values.index(max(values))] for values in (draft, target))
    y = first + ROW * len(WORDS) + 6
    result = f"Emitted: {wanted}." if picked == wanted else f"Drafted: {picked}. Emitted: {wanted}."
    write(axes, 12, y, result, weight="bold", color=GREEN if picked == wanted else ORANGE)
    write(axes, 449, y, "a mark shows the largest sum", fontsize=SMALL, color=MUTED, ha="right")
