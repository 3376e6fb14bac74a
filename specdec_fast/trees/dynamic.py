"""Dynamic trees (EAGLE-2): they grow from the best nodes of each level and keep the best of all nodes.

No size is read from a device. Every level reserves space for all nodes that may grow; unused places have no children,
and nodes behind the last tree belong to no tree. On a CPU, reading sizes is free, and passes are as large as their
trees. CUDA-graph steps and other steps share this code.
Tests: tests/drafters/test_eagle.py, tests/drafters/test_host_reads.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec_fast.core.chain_layout import chain_layout
from specdec_fast.core.draft import Draft
from specdec_kernels import Growth, TreePlan, tree_grow


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes that may get children, tree after tree.

    Attributes:
        level: 0 for the roots.
        sizes: Nodes of each of the B trees.
        bounds: First node of each tree, int32 [B + 1].
        places: The nodes among those of the last pass, int64 [N] or host integers. Unused places name their tree's
            root.
        present: Which places are used, bool [N]. None: all.
    """

    level: int
    sizes: tuple[int, ...]
    bounds: Tensor
    places: Tensor | list[int]
    present: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Packed trees of the best nodes.

    Attributes:
        tokens: Tokens, int64 [B * most], 0 behind the last node.
        parents: Parents, int32 [B * most], -1 behind the last node.
        counts: Nodes of each tree, root included, and depth of its deepest node, int32 [2, B].
        plan: Depths, ancestors and links.
        staged: The scored draft of each level.
    """

    tokens: Tensor
    parents: Tensor
    counts: Tensor
    plan: TreePlan
    staged: list[Draft]


class TreeForward(Protocol):
    """The model that B trees grow by."""

    def dists(self, frontier: Frontier) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns logits [N, V] after nodes of the last pass, and (1/T, cut, tie) for picking their children."""
        ...

    def score(self, draft: Draft) -> None:
        """Scores the next level. The `counts` of the draft are bounds."""
        ...

    def allocate(self, dtype: torch.dtype) -> Growth:
        """Returns memory for the trees, with the tokens of their roots."""
        ...


def host_reads_are_free(device: torch.device) -> bool:
    """Returns whether the host can read this device's memory without waiting."""
    return device.type == "cpu"


def grow(
    forward: TreeForward,
    rows: Tensor,
    frontier: Frontier,
    *,
    depth: int,
    width: int,
    sharpness: float,
    noise: dict[str, Tensor],
    row_ids: tuple[int, ...] | None = None,
) -> GrownTrees:
    """Grows trees level by level.

    Args:
        forward: The model.
        rows: Row of each tree, int32 [B].
        frontier: The roots of trees that may have draft nodes.
        depth: Levels.
        width: Nodes that grow per level, and children considered for each of them.
        sharpness: Exponent on the model's distribution in the scores.
        noise: Seeds and positions for coupled picks, as `tree_grow` takes them; empty without noise.
        row_ids: Rows as host integers. The host then reads the size of every level. None: it reads nothing.

    Returns:
        The trees.

    Source:
        Li et al. 2024 (EAGLE-2), section 4.
    """
    staged = list[Draft]()
    growth: Growth
    for level in range(depth):
        last = level == depth - 1 or not any(frontier.sizes)
        if any(frontier.sizes):
            logits, inv_t, cut, tie = forward.dists(frontier)
            if level == 0:
                growth = forward.allocate(inv_t.dtype)
            if frontier.present is not None:  # an unused place has no children
                cut = torch.where(frontier.present, cut, float("inf"))
        else:  # no node is left to grow
            logits, inv_t, cut, tie = logits[:0], inv_t[:0], cut[:0], tie[:0]
        sizes = {"level": level, "width": width, "last": last, "sharpness": sharpness}
        tokens, parents, counts, plan = tree_grow(logits, inv_t, cut, tie, frontier.bounds, growth, **sizes, **noise)
        if last:
            break
        if row_ids is None:
            draft = _build_bounded_draft(rows, tokens, parents, counts, plan, level + 1)
            frontier = _reserve_frontier(level, width, growth, draft.offsets)
        else:
            now, deepest = counts.tolist()
            draft = Draft.packed(row_ids, tokens, parents, tuple(now), max(deepest), plan)
            frontier = _collect_frontier(level, staged[-1].counts if staged else (1,) * len(now), draft)
        if any(frontier.sizes):
            staged.append(draft)
            forward.score(draft)
    return GrownTrees(tokens, parents, counts, plan, staged)


def _collect_frontier(level: int, previous: tuple[int, ...], draft: Draft) -> Frontier:
    """The nodes that a level has added: the last ones of each tree. previous: nodes at the level before."""
    sizes = tuple([max(new - old, 0) for new, old in zip(draft.counts, previous)])
    stops = accumulate(draft.counts)
    places = [node for stop, size in zip(stops, sizes) for node in range(stop - size, stop)]
    bounds = chain_layout(tuple(range(len(sizes))), sizes, draft.tokens.device).offsets
    return Frontier(level + 1, sizes, bounds, places)


def _reserve_frontier(level: int, width: int, growth: Growth, offsets: Tensor) -> Frontier:
    """Places for all nodes that a level may have added to trees that begin at `offsets`."""
    trees, size, first = growth.tokens.shape[0], min(width, growth.keep), 1 + level * growth.keep
    nodes = growth.nodes[:, first : first + size]
    most = trees * (1 + (level + 1) * size)
    places = (nodes.clamp(min=0) + offsets[:-1, None]).flatten().clamp(max=most - 1).long()
    bounds = torch.arange(trees + 1, dtype=torch.int32, device=offsets.device) * size
    return Frontier(level + 1, (size,) * trees, bounds, places, (nodes >= 0).flatten())


def _build_bounded_draft(
    rows: Tensor, tokens: Tensor, parents: Tensor, counts: Tensor, plan: TreePlan, depth: int
) -> Draft:
    """A draft of deterministic tokens whose counts are bounds."""
    return Draft(
        rows=rows,
        tokens=tokens,
        parents=parents,
        offsets=pad(counts[0].cumsum(0, dtype=torch.int32), (1, 0)),
        proposal_kinds=torch.zeros_like(parents, dtype=torch.int8),
        dist_index=torch.full_like(parents, -1),
        row_of=plan.row.clamp(min=0).long(),
        counts=(tokens.shape[0] // rows.shape[0],) * rows.shape[0],
        max_depth=depth,
        plan=plan,
    )
