"""Topologies of static token trees: by widths, by a list of parents, or the best one for measured acceptance rates.

A topology says how many children each node gets. It contains no tokens, so it can be fixed before tokens are sampled.
Tests: tests/trees/test_static_shape.py.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = "specdec tree shape 1"


@dataclass(frozen=True)
class Shape:
    """The topology of a static tree. A budget of n nodes uses the first n nodes behind the root.

    Attributes:
        parents: Parent of each node, -1 for node 0, the root. Parents precede children, siblings are ordered by rank.

    Raises:
        ValueError: If the list is no such tree.
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
        """Returns the children of every node among the first `limit` nodes behind the root."""
        return _children(self.parents, limit)


@lru_cache(maxsize=256)
def _children(parents: tuple[int, ...], limit: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in parents[: limit + 1]]
    for node, parent in enumerate(parents[: limit + 1]):
        if parent >= 0:
            found[parent].append(node)
    return tuple(map(tuple, found))


def shape_of_widths(widths: Sequence[int]) -> Shape:
    """Builds a topology from the number of children per level.

    Args:
        widths: Children of each node by level. (3, 2, 1): three children, two for each of them, one for each of those.

    Returns:
        The topology, numbered level by level.
    """
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
    """Computes the expected tokens per step of a topology, the target's own token included.

    Args:
        shape: The topology.
        rates: `rates[d][r]` is the probability that an accepted path of depth d continues to the child of rank r.
            Depths and ranks beyond the table count 0.

    Returns:
        Expected tokens.
    """
    return sum(_reach(shape, rates)[1])


def _reach(shape: Shape, rates: Sequence[Sequence[float]]) -> tuple[list[int], list[float]]:
    """Returns the depth of every node and the probability that it is accepted."""
    reach, depth, taken = [1.0], [0], [0] * len(shape.parents)
    for parent in shape.parents[1:]:
        level, rank = depth[parent], taken[parent]
        taken[parent] += 1
        known = rates[level] if level < len(rates) else ()
        reach.append(reach[parent] * (known[rank] if rank < len(known) else 0.0))
        depth.append(level + 1)
    return depth, reach


def expected_spread(shape: Shape, rates: Sequence[Sequence[float]], tokens: int) -> float:
    """Computes half the width of the 95 % interval of `expected_tokens`, for rates measured on a text.

    Steps that do not overlap count as independent, so a text of N tokens counts as N / E steps of E expected tokens.

    Args:
        shape: The topology.
        rates: As in `expected_tokens`.
        tokens: Tokens that the rates were measured on.

    Returns:
        Tokens per step.
    """
    by_level: dict[int, float] = {}
    for level, chance in zip(*_reach(shape, rates)):
        by_level[level] = by_level.get(level, 0.0) + chance
    mean = sum(by_level.values())
    # accepted lengths are levels + 1, and by_level[d] is the chance of at least d + 1 tokens
    squares = sum((2 * level + 1) * chance for level, chance in by_level.items())
    return 1.96 * math.sqrt(max(squares - mean**2, 0.0) * mean / max(tokens, 1))


def best_shape(rates: Sequence[Sequence[float]], nodes: int) -> Shape:
    """Finds the topology with the most expected tokens per step. Every prefix of it is optimal too.

    A child's probability is at most its parent's, so adding the likeliest open place again and again is optimal. For
    rates by depth this equals the optimum of the dynamic program of Sequoia.

    Args:
        rates: As in `expected_tokens`. Measured rates that increase with the rank are lowered.
        nodes: Nodes behind the root.

    Returns:
        The topology, with fewer nodes if the table ends.

    Raises:
        ValueError: If a rate is outside [0, 1], the table is empty, or there are no nodes.

    Source:
        Chen et al. 2024 (Sequoia), section 3.1.
    """
    if nodes < 1 or not rates or not rates[0]:
        raise ValueError(
            f"best shape: got {nodes} nodes and {len(rates)} depths of rates; expected at least one of both"
        )
    if any(not 0 <= rate <= 1 for row in rates for rate in row):
        raise ValueError("best shape: got a rate outside [0, 1]; expected probabilities")
    falling = [[min(row[: rank + 1]) for rank in range(len(row))] for row in rates]
    parents, depth, reach, taken = [-1], [0], [1.0], [0]
    heap: list[tuple[float, int]] = []  # negative probability of a node's next child, and the node

    def push_child(node: int) -> None:
        """Adds the next child of a node to the heap."""
        level, rank = depth[node], taken[node]
        if level < len(falling) and rank < len(falling[level]) and falling[level][rank] > 0:
            heapq.heappush(heap, (-reach[node] * falling[level][rank], node))

    push_child(0)
    while heap and len(parents) <= nodes:
        negative, parent = heapq.heappop(heap)
        taken[parent] += 1
        parents.append(parent)
        depth.append(depth[parent] + 1)
        reach.append(-negative)
        taken.append(0)
        push_child(parent)
        push_child(len(parents) - 1)
    return Shape(tuple(parents))


def write_shape(path: Path, shape: Shape, facts: Mapping[str, Any]) -> None:
    """Writes a topology as JSON.

    Args:
        path: The file.
        shape: The topology.
        facts: Further fields: how it was made.
    """
    path.write_text(json.dumps({"format": FORMAT, "parents": list(shape.parents), **facts}, indent=2) + "\n")


def read_shape(path: str | Path) -> Shape:
    """Reads a topology from a file of `write_shape`.

    Args:
        path: The file.

    Returns:
        The topology.

    Raises:
        ValueError: If the file cannot be read or is no such file.
    """
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
