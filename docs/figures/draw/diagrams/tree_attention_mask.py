"""A packed token tree beside its attention mask, which `tree_plan` makes from the parents."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures.draw.diagrams.token_tree import recorded, shown
from docs.figures.draw.shapes import box, elbow, heading, write
from docs.figures.draw.style import BLUE, GREEN, GRID, INK, LINE, MONO, MUTED, PALE, SMALL, page

TITLE = "A token tree and its attention mask"
DESCRIPTION = (
    "The eleven nodes of a drafted tree on one packed axis, with their depths, and the mask of the target pass: each "
    "node attends to all committed tokens, to its ancestors and to itself, and to no other branch."
)

PREFIX, CELL = 3, 21.0  # columns of committed tokens that are shown; points
TREE, MASK, LEFT = 40.0, 240.0, 138.0


def draw() -> Figure:
    """Draws the tree of the second step of `token-tree.svg`."""
    from specdec_fast.core.draft import Draft

    step = recorded()["steps"][1]
    tokens, parents = [shown(token) for token in step["tokens"]], step["parents"]
    draft = Draft.trees([0], [(list(range(len(parents))), parents)])
    plan = draft.get_plan()
    depths = plan.depth.tolist()
    words = plan.ancestors.tolist()
    seen = [[bool(row[node // 32] >> node % 32 & 1) for node in range(len(parents))] for row in words]
    figure, axes = page(MASK + CELL * len(parents) + 84)
    heading(axes, 18, "The tree, its nodes numbered in packed order")
    _tree(axes, tokens, parents, depths)
    heading(axes, MASK - 48, "Who attends to whom")
    _mask(axes, tokens, depths, seen)
    return figure


def _tree(axes: Axes, tokens: list[str], parents: list[int], depths: list[int]) -> None:
    children = {node: [at for at, parent in enumerate(parents) if parent == node] for node in range(len(parents))}
    y: dict[int, float] = {}
    lines = iter(range(len(parents)))

    def place(node: int) -> float:
        below = [place(child) for child in children[node]]
        y[node] = (below[0] + below[-1]) / 2 if below else TREE + next(lines) * 30
        return y[node]

    place(0)
    for node, token in enumerate(tokens):
        x = 20 + depths[node] * 112
        if node:
            elbow(axes, (x - 112 + 84, y[parents[node]] + 11), (x, y[node] + 11))
        box(axes, x, y[node], 84, 22, f"{node}  {token}", BLUE if node else INK, fontsize=SMALL, family=MONO)


def _mask(axes: Axes, tokens: list[str], depths: list[int], seen: list[list[bool]]) -> None:
    count = len(tokens)
    for text, x, side in (("node", 12, "left"), ("depth", LEFT - 14, "right")):
        write(axes, x, MASK - 11, text, fontsize=SMALL, color=MUTED, ha=side)
    own = LEFT + PREFIX * CELL + 8  # where columns of nodes begin
    write(axes, LEFT, MASK - 26, "committed", fontsize=SMALL, color=MUTED)
    for at in range(PREFIX):
        write(axes, LEFT + (at + 0.5) * CELL, MASK - 11, "\u2026", ha="center", fontsize=SMALL, color=MUTED)
    for node in range(count):
        middle = own + (node + 0.5) * CELL
        write(axes, middle, MASK - 11, str(node), ha="center", fontsize=SMALL, family=MONO)
    for row, token in enumerate(tokens):
        y = MASK + row * CELL
        write(axes, 12, y + CELL / 2, f"{row:2} {token}", fontsize=SMALL, family=MONO)
        write(axes, LEFT - 14, y + CELL / 2, str(depths[row]), fontsize=SMALL, family=MONO, ha="right")
        for at in range(PREFIX):
            _cell(axes, LEFT + at * CELL, y, BLUE)
        for column in range(count):
            colour = GREEN if seen[row][column] else None
            _cell(axes, own + column * CELL, y, colour, "\u25cf" if row == column else "")
    below = MASK + count * CELL + 20
    for x, colour, text in ((12, BLUE, "committed token"), (162, GREEN, "ancestor"), (262, GREEN, "the node itself")):
        _cell(axes, x, below - CELL / 2, colour, "\u25cf" if "itself" in text else "")
        write(axes, x + CELL + 6, below, text, fontsize=SMALL)
    words = "White: no attention. A branch never sees its siblings: one\npass scores each branch as if it stood alone."
    write(axes, 12, below + 34, words, fontsize=SMALL, color=MUTED)


def _cell(axes: Axes, x: float, y: float, colour: str | None, mark: str = "") -> None:
    face = PALE[colour] if colour else "white"
    edge = colour or GRID
    axes.add_patch(
        Rectangle((x + 1, y + 1), CELL - 2, CELL - 2, facecolor=face, edgecolor=edge, linewidth=0.9 if colour else 0.7)
    )
    if mark:
        write(axes, x + CELL / 2, y + CELL / 2, mark, ha="center", fontsize=7, color=colour or LINE)
