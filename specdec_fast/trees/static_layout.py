"""Layouts of static trees: the place of every node of a batch, level by level, before any token is known.

A layout follows from topology and budgets. Drafters can therefore stage, score and fill whole levels without reading
sampled tokens. If a distribution yields no token for a place, the place and everything below it stay empty.
Tests: tests/drafters/test_host_reads.py, tests/drafters/test_draft_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from specdec_fast.core.device_transfer import current_stream_id, host_to_device
from specdec_fast.core.draft import Draft
from specdec_fast.trees.static_shape import Shape

EMPTY = -1
"""Token of an empty place."""


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes that get children, of all trees that grow at this level.

    Attributes:
        places: Indices of these trees in the batch.
        draft: The trees down to these nodes; rows and tokens are filled in later.
        sizes: Growing nodes of each tree.
        ends: The growing nodes among the nodes of the draft.
        children: Children of each growing node, int32.
        widest: Most children of one node.
        staged: The draft's nodes among all nodes, int64.
        at: The children among all nodes, int64.
        above: Parent of each child among all nodes, int64.
        picked: Index of each child in [growing nodes, widest], int64.
        before: The node before the first child of each growing node, int64.
        roots: The root of each growing node, int64.
    """

    places: tuple[int, ...]
    draft: Draft
    sizes: tuple[int, ...]
    ends: list[int]
    children: Tensor
    widest: int
    staged: Tensor
    at: Tensor
    above: Tensor
    picked: Tensor
    before: Tensor
    roots: Tensor


@dataclass(frozen=True, slots=True)
class StaticLayout:
    """The nodes of a batch's trees on one axis, row after row, each tree level by level.

    Attributes:
        parents: Parent of every node in its tree, per row.
        sources: Index of the distribution of every node's token, per row, counted over growing nodes level by level.
        above: Parent of every node on the packed axis, int64; a root is its own parent.
        levels: The levels.
    """

    parents: list[list[int]]
    sources: list[list[int]]
    above: Tensor
    levels: list[Level]

    def table(self, roots: Sequence[int]) -> Tensor:
        """Builds int64 [2, nodes]: tokens, of which the roots are known, and proposal kinds."""
        tokens: list[int] = []
        for root, parents in zip(roots, self.parents):
            tokens += [root, *[EMPTY] * (len(parents) - 1)]
        return host_to_device(tokens + [0] * len(tokens), torch.int64, self.above.device).view(2, -1)

    def draw_numbers(self, tokens: Tensor, level: Level) -> Tensor:
        """Returns the number of the first draw of each growing node, int32. Empty nodes draw nothing."""
        present = (tokens[self.above] != EMPTY).cumsum(0, dtype=torch.int32)
        return present[level.before] - present[level.roots]

    def trees(self, tokens: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Returns (tokens, parents) of every row's tree, with EMPTY ones."""
        ends = list(accumulate(map(len, self.parents)))
        return [(list(tokens[a:b]), parents) for a, b, parents in zip([0, *ends], ends, self.parents)]


def static_layout(shape: Shape, limits: tuple[int, ...], device: torch.device) -> StaticLayout:
    """Returns the layout of trees with the first `limits` nodes of a topology.

    Args:
        shape: The topology.
        limits: Draft nodes of each row.
        device: Device of the tensors.

    Returns:
        A cached layout. Its tensors must not be changed.
    """
    return _cached_layout(shape, limits, device, current_stream_id(device))


@lru_cache(maxsize=256)
def _cached_layout(shape: Shape, limits: tuple[int, ...], device: torch.device, stream: int) -> StaticLayout:
    """Tensors are written in the order of a stream, so every stream has its own layouts."""
    trees = [_by_level(shape, limit) for limit in limits]
    starts = list(accumulate((len(parents) for parents, _ in trees), initial=0))
    above = [start + max(parent, 0) for start, (parents, _) in zip(starts, trees) for parent in parents]
    sources = [[EMPTY] * len(parents) for parents, _ in trees]
    levels: list[Level] = []
    with torch.inference_mode(False):  # cached tensors are used inside and outside of it
        while True:
            found = _level(shape, trees, starts, sources, len(levels), device)
            if found is None:
                break
            levels.append(found)
        return StaticLayout(
            [parents for parents, _ in trees], sources, host_to_device(above, torch.int64, device), levels
        )


@lru_cache(maxsize=512)
def _by_level(shape: Shape, limit: int) -> tuple[list[int], list[list[tuple[int, list[int]]]]]:
    """Parents of a topology's first nodes, level by level; per level the nodes with children, and these children."""
    children, order = shape.children(limit), [0]
    for node in order:  # grows while it is read: breadth-first
        order.extend(children[node])
    place = {node: at for at, node in enumerate(order)}
    parents = [place.get(shape.parents[node], -1) for node in order]
    levels, newest = [], [0]
    while newest:
        growing = [(place[node], [place[child] for child in children[node]]) for node in newest if children[node]]
        if growing:
            levels.append(growing)
        newest = [child for node in newest for child in children[node]]
    return parents, levels


def _level(
    shape: Shape,
    trees: Sequence[tuple[list[int], list[list[tuple[int, list[int]]]]]],
    starts: Sequence[int],
    sources: list[list[int]],
    depth: int,
    device: torch.device,
) -> Level | None:
    """The nodes at a depth that get children, or None. Fills `sources` for these children."""
    places = tuple(place for place, (_, levels) in enumerate(trees) if len(levels) > depth)
    if not places:
        return None
    used = 1 + max(source for own in sources for source in own)
    ends: list[int] = []
    begun: list[tuple[list[int], list[int]]] = []
    staged: list[int] = []
    families: list[tuple[int, int, list[int]]] = []  # place, node in its tree, children
    for place in places:
        parents, levels = trees[place]
        size, first = levels[depth][0][1][0], len(staged)  # the first child is the first node of the next level
        begun.append(([0] * size, parents[:size]))
        staged += range(starts[place], starts[place] + size)
        ends += [first + node for node, _ in levels[depth]]
        families += [(place, node, children) for node, children in levels[depth]]
    widest = max(len(children) for *_, children in families)
    at: list[int] = []
    above: list[int] = []
    picked: list[int] = []
    for number, (place, node, children) in enumerate(families):
        at += [starts[place] + child for child in children]
        above += [starts[place] + node] * len(children)
        picked += range(number * widest, number * widest + len(children))
        for child in children:
            sources[place][child] = used + number
    parts = (
        staged,
        at,
        above,
        picked,
        [starts[place] + children[0] - 1 for place, _, children in families],
        [starts[place] for place, *_ in families],
    )
    if shape.is_chain:
        draft = Draft.chains(range(len(places)), [tokens for tokens, _ in begun], device=device)
    else:
        draft = Draft.trees(range(len(places)), begun, device=device)
        draft = replace(draft, plan=draft.get_plan())
    return Level(
        places,
        draft,
        tuple(len(trees[place][1][depth]) for place in places),
        ends,
        host_to_device([len(children) for *_, children in families], torch.int32, device),
        widest,
        *host_to_device([each for part in parts for each in part], torch.int64, device).split(
            [len(part) for part in parts]
        ),
    )
