"""Shapes of static token trees: by widths, by a list of parents, or the best one for measured acceptance rates.

A shape says how many children each node gets and nothing of tokens, so it may be settled before anything is drawn.
Tests: tests/trees/test_topology.py.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = "specdec tree shape 1"


@dataclass(frozen=True)
class Shape:
    """parents[i]: parent of node i, -1 for the root, which is node 0; parents come first, siblings by rank.

    A budget of n nodes takes the first n nodes behind the root.

    Raises ValueError for a list that is no such tree.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.parents):
            if (node == 0) != (parent == -1) or not -1 <= parent < max(node, 1):
                raise ValueError(
                    f"tree shape: node {node} has parent {parent}; expected -1 for node 0, an earlier node for others"
                )
        if len(self.parents) < 2:
            raise ValueError(f"tree shape: got {len(self.parents)} nodes; expected a root and at least one more")

    @property
    def num_nodes(self) -> int:
        """Nodes, root not counted."""
        return len(self.parents) - 1

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has exactly one child."""
        return self.parents == tuple(range(-1, self.num_nodes))

    def children(self, limit: int) -> tuple[tuple[int, ...], ...]:
        """Children of every node among the first `limit` behind the root."""
        return _children(self.parents, limit)


@lru_cache(maxsize=256)
def _children(parents: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in parents[: limit + 1]]
    for node, parent in enumerate(parents[: limit + 1]):
        if parent >= 0:
            found[parent].append(node)
    return tuple(map(tuple, found))


def shape_of_widths(widths: Sequence[int]) -> Shape:
    """(3, 2, 1): three children, two for each of them, one for each of those. Level by level."""
    parents, level = [-1], [0]
    for width in widths:
        following = []
        for node in level:
            for _ in range(width):
                following.append(len(parents))
                parents.append(node)
        level = following
    return Shape(tuple(parents))


def expected_tokens(shape: Shape, rates: Sequence[Sequence[float]]) -> float:
    """Tokens per step of a shape, the target's own one included. rates[d][r]: chance that the walk, being at depth d,
    goes on to the child of rank r. Depths and ranks beyond the table count nothing.
    """
    reach, depth, taken = [1.0], [0], [0] * len(shape.parents)
    for parent in shape.parents[1:]:
        level, rank = depth[parent], taken[parent]
        taken[parent] += 1
        known = rates[level] if level < len(rates) else ()
        reach.append(reach[parent] * (known[rank] if rank < len(known) else 0.0))
        depth.append(level + 1)
    return sum(reach)


def best_shape(rates: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The shape of `nodes` nodes behind the root that promises most tokens per step; any first part of it is best too.

    rates as in `expected_tokens`; of every depth they must not increase with the rank (measured ones are made so). A
    child's chance to be reached is at most its parent's, so taking the likeliest open place again and again is optimal
    and needs no table: the optimum of the dynamic program of Sequoia (Chen et al. 2024), section 3.1, for rates by
    depth.

    Raises ValueError for rates outside [0, 1], an empty table or no nodes.
    """
    if nodes < 1 or not rates or not rates[0]:
        raise ValueError(
            f"best shape: got {nodes} nodes and {len(rates)} depths of rates; expected at least one of both"
        )
    if any(not 0 <= rate <= 1 for row in rates for rate in row):
        raise ValueError("best shape: got a rate outside [0, 1]; expected chances")
    falling = [[min(row[: rank + 1]) for rank in range(len(row))] for row in rates]
    parents, depth, reach, taken = [-1], [0], [1.0], [0]
    places: list[tuple[float, int]] = []  # chance of a node's next child, and the node

    def offer(node: int) -> None:
        level, rank = depth[node], taken[node]
        if level < len(falling) and rank < len(falling[level]) and falling[level][rank] > 0:
            heapq.heappush(places, (-reach[node] * falling[level][rank], node))

    offer(0)
    while places and len(parents) <= nodes:
        chance, parent = heapq.heappop(places)
        taken[parent] += 1
        parents.append(parent)
        depth.append(depth[parent] + 1)
        reach.append(-chance)
        taken.append(0)
        offer(parent)
        offer(len(parents) - 1)
    return Shape(tuple(parents))


def write_shape(path: Path, shape: Shape, facts: Mapping[str, Any]) -> None:
    """JSON with the shape and what it was made from."""
    path.write_text(json.dumps({"format": FORMAT, "parents": list(shape.parents), **facts}, indent=2) + "\n")


def read_shape(path: str | Path) -> Shape:
    """The shape in a file of `write_shape`. Raises ValueError for anything else."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tree shape {path}: {error.strerror}; make one with `specdec tune tree`") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("parents"), list):
        raise ValueError(f"tree shape {path}: not a file of format {FORMAT!r}; make one with `specdec tune tree`")
    try:
        return Shape(tuple(int(parent) for parent in found["parents"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tree shape {path}: {error}") from None
