"""A pass and a commit over recurrent layers: records of tree nodes, replayed into a real `RecurrentStates`."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.figures.draw.diagrams.token_tree import recorded, shown
from docs.figures.draw.shapes import arrow, box, elbow, heading, write
from docs.figures.draw.style import BLUE, GREEN, GREY, INK, MONO, MUTED, SMALL, page

TITLE = "Recurrent states before and after a commit"
DESCRIPTION = (
    "A row has one committed state. A pass over a token tree reads it and writes one record for each node. The commit "
    "replays the records of the accepted path into the state, root first, and drops all records."
)

TREE, STEP, WIDE, HIGH = 116.0, 84.0, 72.0, 23.0  # left edge of the root, columns, nodes
CELL = 39.6


def replayed() -> dict[str, Any]:
    """Commits the path of the second tree of `token-tree.svg`, and reads back which records the state holds.

    Each node adds another power of two to a state that forgets nothing.

    Returns:
        Words, parents and path of the tree; the nodes whose records the state holds; and bytes of a state and a record.
    """
    import torch

    from specdec_fast.cache.recurrent_states import Record, RecurrentStates
    from specdec_fast.cache.shapes import StateShape, WindowShape

    step = recorded()["steps"][1]
    count = len(step["tokens"])
    states = RecurrentStates([StateShape(1, 1, 1, 1, 1)], max_rows=2, dtype=torch.float32)
    powers = 2.0 ** torch.arange(count).view(-1, 1, 1)
    states.records[0] = Record(torch.ones(count, 1, 1), powers, torch.zeros(count, 1))
    row, length = torch.tensor([1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    states.commit(row, length, torch.tensor([step["path"]], dtype=torch.int32))
    total = int(states.states[0][1])
    large = (WindowShape(3, 8192), StateShape(heads=32, key_dim=128, value_dim=128, groups=16, gates=32)) * 36
    qwen = RecurrentStates(large, max_rows=1, dtype=torch.bfloat16, device="meta")
    return {
        "words": [shown(token) for token in step["tokens"]], "parents": step["parents"], "path": step["path"],
        "held": [node for node in range(count) if total >> node & 1],
        "state": qwen.bytes_per_row(torch.bfloat16), "record": qwen.bytes_per_node(torch.bfloat16),
    }  # fmt: skip


def draw() -> Figure:
    """Draws the pass above the commit."""
    found = replayed()
    figure, axes = page(448)
    heading(axes, 18, "The pass reads the state and writes records", "a row has one state; each node has one record")
    low = _tree(axes, 62.0, found)
    write(axes, 12, low + 12, "records of this pass", fontsize=SMALL, color=MUTED)
    _cells(axes, low + 24, list(range(len(found["words"]))), found["held"])
    words = "a record: input of the convolution; key, added value and gate"
    write(axes, 12, low + 62, words, fontsize=SMALL, color=MUTED)
    top = low + 98
    path = len(found["held"])
    heading(
        axes, top, "The commit replays the accepted path", f"{path} records, root first; all records are then dropped"
    )
    _replay(axes, top + 42, found)
    y = top + 118
    for (colour, text), x in zip(
        ((BLUE, "state"), (GREEN, "root and accepted"), (GREY, "not accepted")), (12, 92, 242)
    ):
        box(axes, x, y - 8, 16, 16, colour=colour)
        write(axes, x + 22, y, text, fontsize=SMALL)
    state, record = (found[name] / 2**20 for name in ("state", "record"))
    words = f"With the shape of Qwen3-Next: {state:.0f} MiB per state, {record:.1f} MiB per record."
    write(axes, 12, y + 26, words, fontsize=SMALL, color=MUTED)
    return figure


def _tree(axes: Axes, top: float, found: dict[str, Any]) -> float:
    """Draws the state and the tree behind it; returns the lower edge."""
    parents, words, held = found["parents"], found["words"], found["held"]
    children = {node: [at for at, parent in enumerate(parents) if parent == node] for node in range(len(parents))}
    places: dict[int, tuple[float, float]] = {}
    lines = iter(range(len(parents)))

    def place(node: int, depth: int) -> float:
        below = [place(child, depth + 1) for child in children[node]]
        y = (below[0] + below[-1]) / 2 if below else top + (next(lines) + 0.5) * 30
        places[node] = (TREE + depth * STEP, y)
        return y

    root = place(0, 0)
    _state(axes, 12, root, "state of\nthe row")
    arrow(axes, (12 + 76, root), (TREE - 2, root))
    for node, (x, y) in places.items():
        colour = GREEN if node in held else GREY
        if node:
            before = places[parents[node]]
            look = {"color": GREEN, "linewidth": 2.4, "zorder": 3} if node in held else {}
            elbow(axes, (before[0] + WIDE, before[1]), (x, y), **look)
        box(axes, x, y - HIGH / 2, WIDE, HIGH, f"{node} {words[node]}", colour, fontsize=SMALL, family=MONO)
    return max(y for _, y in places.values()) + 15


def _state(axes: Axes, x: float, y: float, text: str) -> None:
    box(axes, x, y - 20, 74, 40, text, BLUE, fontsize=SMALL, line=1.8)


def _cells(axes: Axes, top: float, nodes: list[int], held: list[int]) -> None:
    for at, node in enumerate(nodes):
        colour = GREEN if node in held else GREY
        look = {"color": INK if node in held else MUTED, "weight": "bold" if node in held else "normal"}
        box(axes, 12 + at * CELL, top, CELL - 5, HIGH, str(node), colour, fontsize=SMALL, family=MONO, **look)


def _replay(axes: Axes, top: float, found: dict[str, Any]) -> None:
    y, wide, step = top + 20, 56.0, 67.0
    _state(axes, 12, y, "state of\nthe row")
    end = 86.0
    for at, node in enumerate(found["held"]):
        x = 98 + at * step
        arrow(axes, (end + 1, y), (x - 1, y))
        box(axes, x, y - HIGH / 2, wide, HIGH, f"{node} {found['words'][node]}", GREEN, fontsize=SMALL, family=MONO)
        end = x + wide
    arrow(axes, (end + 1, y), (end + 13, y))
    _state(axes, end + 14, y, "new state")
